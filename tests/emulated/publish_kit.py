"""Fleets of played servers, and the tiny model that trainers send them."""

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from rollout.config import RolloutConfig
from rollout.fleet.fleet import RolloutFleet
from rollout.fleet.member import Timing
from tests.emulated.played_server import PlayedEngine

CALM = Timing(
    probe_interval_s=0.5,
    probe_deadline_s=20.0,
    failed_probes=3,
    scheduler_interval_s=5.0,
    scheduler_deadline_s=60.0,
    control_deadline_s=20.0,
    load_deadline_s=600.0,
    first_backoff_s=0.1,
    longest_backoff_s=1.0,
)
"""For a loaded machine. Weights from disk may take longer than any test: who waits for a server that hangs is seen."""
DEADLINE_S = 5.0
"""Of a bucket, where one of the servers does not answer."""
STANDSTILL_S = 3.0
"""A loop that stands still for longer is blocked: on a loaded machine a thread waits for its turn for less."""
WIDTH, INNER, WORDS = 32, 64, 64


def save_weights(folder: Path, seed: int) -> Path:
    """A Qwen2 of one layer in Hugging Face layout."""
    folder.mkdir(parents=True)
    torch.manual_seed(seed)
    layer = "model.layers.0."
    shapes = {
        "model.embed_tokens.weight": (WORDS, WIDTH),
        **{f"{layer}self_attn.{name}_proj.weight": (WIDTH, WIDTH) for name in "qkvo"},
        **{f"{layer}self_attn.{name}_proj.bias": (WIDTH,) for name in "qkv"},
        **{f"{layer}mlp.{name}_proj.weight": (INNER, WIDTH) for name in ("gate", "up")},
        f"{layer}mlp.down_proj.weight": (WIDTH, INNER),
        f"{layer}input_layernorm.weight": (WIDTH,),
        f"{layer}post_attention_layernorm.weight": (WIDTH,),
        "model.norm.weight": (WIDTH,),
        "lm_head.weight": (WORDS, WIDTH),
    }
    save_file({name: torch.randn(shape) for name, shape in shapes.items()}, folder / "model.safetensors")
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": WORDS,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@asynccontextmanager
async def played_fleet(
    engines: Sequence[PlayedEngine], *, deadline_s: float = 60.0, **settings: Any
) -> AsyncIterator[RolloutFleet]:
    config = RolloutConfig(request_deadline_s=60.0, fleet_deadline_s=60.0, sync_deadline_s=deadline_s, **settings)
    fleet = RolloutFleet(config, engines, vocab_size=200, report=print, timing=CALM)
    await fleet.start(60.0)
    try:
        yield fleet
    finally:
        await fleet.close()
