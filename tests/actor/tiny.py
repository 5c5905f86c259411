"""Tiny random Hugging Face models, written by transformers itself: the independent reference of the actor's tests."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

FAMILIES = ("qwen2", "qwen3", "llama")
MIXTURE = "qwen3_moe"
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    # Short, so that the tests' sequences reach every branch of the scaling.
    "original_max_position_embeddings": 32,
}


def save_tiny(folder: Path, family: str, *, tied: bool, seed: int = 0, **overrides: Any) -> Path:
    """A model of 4 layers with grouped queries, saved in float32; the vocabulary of 101 divides by no layout.

    All parameters are random, biases and norms too: their defaults (0 and 1) would hide a wrong one.
    """
    import transformers

    fields: dict[str, Any] = {
        "vocab_size": 101,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "tie_word_embeddings": tied,
    }
    if family == "qwen3":
        fields["head_dim"] = 24  # not hidden_size / heads
    if family == MIXTURE:
        fields |= {"head_dim": 24, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        fields |= {"norm_topk_prob": True}
    if family == "llama":
        fields["rope_parameters"] = LLAMA3_ROPE
    name = {"qwen2": "Qwen2", "qwen3": "Qwen3", "llama": "Llama", MIXTURE: "Qwen3Moe"}[family]
    config = getattr(transformers, f"{name}Config")(**fields | overrides)
    torch.manual_seed(seed)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return Path(folder)


def load_reference(folder: Path) -> torch.nn.Module:
    """The model as transformers runs it, in float32."""
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )


def reference_logits(folder: Path, sequences: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """[L, V] logits of each sequence by itself."""
    model = load_reference(folder)
    with torch.no_grad():
        return [model(torch.tensor([list(sequence)])).logits[0] for sequence in sequences]


def random_sequences(lengths: Sequence[int], *, vocab_size: int = 101, seed: int = 1) -> list[list[int]]:
    """Token ids of the given lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab_size, (length,), generator=generator).tolist() for length in lengths]


def by_expert(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors named as transformers holds them, which joins the experts of a layer, by the names in its files."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        experts, _, kind = name.rpartition(".")
        if kind not in ("gate_up_proj", "down_proj"):
            found[name] = tensor
            continue
        for number, one in enumerate(tensor):
            parts = (
                zip(("gate_proj", "up_proj"), one.chunk(2), strict=True) if kind == "gate_up_proj" else [(kind, one)]
            )
            found |= {f"{experts}.{number}.{part}.weight": each for part, each in parts}
    return found
