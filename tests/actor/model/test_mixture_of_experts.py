"""Qwen3-MoE: the actor computes what transformers computes, forward and backward, and its optimizer step is AdamW's, on
every layout of the experts."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_dapo.algorithm.policy_loss import PolicyObjective
from megatron_dapo.config.actor_config import Recompute
from tests.actor.gloo import RankPlace
from tests.actor.mini_batches import (
    TEMPERATURE,
    Columns,
    actor_config,
    columns,
    mini_batch,
    reference_gradient,
    relative_error,
    start_actor,
)
from tests.actor.model.test_model_logits import MICRO_BATCHES, TOLERANCE, largest_difference
from tests.actor.ranks import logits_of
from tests.actor.tiny import MIXTURE, by_expert, load_reference, reference_logits, save_tiny
from tools.actor_job import loss_and_gradients

LR, EPS, DECAY = 0.1, 1.0, 0.1
"""With an epsilon of 1 the first step of AdamW grows with the gradient, so that a wrong scale of it shows."""

TENSOR = {"tensor": 2, "sequence_parallel": True}
LAYOUTS = [
    TENSOR | {"expert": 2},
    TENSOR | {"expert_tensor": 2},
    {"context": 2, "expert": 2},
    {"pipeline": 2, "virtual_pipeline": 2},
]
SLOW_LAYOUTS = [
    {},
    {"data": 2, "expert": 2},
    {"pipeline": 2},
    {"pipeline": 2, "data": 2, "expert": 2},
    {"data": 4, "expert": 2},
    TENSOR | {"data": 2, "expert": 2, "expert_tensor": 2},
    {"data": 4, "expert": 2, "expert_tensor": 2},
    TENSOR | {"context": 2, "expert": 4},
    TENSOR | {"context": 2, "expert_tensor": 2},
]


def size(layout: dict[str, Any]) -> int:
    return int(np.prod([layout.get(name, 1) for name in ("tensor", "pipeline", "context", "data")]))


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> list[tuple[Path, list]]:
    """(folder, reference logits by micro-batch): the chosen experts' weights normalised, and not."""
    found = []
    for normalised in (True, False):
        folder = save_tiny(tmp_path_factory.mktemp("moe"), MIXTURE, tied=False, norm_topk_prob=normalised)
        found.append((folder, [reference_logits(folder, sequences) for sequences in MICRO_BATCHES]))
    return found


@pytest.fixture(scope="module")
def batches(models) -> list[tuple[Columns, dict[str, torch.Tensor]]]:
    """A mini-batch for each model, and its gradient by transformers in float64."""
    made = [(folder, columns(folder)) for folder, _ in models]
    return [(data, by_expert(reference_gradient(folder, data))) for folder, data in made]


@pytest.mark.parametrize(
    "layout", [*LAYOUTS, *(pytest.param(layout, marks=pytest.mark.slow) for layout in SLOW_LAYOUTS)], ids=str
)
def test_logits_equal_transformers(gloo, models, layout):
    results = gloo(size(layout), logits_of, [folder for folder, _ in models], layout, MICRO_BATCHES)
    assert largest_difference(results, models) <= TOLERANCE


def one_step(
    place: RankPlace, folder: Path, layout: dict[str, Any], data: Columns, options: dict[str, Any], recompute: Recompute
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], float] | None:
    """Rank 0: gradients, weights after an optimizer step with them, and the norm that the step reports."""
    from megatron_dapo.actor.weights.hf_weights import hf_tensors

    config = actor_config(layout, optimizer={"lr": LR, "weight_decay": DECAY} | options, recompute=recompute)
    actor = start_actor(place, folder, config)
    batch = mini_batch(data, config, without=("reference_log_probs", "correction"))
    result = loss_and_gradients(actor, batch, PolicyObjective(), TEMPERATURE)
    [report] = actor.update([batch], PolicyObjective(), TEMPERATURE)
    weights = dict(hf_tensors(actor._chunks, actor.hf, dtype=torch.float32))
    return None if result is None else (result[1], weights, report.grad_norm)


def adamw(folder: Path, gradient: dict[str, torch.Tensor], scale: float) -> dict[str, torch.Tensor]:
    """The weights after a first step from `folder`, in float64, by the formula."""
    before = by_expert(load_reference(folder).double().state_dict())
    after = {}
    for name, one in gradient.items():
        decay = 0.0 if one.ndim == 1 else DECAY
        clipped = one * scale
        after[name] = before[name] * (1 - LR * decay) - LR * clipped / (clipped.abs() + EPS)
    return after


# How the experts' weights are normalised does not depend on the layout.
CASES = [(layout, True) for layout in LAYOUTS if "expert_tensor" not in layout] + [({"data": 2, "expert": 2}, False)]
SLOW_CASES = [(each, way) for each in [*LAYOUTS, *SLOW_LAYOUTS] for way in (True, False) if (each, way) not in CASES]


@pytest.mark.parametrize(
    ("layout", "normalised"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_CASES)],
    ids=str,
)
def test_gradients_and_a_step_with_one_clipping_of_all(gloo, models, batches, layout, normalised):
    """The clipped norm is that of dense and expert gradients together."""
    (folder, _), (data, expected) = models[not normalised], batches[not normalised]
    norm = sum(float(one.norm()) ** 2 for one in expected.values()) ** 0.5
    options, recompute = {"eps": EPS, "clip_norm": norm / 3}, "full" if "context" in layout else "none"
    recompute = ("moe",) if "pipeline" in layout else recompute
    gradient, after, reported = gloo(size(layout), one_step, folder, layout, data, options, recompute)[0]
    errors = relative_error(gradient, expected)
    assert max(errors.values()) < 1e-5, errors
    assert reported == pytest.approx(norm, rel=1e-6)
    for name, wanted in adamw(folder, expected, 1 / 3).items():
        torch.testing.assert_close(after[name].double(), wanted, rtol=0, atol=1e-6, msg=name)


def test_a_step_does_not_depend_on_expert_parallelism(gloo, models, batches):
    """At an epsilon above the rounding of gradients: below it AdamW makes whole steps of rounding."""
    (folder, _), (data, _) = models[0], batches[0]
    layouts = [{"data": 2, "expert": expert} for expert in (1, 2)]
    options = {"lr": 1e-3, "eps": 1e-5}
    (_, alone, _), (_, split, _) = (gloo(2, one_step, folder, each, data, options, "none")[0] for each in layouts)
    for name, weight in alone.items():
        torch.testing.assert_close(split[name], weight, rtol=0, atol=1e-6, msg=name)


def counted(place: RankPlace, folder: Path, layout: dict[str, Any]) -> list[bool]:
    """Whether the norm counts what this rank has of experts that lie in a group, as TransformerEngine's do: `weight0`,
    `weight1`, ... of one module, which is none of Megatron's linear layers."""
    from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate

    from megatron_dapo.actor.optimizer import _wrap

    model = start_actor(place, folder, actor_config(layout))._chunks[0].module
    grouped = [torch.nn.Parameter(torch.zeros(4, 4)) for _ in range(2)]
    for number, one in enumerate(grouped):
        model.decoder.layers[0].mlp.experts.register_parameter(f"weight{number}", one)
    _wrap([model], distributed=False, overlap=False)
    return [param_is_not_tensor_parallel_duplicate(one) for one in grouped]


@pytest.mark.parametrize("layout", [TENSOR | {"expert": 2}, TENSOR | {"expert_tensor": 2}], ids=str)
def test_the_norm_counts_experts_of_a_group_on_every_rank(gloo, models, layout):
    assert gloo(2, counted, models[0][0], layout) == [[True, True]] * 2
