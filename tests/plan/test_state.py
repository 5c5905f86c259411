"""The planner's bytes against Megatron's own tensors: parameters, gradient buffers, master weights, moments."""

from collections import defaultdict
from pathlib import Path
from statistics import mean

import pytest
import torch

from megatron_dapo.actor.model.hf_config import HFModelConfig
from megatron_dapo.config.actor_config import ActorConfig, LayoutConfig, OptimizerConfig
from megatron_dapo.plan.rank_state import (
    StateBytes,
    active_parameters,
    model_parameters,
    rank_state,
    stage_parameters,
)
from megatron_dapo.plan.scenario import BUILT_IN
from tests.actor.gloo import run_ranks
from tests.actor.tiny import MIXTURE, save_tiny
from tools.rank_pool import RankPlace

LAYOUTS = [
    {"data": 2},
    pytest.param({"tensor": 2, "sequence_parallel": True}, marks=pytest.mark.slow),
    pytest.param({"pipeline": 2}, marks=pytest.mark.slow),
    {"pipeline": 2, "virtual_pipeline": 2},
    pytest.param({"context": 2}, marks=pytest.mark.slow),
    {"tensor": 2, "pipeline": 2},
]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> list[Path]:
    folder = tmp_path_factory.mktemp("models")
    return [
        save_tiny(folder / "qwen2", "qwen2", tied=True),
        save_tiny(folder / "qwen3", "qwen3", tied=False),
    ]


def held(place: RankPlace, folders: list[Path], layout: dict) -> dict[tuple, tuple[int, StateBytes]]:
    """On one rank, by model, type and optimizer: pipeline stage, and the bytes of Megatron's tensors."""
    from megatron.core import parallel_state

    found = {}
    for at, folder in enumerate(folders):
        for dtype in ("float32", "bfloat16"):
            for distributed in (True, False):
                state = _state_of_megatron(place, folder, layout, dtype, distributed=distributed)
                stage = parallel_state.get_pipeline_model_parallel_rank()
                found[at, dtype, distributed] = (stage, state)
    return found


def _state_of_megatron(
    place: RankPlace, folder: Path, layout: dict, dtype: str, *, distributed: bool = True
) -> StateBytes:
    from tests.actor.ranks import build

    built = build(place, folder, layout, dtype=dtype)
    from megatron_dapo.actor.optimizer import ActorOptimizer
    from megatron_dapo.actor.step_data import LearningRate

    config = OptimizerConfig(distributed=distributed)
    optimizer = ActorOptimizer(built.chunks, config, LearningRate.of(config, steps_per_rollout=1), overlap=False)
    optimizer.zero_grad()
    for chunk in optimizer.chunks:
        chunk.finish_grad_sync()
    optimizer.step()  # Adam makes its moments at the first step
    parameters = {
        parameter.untyped_storage().data_ptr(): parameter
        for chunk in optimizer.chunks
        for parameter in chunk.parameters()
    }
    gradients = {
        parameter.main_grad.untyped_storage().data_ptr(): parameter.main_grad
        for chunk in optimizer.chunks
        for parameter in chunk.parameters()
    }
    moments, masters = [], []
    for one in getattr(optimizer.megatron, "chained_optimizers", [optimizer.megatron]):
        for state in one.optimizer.state.values():
            moments += [value for name, value in state.items() if name in ("exp_avg", "exp_avg_sq")]
        groups = getattr(one, "shard_fp32_from_float16_groups", getattr(one, "fp32_from_float16_groups", []))
        masters += [tensor for group in groups for tensor in group if tensor is not None]
    return StateBytes(
        parameters=_storages(parameters.values()),
        gradients=_storages(gradients.values()),
        master_weights=_bytes(masters),
        moments=_bytes(moments),
    )


def _storages(tensors) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def _bytes(tensors: list[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def check_bytes(models: list[Path], layout: dict) -> None:
    """Buffers are padded, by little even in a tiny model; what the ranks own of them is not."""
    sizes = LayoutConfig(**layout)
    owned = defaultdict(list)
    for found in run_ranks(sizes.world_size, held, models, layout, timeout_s=200):
        for (at, dtype, distributed), (stage, state) in found.items():
            actor = ActorConfig(layout=sizes, optimizer=OptimizerConfig(distributed=distributed))
            planned = rank_state(HFModelConfig.load(models[at]), actor, dtype, stage=stage)
            case = models[at].name, dtype, distributed, stage
            for name in ("parameters", "gradients"):
                assert 1 <= getattr(state, name) / getattr(planned, name) <= 1.1, (name, *case)
            if not distributed:
                assert planned == state, case
            owned[case].append((state.master_weights, state.moments, planned))
    for case, states in owned.items():
        masters, moments = (mean(one[at] for one in states) for at in (0, 1))
        planned = states[0][2]
        assert (planned.master_weights, planned.moments) == pytest.approx((masters, moments), abs=8), case


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_bytes_are_megatrons_but_for_padding(layout, models):
    check_bytes(models, layout)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({"data": 2, "expert": 2}, marks=pytest.mark.slow),
        {"tensor": 2, "sequence_parallel": True, "expert": 2},
        {"tensor": 2, "sequence_parallel": True, "expert_tensor": 2},
        pytest.param({"pipeline": 2}, marks=pytest.mark.slow),
        pytest.param({"data": 4, "expert": 2}, marks=pytest.mark.slow),
        pytest.param({"data": 2, "pipeline": 2, "expert": 2}, marks=pytest.mark.slow),
        pytest.param(
            {"data": 2, "tensor": 2, "sequence_parallel": True, "expert": 2, "expert_tensor": 2}, marks=pytest.mark.slow
        ),
    ],
    ids=str,
)
def test_bytes_of_experts(layout, tmp_path):
    """Each rank owns a share of the dense weights and another of the experts."""
    check_bytes([save_tiny(tmp_path / "moe", MIXTURE, tied=False)], layout)


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("Qwen2.5-32B", 32.8e9),
        ("Qwen2.5-7B", 7.61e9),
        ("Qwen2.5-1.5B", 1.54e9),
        ("Qwen3-32B", 32.8e9),
        ("Qwen3-30B-A3B", 30.5e9),
    ],
)
def test_a_built_in_shape_has_the_published_number_of_parameters(name, published):
    assert model_parameters(BUILT_IN[name]) == pytest.approx(published, rel=0.004)


def test_of_a_mixture_a_token_passes_the_published_number():
    """3.3 billion of 30.5, by its model card; and by hand: all but 120 of 128 experts in 48 layers."""
    hf = BUILT_IN["Qwen3-30B-A3B-Base"]
    assert active_parameters(hf) == pytest.approx(3.3e9, rel=0.02)
    assert model_parameters(hf) - active_parameters(hf) == 48 * 120 * 3 * 2048 * 768
    assert active_parameters(BUILT_IN["Qwen3-32B"]) == model_parameters(BUILT_IN["Qwen3-32B"])


def test_the_stages_and_tensor_parallel_ranks_are_the_whole_model():
    layout, hf = LayoutConfig(tensor=8, pipeline=2), BUILT_IN["Qwen2.5-32B"]
    held = sum(stage_parameters(hf, layout, stage) for stage in range(2))
    vectors = hf.num_layers * 2 * hf.hidden_size + hf.hidden_size  # norms: whole on each tensor-parallel rank
    assert 8 * held == model_parameters(hf) + 7 * vectors
