"""`python -m tests.rollout.serve_scripts --servers 32`: scripted servers in a process of their own, until stdin ends.

The first line of its output is a JSON list of their URLs.
"""

import argparse
import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tests.rollout.script import Script
from tests.rollout.scripted_server import ScriptedServer, Speed


@contextmanager
def served(
    servers: int, *, first: int, compress: float, stream_every: int = 0, as_json: bool = False, turns: int = 1
) -> Iterator[list[str]]:
    """URLs of `servers` servers, number `first` and on, that run `compress` modelled seconds in a real one."""
    options = ("--servers", servers, "--first", first, "--compress", compress, "--stream-every", stream_every)
    options += ("--turns", turns)
    command = [sys.executable, "-m", "tests.rollout.serve_scripts", *map(str, options), *(["--json"] * as_json)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield json.loads(process.stdout.readline())
    finally:
        process.stdin.close()
        process.wait(20)


async def serve(options: argparse.Namespace) -> None:
    numbers = range(options.first, options.first + options.servers)
    servers = [ScriptedServer(Script(), Speed(compress=options.compress), number) for number in numbers]
    for server in servers:
        server.stream_interval = options.stream_every or None
        server.packs, server.turns = not options.json, options.turns
        await server.start()
    print(json.dumps([server.url for server in servers]), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    for server in servers:
        await server.close()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--servers", type=int, required=True)
    parser.add_argument("--first", type=int, default=0, help="number of the first one: the seed of its draws")
    parser.add_argument("--compress", type=float, default=1.0, help="modelled seconds in a real one")
    parser.add_argument("--stream-every", type=int, default=0, help="tokens of a segment; 0: whole responses")
    parser.add_argument("--turns", type=int, default=1, help="of an episode")
    parser.add_argument("--json", action="store_true", help="answers no frames, as servers that someone else runs")
    asyncio.run(serve(parser.parse_args(arguments)))


if __name__ == "__main__":
    main()
