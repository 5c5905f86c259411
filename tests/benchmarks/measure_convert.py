"""Speed of tools/convert_checkpoint.py beside `shutil.copy` of the same bytes.

python -m tests.benchmarks.measure_convert > table.md        (docs/measurements.md)

A random model of 2.3 GiB (bfloat16) is written to a temporary folder, copied, converted to a Megatron checkpoint and
back. These take turns, each after a sync, and the fastest of a few rounds counts, so that a ratio of two times is of
one run. The processes are started before; what comes back must be the same bytes. Four times the model is needed on
disk.
"""

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from megatron_dapo.actor.checkpoint.checkpoint_files import digest_of
from tests.benchmarks.random_model import write_random_model
from tools.convert_checkpoint import import_megatron
from tools.rank_pool import RankPool


def main(folder: Path | None = None, processes: int = 2, tensor: int = 2, rounds: int = 3) -> None:
    """Print the table. FOLDER: where the temporary files go; TENSOR: ranks that the checkpoint is cut for."""
    import_megatron()
    from tools.conversion.directions import to_hf, to_megatron
    from tools.conversion.workers import start_workers

    with tempfile.TemporaryDirectory(dir=folder) as name, RankPool() as pool:
        there = Path(name)
        size = write_random_model(there / "model", max_file_bytes=10**9)
        start_workers(pool, processes)
        common: dict[str, Any] = {"dtype": None, "workers": processes, "pool": pool}
        ways: dict[str, Callable[[], object]] = {
            "shutil.copy": lambda: shutil.copytree(
                there / "model", there / "copy", copy_function=shutil.copy, dirs_exist_ok=True
            ),
            "to-megatron": lambda: to_megatron(there / "model", there / "megatron", tensor=tensor, **common),
            "to-hf": lambda: to_hf(there / "megatron", there / "back", base=None, max_file_bytes=10**9, **common),
        }
        seconds = {way: float("inf") for way in ways}
        for _ in range(rounds):
            for way, run in ways.items():
                os.sync()
                began = time.monotonic()
                run()
                seconds[way] = min(seconds[way], time.monotonic() - began)
        if digests(there / "model") != digests(there / "back"):
            sys.exit("what came back is not what went in")
    print(f"{size / 2**30:.2f} GiB, {processes} processes, TP{tensor}, best of {rounds}\n")
    print("| way | seconds | GB/s | of shutil.copy |")
    print("|---|---|---|---|")
    for way, best in seconds.items():
        share = seconds["shutil.copy"] / best
        print(f"| {way} | {best:.2f} | {size / best / 1e9:.2f} | {share:.0%} |")


def digests(folder: Path) -> dict[str, str]:
    """The checksum of each safetensors file."""
    return {file.name: digest_of(file) for file in folder.glob("*.safetensors")}


if __name__ == "__main__":
    typer.run(main)
