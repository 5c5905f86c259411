"""`python -m tests.rollout.serve_scripts --servers 32`: scripted servers in a process of their own, until stdin ends.

The first line of its output is a JSON list of their URLs. With the line `figures` on stdin it writes another one: of
each server the requests, the prompts read and the tokens drawn.
"""

import argparse
import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from tests.rollout.script import Script
from tests.rollout.scripted_server import ScriptedServer, Speed


@dataclass
class Served:
    """A process with scripted servers."""

    process: subprocess.Popen[str]
    urls: list[str]

    def figures(self) -> list[dict[str, int]]:
        """Of each server, as `ScriptedServer` counts."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("figures\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


@contextmanager
def served(servers: int, *, first: int = 0, compress: float = 1.0, slow: float = 1.0) -> Iterator[Served]:
    """Servers number `first` and on; the very first of all is `slow` times as slow as the others."""
    options = ("--servers", servers, "--first", first, "--compress", compress, "--slow", slow)
    command = [sys.executable, "-m", "tests.rollout.serve_scripts", *map(str, options)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield Served(process, json.loads(process.stdout.readline()))
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait(20)


async def serve(options: argparse.Namespace) -> None:
    servers = []
    for number in range(options.first, options.first + options.servers):
        speed = Speed(compress=options.compress, slowness=options.slow if number == 0 else 1.0)
        servers.append(ScriptedServer(Script(), speed, number))
        await servers[-1].start()
    print(json.dumps([server.url for server in servers]), flush=True)
    loop = asyncio.get_running_loop()
    while await loop.run_in_executor(None, sys.stdin.readline):
        figures = [
            {"requests": one.requests, "prefills": one.prefills, "tokens_drawn": one.tokens_drawn} for one in servers
        ]
        print(json.dumps(figures), flush=True)
    for server in servers:
        await server.close()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--servers", type=int, required=True)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--compress", type=float, default=1.0)
    parser.add_argument("--slow", type=float, default=1.0)
    asyncio.run(serve(parser.parse_args(arguments)))


if __name__ == "__main__":
    main()
