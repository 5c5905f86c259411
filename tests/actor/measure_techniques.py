"""What each of the actor's techniques costs or wins on a CPU: one update with it and without it, in turns.

python -m tests.actor.measure_techniques     prints a Markdown table (docs/measurements/actor.md)

CPU seconds of all ranks, which other load on the machine changes little; a wait for another rank is in them, since gloo
and a barrier spin. 20 million parameters, responses of 64 to 512 tokens; in bfloat16, which a CPU may have no fast
products for, the quickstart's base, 24 to 128 tokens.
"""

import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import typer

from megatron_dapo.algorithm.losses.clipped import Clipped
from megatron_dapo.algorithm.policy_loss import PolicyObjective
from megatron_dapo.config.actor_config import LayoutConfig, LoraConfig
from tests.actor.actor_update import QUICKSTART, Dtype, Lengths, actor_config, spread, start
from tests.actor.measure_actor_speed import cases
from tools.rank_pool import RankPlace, RankPool

LENGTHS = {
    "float32": Lengths(responses=12, shortest=64, longest=512),
    "bfloat16": Lengths(responses=32, shortest=24, longest=128),
}


@dataclass(frozen=True, kw_only=True)
class Technique:
    """Fields of the actor's config with it; without it those of `base` alone."""

    name: str
    on: dict[str, Any]
    base: LayoutConfig = field(default_factory=LayoutConfig)
    dtype: Dtype = "float32"
    sums: bool = True
    """Without it weight gradients are added after the matrix product."""


TECHNIQUES = [
    Technique(name="weight gradients summed by the product, bfloat16", on={}, dtype="bfloat16", sums=False),
    Technique(name="recompute: core_attn", on={"recompute": ("core_attn",)}),
    Technique(name="recompute: mlp", on={"recompute": ("mlp",)}),
    Technique(name="recompute: 4 of 8 layers", on={"recompute": 4}),
    Technique(name="recompute: full", on={"recompute": "full"}),
    Technique(name="loss from hidden states", on={"fused_linear_log_prob": True}),
    Technique(name="LoRA, rank 8", on={"lora": LoraConfig(rank=8)}),
    Technique(name="overlap, DP 2", on={"overlap": True}, base=LayoutConfig(data=2)),
    Technique(
        name="virtual stages and overlapped sends, PP 2",
        on={"layout": LayoutConfig(pipeline=2, virtual_pipeline=2), "overlap": True},
        base=LayoutConfig(pipeline=2),
    ),
]


def seconds(place: RankPlace, folder: Path, technique: Technique, used: bool, updates: int) -> list[float]:
    """CPU seconds of this rank for each update, after one that warms up."""
    from megatron_dapo.actor import device

    fields = {"layout": technique.base, "micro_batch_tokens": 1024, "threads": 1} | (technique.on if used else {})
    real = device.prepare_for
    off = {} if used or technique.sums else {"gradient_accumulation": False}
    with mock.patch.object(device, "prepare_for", lambda *given: replace(real(*given), **off)):
        actor, batch = start(place, folder, LENGTHS[technique.dtype], actor_config(**fields), technique.dtype)
    objective, found = PolicyObjective(loss=Clipped(low=0.2, high=0.28)), []
    for _ in range(1 + updates):
        began = time.process_time()
        actor.update([batch], objective, 1.0)
        found.append(time.process_time() - began)
    return found[1:]


def table(*, rounds: int, updates: int, only: str) -> Iterator[str]:
    """The Markdown table, line by line as it is measured."""
    with tempfile.TemporaryDirectory() as temporary, RankPool("cpu") as pool:
        large = cases(Path(temporary))[-1].folder
        yield "| technique | without, CPU s | with | time without / with |"
        yield "|---|---|---|---|"
        for technique in (each for each in TECHNIQUES if only in each.name):
            folder = large if technique.dtype == "float32" else QUICKSTART
            found: dict[bool, list[float]] = {False: [], True: []}
            for used in [False, True] * rounds:
                ranks = pool.run(technique.base.world_size, seconds, folder, technique, used, updates, timeout_s=1200)
                found[used].append(median(map(sum, zip(*ranks, strict=True))))
            ratio = spread([without / used for without, used in zip(*found.values(), strict=True)])
            yield f"| {technique.name} | {median(found[False]):.2f} | {median(found[True]):.2f} | {ratio} |"


def main(rounds: int = 5, updates: int = 3, only: str = "") -> None:
    """Print the table. ROUNDS: turns of both; UPDATES: of a turn; ONLY: techniques whose name holds this."""
    for line in table(rounds=rounds, updates=updates, only=only):
        print(line, flush=True)


if __name__ == "__main__":
    typer.run(main)
