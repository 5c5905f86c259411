"""Megatron runs on the CPU without anything else in the process noticing, and AdamW is AdamW."""

import weakref
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_dapo.actor.device import cpu
from tests.actor.gloo import RankPlace, errors_of
from tests.actor.tiny import MIXTURE, save_tiny


def traces_outside_megatron(place: RankPlace) -> dict[str, object]:
    from megatron_dapo.actor.device import prepare

    first = prepare("cpu")
    import megatron.core.tensor_parallel.layers as layers
    import torch

    with pytest.raises((RuntimeError, AssertionError)):
        torch.cuda.current_device()
    with pytest.raises((RuntimeError, AssertionError)):
        torch.zeros(1).cuda()
    return {
        "again": prepare("auto") == first,
        "text": str(first),
        "backend": first.backend,
        "megatron's device": str(layers.torch.cuda.current_device()),
        "megatron's factory": str(layers.torch.zeros(1, device="cuda").device),
        "real factory untouched": torch.zeros.__module__,
        "type outside": torch.zeros(1).type(),
    }


def test_only_megatron_sees_the_stand_ins(gloo):
    [seen] = gloo(1, traces_outside_megatron)
    assert seen["again"]
    assert seen["backend"] == "gloo"
    assert (seen["megatron's device"], seen["megatron's factory"]) == ("cpu", "cpu")
    assert seen["type outside"] == "torch.FloatTensor"
    for part in ("layers", "attention", "optimizer"):
        assert part in seen["text"]


def ask_for_cuda(place: RankPlace) -> None:
    from megatron_dapo.actor.device import prepare

    prepare("cuda")


def test_cuda_is_refused_where_there_is_none():
    assert "device = cuda" in errors_of(1, ask_for_cuda)[0]


def prepare_too_late(place: RankPlace) -> str:
    import subprocess
    import sys

    code = (
        "import sys, types; sys.modules['megatron.core.enums'] = types.ModuleType('megatron.core.enums')\n"
        "from megatron_dapo.actor.device import prepare; prepare('cpu')"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100).stderr


def test_preparing_after_megatron_is_imported_is_an_error(gloo):
    [error] = gloo(1, prepare_too_late)
    assert "was imported before actor.device.prepare" in error


def cuda_configs(place: RankPlace, folder: Path) -> list[tuple[bool, bool, bool]]:
    from megatron_dapo.actor.device import DeviceChoice, prepare

    prepare("cpu")
    from megatron_dapo.actor.model.hf_config import HFModelConfig
    from megatron_dapo.actor.model.model_chunks import transformer_config
    from megatron_dapo.config.actor_config import ActorConfig, LayoutConfig

    hf = HFModelConfig.load(folder)
    cuda = DeviceChoice(device=torch.device("cuda", 0), backend="nccl", transformer_engine=False)
    configs = []
    for recompute in ("none", 1, ("mlp", "core_attn"), "full"):
        actor = ActorConfig(layout=LayoutConfig(tensor=2, sequence_parallel=True, context=2), recompute=recompute)
        configs.append(transformer_config(hf, actor, "bfloat16", cuda))
    return [(c.bf16, c.bias_activation_fusion, c.use_cpu_initialization) for c in configs]


def test_megatron_accepts_the_config_for_cuda(gloo, tmp_path):
    assert gloo(1, cuda_configs, save_tiny(tmp_path, "qwen3", tied=False)) == [[(True, True, False)] * 4]


def layernorm_again(place: RankPlace, folder: Path) -> str:
    from megatron_dapo.actor.device import prepare

    device = prepare("cpu")
    from megatron_dapo.actor.model.hf_config import HFModelConfig
    from megatron_dapo.actor.model.model_chunks import transformer_config
    from megatron_dapo.config import ConfigError
    from megatron_dapo.config.actor_config import ActorConfig

    try:
        transformer_config(HFModelConfig.load(folder), ActorConfig(recompute=["layernorm"]), "bfloat16", device)
    except ConfigError as error:
        return str(error)
    return "taken"


def test_a_norm_that_megatron_cannot_compute_again_is_refused(gloo, tmp_path):
    [said] = gloo(1, layernorm_again, save_tiny(tmp_path, MIXTURE, tied=False))
    assert said.startswith("actor.recompute: layernorm: needs TransformerEngine")


def train_with_both(place: RankPlace, decoupled: bool) -> tuple[list[torch.Tensor], list[torch.Tensor], dict]:
    from megatron_dapo.actor.device import prepare

    prepare("cpu")
    from megatron_dapo.actor.device.adam import FusedLayoutAdam

    settings = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.1}
    ours, theirs = ([torch.nn.Parameter(torch.arange(float(n)) - 1.0) for n in (3, 1000)] for _ in range(2))
    reference = torch.optim.AdamW if decoupled else torch.optim.Adam
    optimizers = FusedLayoutAdam(ours, adam_w_mode=decoupled, **settings), reference(theirs, fused=False, **settings)
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        for our, their in zip(ours, theirs, strict=True):
            our.grad = torch.randn(our.shape, generator=generator)
            their.grad = our.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    group, state = optimizers[0].param_groups[0], optimizers[0].state[ours[1]]
    return [p.detach() for p in ours], [p.detach() for p in theirs], {"step": group["step"], "state": sorted(state)}


@pytest.mark.parametrize("decoupled", [True, False], ids=["AdamW", "Adam"])
def test_adam_is_torchs_in_the_layout_of_the_fused_one(gloo, decoupled):
    [(ours, theirs, layout)] = gloo(1, train_with_both, decoupled)
    assert layout == {"step": 5, "state": ["exp_avg", "exp_avg_sq"]}
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our, their, rtol=1e-6, atol=1e-7)


def test_the_memory_of_a_sent_tensor_is_kept_when_the_schedule_takes_it_out(monkeypatch):
    """As Megatron's `deallocate_pipeline_outputs` does, while gloo's thread may still read it."""
    monkeypatch.setattr(torch.distributed, "isend", lambda tensor, dst: None)
    send = cpu._collectives()["isend"]
    numbers = np.ones(4)
    memory, sent = weakref.ref(numbers), torch.from_numpy(numbers)
    del numbers
    send(tensor=sent, dst=1)
    sent.data = torch.empty(1)
    assert memory() is not None
    for _ in range(cpu.KEPT_SENDS):
        send(torch.empty(1), 1)
    assert memory() is None


def devices_of_parameters(place: RankPlace, folder: Path) -> dict[str, str]:
    """Device of each parameter of a model that is to live elsewhere than where Megatron makes a router's weight."""
    from megatron_dapo.actor.device import prepare

    choice = prepare("cpu")
    from megatron_dapo.actor.device import process_groups
    from megatron_dapo.actor.model.hf_config import HFModelConfig
    from megatron_dapo.config.actor_config import ActorConfig, LayoutConfig

    process_groups.initialise(
        LayoutConfig(), rank=0, world_size=1, rendezvous=place.rendezvous, device=choice, timeout_s=60, seed=1
    )
    from megatron_dapo.actor.model.model_chunks import build_model

    other = replace(choice, device=torch.device("meta"))
    [chunk] = build_model(HFModelConfig.load(folder), ActorConfig(), "float32", other)
    return {name: parameter.device.type for name, parameter in chunk.named_parameters()}


def test_a_routers_weight_is_where_the_model_is(gloo, tmp_path):
    """Megatron makes it on the CPU whatever the device; without the distributed optimizer it would stay there."""
    [found] = gloo(1, devices_of_parameters, save_tiny(tmp_path / "moe", MIXTURE, tied=False))
    assert any("router.weight" in name for name in found)
    assert set(found.values()) == {"meta"}
