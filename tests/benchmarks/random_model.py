"""A Hugging Face folder of a wanted size with random weights, for measurements: config, safetensors, no tokenizer."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megatron_dapo.actor.model.hf_config import HFModelConfig
from megatron_dapo.actor.weights.hf_files import FolderPlan

FIELDS: Mapping[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "vocab_size": 64001,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
"""1.22e9 parameters, 2.3 GiB in bfloat16; the vocabulary divides by no layout."""


def write_random_model(folder: Path, *, max_file_bytes: int = 10**9, **overrides: Any) -> int:
    """Write a bfloat16 model of `FIELDS` with `overrides` to `folder`, which is replaced; the bytes of its tensors."""
    from megatron_dapo.actor.device import prepare

    prepare("cpu")
    from megatron_dapo.actor.weights.model_tensors import hf_shapes

    fields = dict(FIELDS) | overrides
    shapes = hf_shapes(HFModelConfig.of(fields, shown="a random model"))
    plan = FolderPlan(shapes=shapes, dtype=torch.bfloat16, max_bytes=max_file_bytes)
    plan.create(folder)
    (folder / "config.json").write_text(json.dumps(fields, indent=1))
    generator = torch.Generator().manual_seed(0)
    for name, shape in shapes.items():
        plan.write(folder, name, torch.empty(shape, dtype=torch.bfloat16).normal_(std=0.03, generator=generator))
    return sum(math.prod(shape) for shape in shapes.values()) * torch.bfloat16.itemsize
