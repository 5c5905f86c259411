"""Speed of tools/convert_checkpoint.py beside `shutil.copy` of the same bytes.

python -m tools.benchmarks.measure_convert > table.md        (docs/measurements.md)

A random model of 2.3 GiB (bfloat16) is written to a temporary folder, copied, converted to a Megatron checkpoint and
back. These take turns, each after a sync, and the fastest of a few rounds counts, so that a ratio of two times is of
one run. The processes are started before; what comes back must be the same bytes. Four times the model is needed on
disk.
"""

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from megatron_dapo.actor.checkpoint.checkpoint_files import digest_of
from megatron_dapo.diagnostics.rank_pool import RankPool
from tools.benchmarks.random_model import write_random_model
from tools.convert_checkpoint import import_megatron


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where the temporary files go (default: the system's)")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--tensor", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    import_megatron()
    from tools.conversion.to_hf import to_hf
    from tools.conversion.to_megatron import to_megatron
    from tools.conversion.workers import start_workers

    with tempfile.TemporaryDirectory(dir=options.folder) as name, RankPool() as pool:
        folder = Path(name)
        size = write_random_model(folder / "model", max_file_bytes=10**9)
        start_workers(pool, options.processes)
        common = {"dtype": None, "workers": options.processes, "pool": pool}
        ways: dict[str, Callable[[], object]] = {
            "shutil.copy": lambda: copy(folder / "model", folder / "copy"),
            "to-megatron": lambda: to_megatron(folder / "model", folder / "megatron", tensor=options.tensor, **common),
            "to-hf": lambda: to_hf(folder / "megatron", folder / "back", base=None, max_file_bytes=10**9, **common),
        }
        seconds = {way: float("inf") for way in ways}
        for _ in range(options.rounds):
            for way, run in ways.items():
                os.sync()
                began = time.monotonic()
                run()
                seconds[way] = min(seconds[way], time.monotonic() - began)
        if digests(folder / "model") != digests(folder / "back"):
            print("what came back is not what went in", file=sys.stderr)
            return 1
    print(f"{size / 2**30:.2f} GiB, {options.processes} processes, TP{options.tensor}, best of {options.rounds}\n")
    print("| way | seconds | GB/s | of shutil.copy |")
    print("|---|---|---|---|")
    for way, best in seconds.items():
        share = seconds["shutil.copy"] / best
        print(f"| {way} | {best:.2f} | {size / best / 1e9:.2f} | {share:.0%} |")
    return 0


def copy(source: Path, target: Path) -> None:
    """Every file of a folder by `shutil.copy`."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    for file in source.iterdir():
        shutil.copy(file, target / file.name)


def digests(folder: Path) -> dict[str, str]:
    """The checksum of each safetensors file."""
    return {file.name: digest_of(file) for file in folder.glob("*.safetensors")}


if __name__ == "__main__":
    sys.exit(main())
