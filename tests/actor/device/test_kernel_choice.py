"""What is chosen for a machine, as a table: a faked presence of GPU and packages in, kernels and their reasons out."""

import dataclasses
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_dapo.actor.device import DeviceChoice, Found, choose, prepare_for
from megatron_dapo.config.actor_config import ActorConfig, LayoutConfig, LoraConfig, OptimizerConfig
from tests.actor.gloo import RankPlace
from tests.actor.tiny import save_tiny

H100 = {"index": 3}
TE = {"transformer_engine": "2.20.2", "fused_adam": "transformer_engine"}
LOCAL = "layers: PyTorch's attention on packed sequences, RMSNorm in PyTorch"
OURS = "AdamW of this package"


def chosen(asked: dict[str, Any], found: dict[str, Any]) -> DeviceChoice:
    sizes = {name: asked[name] for name in ("data", "context") if name in asked}
    fields = {name: value for name, value in asked.items() if name not in ("data", "context", "dtype")}
    return choose(ActorConfig(layout=LayoutConfig(**sizes), **fields), asked.get("dtype", "bfloat16"), Found(**found))


# asked, found -> TransformerEngine's layers, FusedAdam, fused accumulation, overlapped reduction, and words of it
TABLE: list[tuple[dict[str, Any], dict[str, Any], tuple[bool, bool, bool, bool], list[str]]] = [
    ({"device": "auto"}, {}, (False, False, True, False), ["cpu gloo", f"{LOCAL} (no CUDA"]),
    ({"device": "cpu"}, H100 | TE, (False, False, True, False), ["cpu gloo", OURS]),
    ({"device": "cpu", "data": 2}, {}, (False, False, True, False), ["after backward (gloo, 2 data-parallel)"]),
    ({"device": "auto"}, H100, (False, False, True, False), ["cuda:3", "nccl", "Engine is not importable"]),
    (
        {"device": "cuda"},
        H100 | TE,
        (True, True, True, False),
        [
            "FusedAdam of transformer_engine",
            "layers: TransformerEngine 2.20.2",
            "gradient accumulation: in the matrix product",
        ],
    ),
    (
        {"device": "cuda", "dtype": "float32"},
        H100 | TE,
        (False, True, False, False),
        [f"{LOCAL} (TransformerEngine's attention has no packed sequences in float32)"],
    ),
    (
        {"device": "cuda"},
        H100 | {"fused_adam": "apex"},
        (False, True, True, False),
        ["FusedAdam of apex"],
    ),
    (
        {"device": "cuda", "data": 2},
        H100 | TE,
        (True, True, True, True),
        ["during backward (nccl, 2 data-parallel)"],
    ),
    (
        {"device": "cuda", "data": 2, "lora": LoraConfig(rank=8)},
        H100 | TE,
        (True, True, False, False),
        ["an addition after the matrix product", "after backward (nccl, 2 data-parallel)"],
    ),
    (
        {"device": "cuda", "data": 2, "overlap": False},
        H100,
        (False, False, True, False),
        ["gradient reduction: after backward (nccl, 2 data-parallel)"],
    ),
    (
        {"device": "cpu", "data": 2, "overlap": True, "optimizer": OptimizerConfig(distributed=False)},
        {},
        (False, False, True, True),
        ["gradient reduction: during backward (gloo, 2 data-parallel)"],
    ),
    ({"device": "cpu", "overlap": True}, {}, (False, False, True, False), ["after backward"]),
    ({"device": "cuda", "data": 1}, H100, (False, False, True, False), ["after backward"]),
    (
        {"device": "cuda", "fp8": "hybrid"},
        H100 | TE,
        (True, True, True, False),
        ["matrix products: FP8 hybrid, tensorwise scaling"],
    ),
    ({"device": "auto", "fp8": "e4m3", "fp8_recipe": "blockwise"}, H100 | TE, (True, True, True, False), ["FP8 e4m3"]),
    (
        {"device": "cuda", "context": 2},
        H100 | TE,
        (True, True, True, True),
        ["layers: TransformerEngine"],
    ),
    ({"device": "cuda", "context": 2, "dtype": "float32"}, H100, (False, False, False, True), [LOCAL]),
    (
        {"device": "cuda", "threads": 6, "optimizer": OptimizerConfig(on_cpu=True)},
        H100 | TE,
        (True, True, True, False),
        ["optimizer: PyTorch's AdamW on the CPU, 6 threads"],
    ),
    ({"device": "auto", "optimizer": OptimizerConfig(on_cpu=True)}, {}, (False, False, True, False), [OURS]),
    (
        {"device": "cuda", "optimizer": OptimizerConfig(compact="all")},
        H100 | TE,
        (True, True, True, False),
        ["optimizer: FusedAdam of transformer_engine"],
    ),
    ({"device": "cpu", "context": 2}, {}, (False, False, True, False), [LOCAL]),
]


@pytest.mark.parametrize(("asked", "found", "wanted", "words"), TABLE, ids=str)
def test_what_is_chosen_and_why(asked, found, wanted, words):
    choice = chosen(asked, found)
    got = (choice.transformer_engine, choice.fused_adam, choice.gradient_accumulation, choice.overlap_grad_reduce)
    assert got == wanted
    said = "\n".join([f"{choice.device} {choice.backend}", *(": ".join(each) for each in choice.kernels.items())])
    for word in words:
        assert word in said
    assert len(choice.kernels) == 5


REFUSED = [
    ({"device": "cuda"}, {}, "actor.device = cuda: no CUDA device is visible"),
    ({"device": "cpu", "fp8": "hybrid"}, H100 | TE, "actor.fp8 = hybrid: .* no CUDA device is used; set actor.fp8 to"),
    ({"device": "auto", "fp8": "e4m3"}, {}, "actor.fp8 = e4m3: .* no CUDA device is used"),
    ({"device": "cuda", "fp8": "e4m3"}, H100, "actor.fp8 = e4m3: .*Engine is not importable; .* install"),
    ({"device": "cuda", "fp8": "e4m3", "dtype": "float32"}, H100 | TE, "no packed sequences in float32"),
    ({"device": "auto", "optimizer": OptimizerConfig(compact="weights")}, {}, "compact = weights: .*FusedAdam on CUDA"),
    (
        {"device": "cuda", "optimizer": OptimizerConfig(compact="all")},
        H100 | {"fused_adam": "apex"},
        "actor.optimizer.compact = all: .*; set it to none, or install transformer-engine",
    ),
    ({"device": "auto", "context": 2}, H100, "actor.layout.context = 2: .*Engine is not importable; .*Install"),
]


@pytest.mark.parametrize(("asked", "found", "words"), REFUSED, ids=str)
def test_what_cannot_be_had_is_refused_with_its_key(asked, found, words):
    with pytest.raises(ValueError, match=words):
        chosen(asked, found)


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks what a machine without CUDA says")
def test_fp8_is_refused_here_before_anything_is_changed():
    with pytest.raises(ValueError, match=r"actor\.fp8 = hybrid"):
        prepare_for(ActorConfig(device="auto", fp8="hybrid"), "bfloat16")


def megatron_names(place: RankPlace) -> dict[str, Any]:
    """The names that the choice stands on, in the Megatron-Core that is installed."""
    import inspect

    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.enums import Fp8Recipe
    from megatron.core.transformer.transformer_config import TransformerConfig

    fields = TransformerConfig.__dataclass_fields__
    return {
        "fp8": str(fields["fp8"].type),
        "recipes": {recipe.value for recipe in Fp8Recipe},
        "overlap": "overlap_grad_reduce" in inspect.signature(DistributedDataParallelConfig).parameters,
        "fused": "gradient_accumulation_fusion" in fields,
    }


def test_megatron_has_the_names(gloo):
    [names] = gloo(1, megatron_names)
    assert "e4m3" in names["fp8"]
    assert "hybrid" in names["fp8"]
    assert names["recipes"] >= {"tensorwise", "blockwise", "mxfp8"}
    assert names["overlap"]
    assert names["fused"]


def fp8_configs(place: RankPlace, folder: Path) -> list[tuple[Any, str]]:
    from megatron_dapo.actor.model.hf_config import HFModelConfig
    from megatron_dapo.actor.model.model_chunks import transformer_config
    from megatron_dapo.config.actor_config import ActorConfig

    hf, seen = HFModelConfig.load(folder), []
    for fields in FP8:
        choice = chosen({"device": "cuda", **fields}, H100 | TE)
        # Megatron's config imports what is to do the rotary embedding, and refuses where that is not installed.
        choice = dataclasses.replace(choice, transformer_engine=False)
        config = transformer_config(hf, ActorConfig(**fields), "bfloat16", choice)
        seen.append((config.fp8, config.fp8_recipe))
    return seen


FP8: list[dict[str, Any]] = [
    {"fp8": "none"},
    {"fp8": "hybrid"},
    {"fp8": "e4m3", "fp8_recipe": "blockwise"},
]


def test_fp8_reaches_megatrons_config(gloo, tmp_path):
    [seen] = gloo(1, fp8_configs, save_tiny(tmp_path, "qwen3", tied=True))
    assert seen == [(None, "tensorwise"), ("hybrid", "tensorwise"), ("e4m3", "blockwise")]


def test_a_recipe_whose_state_transformer_engine_does_not_load_again_is_no_choice():
    with pytest.raises(ValueError, match="'tensorwise', 'blockwise' or 'mxfp8'"):
        ActorConfig(fp8="hybrid", fp8_recipe="delayed")


def with_gpus(place: RankPlace, asked: str, rank: str) -> tuple[str, str, list[int]]:
    """What a process of eight GPUs chooses; the GPUs that it made its own."""
    chosen: list[int] = []
    gpus = {"is_available": lambda: True, "device_count": lambda: 8, "set_device": chosen.append}
    with mock.patch.multiple(torch.cuda, **gpus), mock.patch.dict(os.environ, LOCAL_RANK=rank):
        choice = prepare_for(ActorConfig(device=asked), "bfloat16")
    return str(choice.device), choice.backend, chosen


@pytest.mark.parametrize("asked", ["auto", "cuda"])
def test_a_process_takes_the_gpu_of_its_local_rank(gloo: Any, asked: str) -> None:
    assert gloo(1, with_gpus, asked, "3") == [("cuda:3", "nccl", [3])]
    assert gloo(1, with_gpus, asked, "0") == [("cuda:0", "nccl", [0])]
