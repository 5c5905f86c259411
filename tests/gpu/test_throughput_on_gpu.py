"""Tokens per second, model FLOPs utilisation and peak memory of an update on one GPU, against a plain loop.

Models of Qwen2.5's widths with random weights, bfloat16, packed rows of 8 192 or 16 384 tokens. The plain loop is that
of `tests/actor/measure_actor_speed`: transformers with PyTorch's scaled-dot-product attention, on sequences of
equal length, so that it pads nothing; its weights and AdamW are bfloat16, without master weights. Where the GPU's
memory does not suffice, that is what is recorded.
"""

import gc
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest
import torch

from megatron_dapo.actor.packing import plan_for_actor
from megatron_dapo.actor.step_data import MiniBatch, Responses
from megatron_dapo.algorithm.policy_loss import PolicyObjective
from megatron_dapo.config.actor_config import ActorConfig, OptimizerConfig
from megatron_dapo.config.run_config import ModelConfig
from tests.actor.gloo import RankPlace
from tests.actor.measure_actor_speed import PlainLoop
from tests.gpu.place import DEVICE, ON_CPU
from tests.gpu.publishing import DTYPE, VOCABULARY, save_qwen

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(200)]

PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12}
"""Dense bfloat16 FLOP/s from the vendor's data sheets (SXM)."""

SEQUENCES = 4
"""Equally long ones in a row."""

ROWS = 2
"""Micro-batches of an update."""

TURNS = 3


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A Qwen2.5 model's width, and how many of its layers are built."""

    name: str
    hidden: int
    ffn: int
    heads: int
    groups: int
    layers: int
    tied: bool

    row: int
    """Tokens of a packed row."""

    def save(self, folder: Path) -> Path:
        return save_qwen(
            folder,
            hidden_size=self.hidden,
            intermediate_size=self.ffn,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.groups,
            tie_word_embeddings=self.tied,
        )

    def flops(self, lengths: np.ndarray) -> float:
        """Of forward and backward (three times forward): 2 a weight and token, and causal attention's two products."""
        size = self.hidden // self.heads
        layer = self.hidden * (2 * self.heads + 2 * self.groups) * size + 3 * self.hidden * self.ffn
        weights = self.layers * layer + self.hidden * VOCABULARY
        attention = self.layers * 2 * float((lengths.astype(np.float64) ** 2).sum()) * self.heads * size
        return 3 * (2 * weights * int(lengths.sum()) + attention)


SHAPES = [
    Shape(name="0.5B", hidden=896, ffn=4864, heads=14, groups=2, layers=24, tied=True, row=8192),
    Shape(name="1.5B", hidden=1536, ffn=8960, heads=12, groups=2, layers=28, tied=True, row=8192),
    Shape(name="7B width, 4 layers", hidden=3584, ffn=18944, heads=28, groups=4, layers=4, tied=False, row=16384),
]
if ON_CPU:
    SHAPES = [Shape(name="tiny", hidden=128, ffn=256, heads=2, groups=1, layers=2, tied=True, row=512)]

WAYS: dict[str, dict[str, Any]] = {
    "actor": {},
    "actor, fused linear, layers computed again": {"fused_linear_log_prob": True, "recompute": "full"},
}


def mini_batch(row: int, config: ActorConfig, hidden: int) -> MiniBatch:
    rng = np.random.default_rng(0)
    lengths = np.full(SEQUENCES * ROWS, row // SEQUENCES, dtype=np.int32)
    prompts = np.minimum(128, lengths // 2)
    tokens = int((lengths - prompts).sum())
    return MiniBatch(
        responses=Responses(
            token_ids=rng.integers(0, VOCABULARY, lengths.sum()).astype(np.int32),
            sequence_lengths=lengths,
            prompt_lengths=prompts,
        ),
        weights=np.full(tokens, 1 / tokens, dtype=np.float32),
        plan=plan_for_actor(lengths, config, hidden_size=hidden),
        advantages=rng.normal(size=tokens).astype(np.float32),
        old_log_probs=np.full(tokens, -np.log(VOCABULARY), dtype=np.float32),
    )


def config_of(row: int, fields: dict[str, Any]) -> ActorConfig:
    optimizer = OptimizerConfig(lr=1e-9, warmup_rollout_steps=0)
    return ActorConfig(**{"device": DEVICE, "micro_batch_tokens": row, "optimizer": optimizer} | fields)


def timed(update: Callable[[], Any]) -> dict[str, float]:
    """Median seconds of an update after the first, and the peak of allocated GiB."""
    update()
    if not ON_CPU:
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(TURNS):
        settle()
        began = time.perf_counter()
        update()
        settle()
        seconds.append(time.perf_counter() - began)
    peak = {} if ON_CPU else {"peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2)}
    return {"seconds": median(seconds)} | peak


def settle() -> None:
    if not ON_CPU:
        torch.cuda.synchronize()


def within_memory(measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What was measured, or that the GPU has not the memory for it."""
    gc.collect()
    if not ON_CPU:
        torch.cuda.empty_cache()
    try:
        return measure()
    except torch.cuda.OutOfMemoryError as error:
        return {"out of memory": str(error).splitlines()[0]}


def actor_update(place: RankPlace, folder: Path, row: int, hidden: int, fields: dict[str, Any]) -> dict[str, Any]:
    from megatron_dapo.actor.actor import MegatronActor

    config = config_of(row, fields)
    batch = mini_batch(row, config, hidden)

    def measure() -> dict[str, Any]:
        actor = MegatronActor(
            config,
            ModelConfig(path=str(folder), context_length=row, dtype=DTYPE),
            rank=0,
            world_size=1,
            rendezvous=place.rendezvous,
            steps_per_rollout=1,
            seed=0,
            timeout_s=300,
        )
        found = timed(lambda: actor.update([batch], PolicyObjective(), 1.0))
        return found | {"kernels": actor.describe()["kernels"]}

    return within_memory(measure)


def plain_update(place: RankPlace, folder: Path, row: int, hidden: int) -> dict[str, Any]:
    config = config_of(row, {})
    batch = mini_batch(row, config, hidden)
    return within_memory(
        lambda: timed(PlainLoop(folder, batch, config, dtype=getattr(torch, DTYPE), device=DEVICE).update)
    )


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_an_update(on_device, record, shape, tmp_path):
    folder = shape.save(tmp_path / "model")
    lengths = np.full(SEQUENCES * ROWS, shape.row // SEQUENCES)
    tokens, flops = int(lengths.sum()), shape.flops(lengths)
    gpu = "" if ON_CPU else torch.cuda.get_device_name()
    peak = next((value for name, value in PEAK_FLOPS.items() if name in gpu), None)
    where, found = (folder, shape.row, shape.hidden), {}
    ways = {name: (actor_update, *where, options) for name, options in WAYS.items()}
    for name, work in (ways | {"plain": (plain_update, *where)}).items():
        found[name] = way = on_device(*work)
        if "seconds" in way:
            way["tokens_per_second"] = round(tokens / way["seconds"])
            way["mfu"] = peak and round(flops / way["seconds"] / peak, 4)
        record(f"update of {shape.name}, rows of {shape.row}, {name}", way)  # at once: a machine may be taken away
    shutil.rmtree(folder)
    best = max(found[name].get("tokens_per_second", 0) for name in WAYS)
    plain = found["plain"].get("tokens_per_second")
    record(f"update of {shape.name}, of plain", plain and round(best / plain, 2))
    if not ON_CPU:
        assert best > (plain or 0)
