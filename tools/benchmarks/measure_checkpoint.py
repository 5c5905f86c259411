"""What a training step waits for a checkpoint, and the host memory that takes: written beside training, and at once.

python -m tools.benchmarks.measure_checkpoint         prints a Markdown table (docs/measurements/actor.md)

Both ways take turns in the same processes, on a random model after an optimizer step. Waiting: seconds until training
goes on, by the clock, median of the turns. Peak: the most that the resident set of a process grows by, from the start
of a save until its files are in place, largest over the turns. Training goes on meanwhile where it can.
"""

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from megatron_dapo.actor.actor import MegatronActor
from megatron_dapo.actor.packing import plan_for_actor
from megatron_dapo.actor.step_data import MiniBatch, Responses
from megatron_dapo.algorithm.policy_loss import SupervisedObjective
from megatron_dapo.config.actor_config import ActorConfig, LayoutConfig, OptimizerConfig
from megatron_dapo.config.run_config import ModelConfig
from megatron_dapo.diagnostics.rank_pool import RankPlace, RankPool
from tools.benchmarks.peak_memory import begin_peak, peak_resident
from tools.benchmarks.random_model import write_random_model

MIB = 2**20
TOKENS = 256


@dataclass(frozen=True, kw_only=True)
class Case:
    """How the actor is split, and which optimizer holds its state."""

    name: str
    layout: LayoutConfig
    distributed: bool

    def start(self, place: RankPlace, model: Path) -> tuple[MegatronActor, Callable[[], Any]]:
        """The actor of one rank, and an update of it."""
        config = ActorConfig(
            layout=self.layout,
            optimizer=OptimizerConfig(lr=1e-6, warmup_rollout_steps=0, distributed=self.distributed),
            device="cpu",
        )
        actor = MegatronActor(
            config,
            ModelConfig(path=str(model), context_length=TOKENS, dtype="bfloat16"),
            rank=place.rank,
            world_size=place.world_size,
            rendezvous=place.rendezvous,
            steps_per_rollout=1,
            seed=0,
            timeout_s=600,
        )
        lengths = np.array([TOKENS // 2] * 2, dtype=np.int32)
        responses = Responses(
            token_ids=np.arange(TOKENS, dtype=np.int32),
            sequence_lengths=lengths,
            prompt_lengths=np.ones(2, dtype=np.int32),
        )
        batch = MiniBatch(
            responses=responses,
            weights=np.full(TOKENS - 2, 1 / TOKENS, dtype=np.float32),
            plan=plan_for_actor(lengths, config, hidden_size=actor.hf.hidden_size),
        )
        return actor, lambda: actor.update([batch], SupervisedObjective(), 1.0)


CASES = (
    Case(name="one process, distributed optimizer", layout=LayoutConfig(), distributed=True),
    Case(name="one process, plain optimizer", layout=LayoutConfig(), distributed=False),
    Case(name="DP=2, distributed optimizer", layout=LayoutConfig(data=2), distributed=True),
    Case(name="TP=2, distributed optimizer", layout=LayoutConfig(tensor=2), distributed=True),
)


def measure(place: RankPlace, case: Case, model: Path, target: Path, turns: int) -> dict[str, list[float]]:
    """Of one rank, turn by turn: seconds that training waits, seconds until the files are in place, peak in MiB."""
    actor, update = case.start(place, model)
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


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where checkpoints are written; else a temporary folder")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--layers", type=int, default=4, help="of 20 million parameters each; 33 more outside of them")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name, RankPool("cpu") as pool:
        model, target = Path(name) / "model", Path(name) / "checkpoints"
        write_random_model(
            model, num_hidden_layers=options.layers, hidden_size=1024, intermediate_size=5632, vocab_size=16001
        )
        target.mkdir()
        print(
            "| layout | files, MiB | at once: waits, s | beside: waits, s | in place after, s "
            "| peak, MiB | beside, MiB |"
        )
        print("|---|---|---|---|---|---|---|")
        for case in CASES:
            ranks = pool.run(case.layout.world_size, measure, case, model, target, options.turns, timeout_s=3600)
            size = sum(file.stat().st_size for file in (target / "at once").iterdir()) / MIB
            cells = [
                f"{size:.0f}",
                f"{median(ranks[0]['at once: waited']):.2f}",
                f"{median(ranks[0]['beside: waited']):.2f}",
                f"{median(ranks[0]['beside: written']):.2f}",
                *("+".join(f"{max(rank[f'{way}: peak']):.0f}" for rank in ranks) for way in ("at once", "beside")),
            ]
            print(f"| {case.name} | {' | '.join(cells)} |", flush=True)
            shutil.rmtree(target)
            target.mkdir()


if __name__ == "__main__":
    main()
