"""A model of TransformerEngine's layers as it is put together, with Megatron's parts faked: the package is on GPUs."""

from types import SimpleNamespace
from unittest import mock

import torch

from tests.actor.tiny import save_tiny


def built(place, folder):
    from megatron_dapo.actor.device import DeviceChoice, prepare

    prepare("cpu")
    from megatron_dapo.actor.model import model_chunks as module
    from megatron_dapo.actor.model.hf_config import HFModelConfig
    from megatron_dapo.config.actor_config import ActorConfig

    class Chunk(torch.nn.Module):
        def __init__(self, **given):
            super().__init__()
            self.given, self.post_process, self.rotary_pos_emb = given, False, SimpleNamespace(inv_freq=None)
            self.layer = torch.nn.Linear(2, 2)

    config = SimpleNamespace(num_moe_experts=None, moe_grouped_gemm=True, qk_layernorm=True)
    hf, stages = HFModelConfig.load(folder), module.parallel_state
    with (
        mock.patch.multiple(module, GPTModel=Chunk, transformer_config=lambda *_: config),
        mock.patch.multiple(stages, is_pipeline_first_stage=lambda **_: True, is_pipeline_last_stage=lambda **_: False),
        mock.patch.object(module.gpt_layer_specs, "get_gpt_layer_with_transformer_engine_spec", lambda **given: given),
    ):
        choice = DeviceChoice(device=torch.device("cpu"), backend="gloo", transformer_engine=True)
        [chunk] = module.build_model(hf, ActorConfig(), "bfloat16", choice)
    same = torch.equal(chunk.rotary_pos_emb.inv_freq, hf.inverse_frequencies())
    return (
        chunk.given["transformer_layer_spec"],
        chunk.given["position_embedding_type"],
        same,
    )


def test_transformer_engines_spec_and_rope_are_set(gloo, tmp_path):
    [found] = gloo(1, built, save_tiny(tmp_path, "qwen3", tied=False))
    assert found == (
        {"num_experts": None, "moe_grouped_gemm": True, "qk_layernorm": True},
        "rope",
        True,
    )
