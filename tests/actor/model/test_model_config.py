"""What of a Hugging Face config is understood, and what is refused with its name and value."""

import json
from pathlib import Path

import pytest
import torch

from megatron_dapo.actor.model.hf_config import HFModelConfig, check_actor, check_layout
from megatron_dapo.config.actor_config import ActorConfig, LayoutConfig
from megatron_dapo.config.base import ConfigError
from tests.actor.tiny import LLAMA3_ROPE

QWEN = {
    "model_type": "qwen2",
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "sliding_window": 128,
    "use_sliding_window": False,
    "tie_word_embeddings": True,
    "vocab_size": 101,
}


EXPERTS = {
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "tie_word_embeddings": False,
}


@pytest.fixture
def load(tmp_path: Path):
    def load(**changes) -> HFModelConfig:
        fields = {key: value for key, value in (QWEN | changes).items() if value is not ...}
        (tmp_path / "config.json").write_text(json.dumps(fields))
        return HFModelConfig.load(tmp_path)

    return load


def test_a_qwen2_config_of_transformers_4(load):
    config = load()
    assert (config.num_layers, config.num_query_groups, config.head_dim, config.vocab_size) == (4, 2, 16, 101)
    assert (config.qkv_bias, config.qk_norm, config.tied) == (True, False, True)
    assert (config.rope_theta, config.norm_epsilon) == (1000000.0, 1e-6)


def test_rope_fields_of_transformers_5_mean_the_same(load):
    new = load(rope_theta=..., rope_parameters={"rope_type": "default", "rope_theta": 1000000.0})
    assert new == load()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "mixtral"}, ["model_type", "'mixtral'", "qwen2"]),
        ({"hidden_size": "64"}, ["hidden_size = '64'", "integer"]),
        ({"num_hidden_layers": -2}, ["num_hidden_layers", "-2"]),
        ({"num_hidden_layers": 4.5}, ["num_hidden_layers = 4.5", "integer"]),
        ({"rms_norm_eps": "x"}, ["rms_norm_eps", "'x'"]),
        ({"tie_word_embeddings": "false"}, ["tie_word_embeddings", "'false'"]),
        ({"num_attention_heads": 3, "num_key_value_heads": 3}, ["num_attention_heads = 3", "hidden_size = 64"]),
        ({"num_key_value_heads": 3}, ["num_key_value_heads", "num_attention_heads = 4"]),
        ({"head_dim": 15}, ["head_dim", "15", "even"]),
        ({"rope_theta": "x"}, ["rope_theta", "'x'"]),
        ({"rope_theta": -1.0}, ["rope_theta", "-1.0"]),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, ["rope_scaling.low_freq_factor"]),
        ({"use_sliding_window": True}, ["use_sliding_window", "True"]),
        ({"rope_scaling": "linear"}, ["rope_scaling", "'linear'", "must be an object"]),
        ({"layer_types": 3}, ["layer_types", "3", "must be a list"]),
        ({"model_type": ["qwen2"]}, ["model_type", "must be a text"]),
        ({"layer_types": ["full_attention", "sliding_attention"]}, ["layer_types", "sliding_attention"]),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, ["rope", "'yarn'"]),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, ["rope", "'dynamic'"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "'gelu'"]),
        ({"model_type": "llama", "attention_bias": True}, ["attention_bias", "True"]),
        ({"mlp_bias": True}, ["mlp_bias"]),
        ({"attention_dropout": 0.1}, ["attention_dropout", "0.1"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5"]),
        ({"quantization_config": {"quant_method": "fp8"}}, ["quantization_config", "fp8"]),
        ({"num_hidden_layers": ...}, ["num_hidden_layers"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_would_be_computed_differently_is_refused(load, changes, words):
    with pytest.raises(ConfigError) as error:
        load(**changes)
    for word in [*words, "config.json"]:
        assert word in str(error.value)


def test_experts_under_both_names_of_their_number(load):
    """transformers 5 writes `num_local_experts`, the published files have `num_experts`."""
    experts = load(**EXPERTS).experts
    assert (experts.count, experts.top_k, experts.ffn_hidden_size, experts.normalised) == (8, 2, 48, True)
    assert load(**EXPERTS | {"num_experts": ..., "num_local_experts": 8}).experts == experts
    assert load(**EXPERTS | {"num_experts_per_tok": 1, "norm_topk_prob": ...}).experts.normalised is False
    assert load().experts is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"decoder_sparse_step": 2}, ["decoder_sparse_step = 2", "1"]),
        ({"mlp_only_layers": [0]}, ["mlp_only_layers = [0]"]),
        ({"num_experts": ...}, ["json: num_experts: "]),
        ({"moe_intermediate_size": "x"}, ["json: moe_intermediate_size = 'x'"]),
        ({"num_experts_per_tok": 9}, ["num_experts_per_tok = 9", "num_experts = 8"]),
        ({"num_experts_per_tok": 1}, ["num_experts_per_tok = 1", "norm_topk_prob"]),
        ({"tie_word_embeddings": True}, ["tie_word_embeddings = True", "SGLang", "lm_head.weight"]),
        ({"model_type": "qwen2_moe"}, ["model_type", "'qwen2_moe'"]),
    ],
    ids=str,
)
def test_experts_that_would_be_computed_differently_are_refused(load, changes, words):
    with pytest.raises(ConfigError) as error:
        load(**EXPERTS | changes)
    for word in words:
        assert word in str(error.value)


def test_a_window_that_no_layer_uses_is_accepted(load):
    load(use_sliding_window=True, layer_types=["full_attention"] * 4)


@pytest.mark.parametrize(
    "rope", [{"rope_type": "default", "rope_theta": 10000.0}, LLAMA3_ROPE], ids=["plain", "llama3"]
)
def test_rotary_frequencies_are_those_of_transformers(load, rope):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = load(model_type="llama", rope_theta=..., rope_parameters=rope, head_dim=64)
    theirs = LlamaRotaryEmbedding(LlamaConfig(head_dim=64, max_position_embeddings=256, rope_parameters=rope)).inv_freq
    torch.testing.assert_close(config.inverse_frequencies(), theirs, rtol=1e-6, atol=0)


def test_a_layout_must_divide_the_model(load):
    check_layout(load(), LayoutConfig(tensor=2, pipeline=2, virtual_pipeline=2))
    with pytest.raises(ConfigError, match=r"tensor = 4.*num_key_value_heads = 2"):
        check_layout(load(), LayoutConfig(tensor=4))
    with pytest.raises(ConfigError, match=r"= 3.*num_hidden_layers = 4"):
        check_layout(load(), LayoutConfig(pipeline=3))


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ({"expert": 3, "data": 3}, r"expert = 3.*num_experts = 8"),
        ({"expert": 2, "expert_tensor": 5, "data": 10}, r"expert_tensor = 5.*moe_intermediate_size = 48"),
        ({"tensor": 2, "expert": 2}, r"sequence_parallel = false.*tensor = 2"),
        ({"tensor": 2, "sequence_parallel": True}, r"expert_tensor = 1: with layout.expert = 1.*tensor = 2"),
        ({"data": 2, "expert_tensor": 2}, r"expert_tensor = 2: with layout.expert = 1.*tensor = 1"),
    ],
    ids=str,
)
def test_a_layout_must_divide_the_experts(load, layout, words):
    with pytest.raises(ConfigError, match=words):
        check_layout(load(**EXPERTS), LayoutConfig(**layout))


def test_experts_in_fp8_are_refused(load):
    check_actor(load(**EXPERTS), ActorConfig())
    check_actor(load(), ActorConfig(fp8="hybrid"))
    with pytest.raises(ConfigError, match=r"actor.fp8 = hybrid: .*set it to none"):
        check_actor(load(**EXPERTS), ActorConfig(fp8="hybrid"))


VIRTUAL = LayoutConfig(pipeline=2, virtual_pipeline=2)


@pytest.mark.parametrize(
    ("model", "fields", "words"),
    [
        ({}, {"recompute": 5}, "actor.recompute = 5: a stage's chunk has 4 layers; set it to full"),
        ({}, {"recompute": 2, "layout": VIRTUAL}, "actor.recompute = 2: a stage's chunk has 1 layers"),
        ({}, {"recompute": ["moe"]}, "moe: the model has no experts"),
        ({}, {"recompute": ["mlp", "layernorm"]}, "layernorm: only the one before experts"),
        (EXPERTS, {"recompute": ["mlp", "layernorm"]}, "mlp: the model has experts in place of each mlp"),
        (EXPERTS, {"recompute": ["moe"], "routing_replay": True}, "moe: not with routing_replay"),
    ],
    ids=str,
)
def test_parts_that_cannot_be_recomputed_are_refused(load, model, fields, words):
    with pytest.raises(ConfigError, match=words):
        check_actor(load(**model), ActorConfig(**fields))


def test_as_many_layers_as_a_stage_has_can_be_recomputed(load):
    check_actor(load(), ActorConfig(recompute=4))
    check_actor(load(), ActorConfig(recompute=1, layout=VIRTUAL))


def test_the_dense_size_of_a_model_of_experts_means_nothing(load):
    layout = {"tensor": 2, "sequence_parallel": True, "expert": 2}
    check_layout(load(**EXPERTS, intermediate_size=97), LayoutConfig(**layout))
    with pytest.raises(ConfigError, match="expert = 2: the model has no experts"):
        check_layout(load(), LayoutConfig(data=2, expert=2))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", "no JSON"),
        (b"\xff", "no JSON"),
        (b"[1]", "no JSON object"),
        (None, "No such file"),
    ],
)
def test_a_file_that_is_no_config_is_named(tmp_path: Path, content: bytes | None, words: str):
    file = tmp_path / "config.json"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"{file}: {words}.*; \w+ "):
        HFModelConfig.load(tmp_path)
