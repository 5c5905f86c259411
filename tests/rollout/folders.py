"""Tiny models in Hugging Face layout, made by transformers, with every parameter random."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

VOCABULARY = 200
CONTEXT = 512
CONFIGS: dict[str, type[PretrainedConfig]] = {
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "qwen3_moe": Qwen3MoeConfig,
    "llama": LlamaConfig,
}


def save_model(folder: Path, kind: str, seed: int, **changes: object) -> torch.nn.Module:
    """Writes a float32 model of `kind` and returns it. Weights are large, so that log-probs differ clearly."""
    sizes: dict[str, object] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": False,
    }
    if kind == "qwen3":
        sizes["head_dim"] = 24  # not hidden_size / heads, as in the real ones
    if kind == "qwen3_moe":
        sizes |= {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "norm_topk_prob": True}
    config = CONFIGS[kind](**(sizes | changes))
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, experts_implementation="eager").to(torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            spread = torch.randn_like(parameter)
            parameter.copy_(1 + 0.2 * spread if "norm" in name else 0.15 * spread)
    model.save_pretrained(folder)
    return model
