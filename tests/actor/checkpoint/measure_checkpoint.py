"""What a training step waits for a checkpoint, and the host memory that takes: written beside training, and at once.

python -m tests.actor.checkpoint.measure_checkpoint         prints a Markdown table (docs/measurements/actor.md)

Both ways take turns in the same processes, on a random model after an optimizer step. Waiting: seconds until training
goes on, by the clock, median of the turns. Peak: the most that the resident set of a process grows by, from the start
of a save until its files are in place, largest over the turns. Training goes on meanwhile where it can.
"""

import functools
import shutil
import tempfile
import time
from pathlib import Path
from statistics import median

import typer

from megatron_dapo.algorithm.policy_loss import PolicyObjective
from megatron_dapo.config.actor_config import LayoutConfig, OptimizerConfig
from tests.actor.actor_update import Lengths, actor_config, start
from tests.actor.peak_memory import begin_peak, peak_resident
from tests.benchmarks.random_model import write_random_model
from tools.rank_pool import RankPlace, RankPool

MIB = 2**20


CASES: dict[str, tuple[LayoutConfig, bool]] = {
    "one process, distributed optimizer": (LayoutConfig(), True),
    "one process, plain optimizer": (LayoutConfig(), False),
    "DP=2, distributed optimizer": (LayoutConfig(data=2), True),
    "TP=2, distributed optimizer": (LayoutConfig(tensor=2), True),
}
"""Name -> how the actor is split, and whether its optimizer's state is too."""


def measure(
    place: RankPlace, layout: LayoutConfig, distributed: bool, model: Path, target: Path, turns: int
) -> dict[str, list[float]]:
    """Of one rank, turn by turn: seconds that training waits, seconds until the files are in place, peak in MiB."""
    optimizer = OptimizerConfig(lr=1e-6, warmup_rollout_steps=0, distributed=distributed)
    config = actor_config(layout=layout, optimizer=optimizer)
    actor, batch = start(place, model, Lengths(responses=2, shortest=128, longest=128), config, "bfloat16")
    update = functools.partial(actor.update, [batch], PolicyObjective(), 1.0)
    update()
    found: dict[str, list[float]] = {}
    for turn in range(turns + 1):
        for way in ("at once", "beside"):
            before, began = begin_peak(), time.perf_counter()
            if way == "at once":
                actor.save_checkpoint(target / way)
                waited = written = time.perf_counter() - began
            else:
                assert actor.begin_checkpoint(target / way), "this machine has no room for the copy"
                waited = time.perf_counter() - began
                while not actor.finish_checkpoint(wait=False):
                    update()
                written = time.perf_counter() - began
            if turn:  # the first one warms up
                figures = {"waited": waited, "written": written, "peak": (peak_resident() - before) / MIB}
                for name, value in figures.items():
                    found.setdefault(f"{way}: {name}", []).append(value)
    return found


def main(folder: Path | None = None, turns: int = 3, layers: int = 4) -> None:
    """Print the table. FOLDER: where checkpoints are written, else a temporary one; LAYERS: of 20 million parameters
    each, 33 more outside of them."""
    with tempfile.TemporaryDirectory(dir=folder) as name, RankPool("cpu") as pool:
        model, target = Path(name) / "model", Path(name) / "checkpoints"
        shape = {"num_hidden_layers": layers, "hidden_size": 1024, "intermediate_size": 5632, "vocab_size": 16001}
        write_random_model(model, **shape)
        target.mkdir()
        print(
            "| layout | files, MiB | at once: waits, s | beside: waits, s | in place after, s "
            "| peak, MiB | beside, MiB |"
        )
        print("|---|---|---|---|---|---|---|")
        for case, (layout, distributed) in CASES.items():
            arguments = (layout, distributed, model, target, turns)
            ranks = pool.run(layout.world_size, measure, *arguments, timeout_s=3600)
            size = sum(file.stat().st_size for file in (target / "at once").iterdir()) / MIB
            cells = [
                f"{size:.0f}",
                f"{median(ranks[0]['at once: waited']):.2f}",
                f"{median(ranks[0]['beside: waited']):.2f}",
                f"{median(ranks[0]['beside: written']):.2f}",
                *("+".join(f"{max(rank[f'{way}: peak']):.0f}" for rank in ranks) for way in ("at once", "beside")),
            ]
            print(f"| {case} | {' | '.join(cells)} |", flush=True)
            shutil.rmtree(target)
            target.mkdir()


if __name__ == "__main__":
    typer.run(main)
