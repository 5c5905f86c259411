"""Law 1 for every loss of the family, ratios of whole responses included: real Megatron-Core over gloo against the
papers' formulas on transformers' forward in float64."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from examples.quickstart.supervised import SupervisedObjective
from megatron_dapo.actor.model.hf_config import HFModelConfig
from megatron_dapo.algorithm.losses import LOSSES
from megatron_dapo.algorithm.losses.cispo import CISPO
from megatron_dapo.algorithm.losses.gmpo import GMPO
from megatron_dapo.algorithm.losses.gspo import GSPO
from megatron_dapo.algorithm.losses.reinforce import Reinforce
from megatron_dapo.algorithm.losses.sapo import SAPO
from megatron_dapo.algorithm.policy_loss import PolicyObjective
from megatron_dapo.config.actor_config import LayoutConfig
from tests.actor.gloo import RankPlace
from tests.actor.mini_batches import (
    TEMPERATURE,
    Columns,
    actor_config,
    columns,
    mini_batch,
    reference_log_probs,
    relative_error,
    start_actor,
)
from tests.actor.test_step import NONE_OF, gradients_of, size
from tests.actor.tiny import load_reference, save_tiny
from tools.actor_job import loss_and_gradients
from tools.certificate import choose_layouts, fitting_layouts


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("qwen2"), "qwen2", tied=False)


@pytest.fixture(scope="module")
def data(model) -> Columns:
    return columns(model)


FAMILY = {
    "cispo": CISPO(low=0.2, high=0.28),
    "gspo": GSPO(low=0.05, high=0.05),
    "gmpo": GMPO(low=0.2, high=0.28),
    "sapo": SAPO(),
    "reinforce": Reinforce(upper=1.2),
}
RELATIVE = 1e-5


def family_reference(folder: Path, data: Columns, name: str) -> dict[str, torch.Tensor]:
    """The gradient as the papers write it, response by response in float64; no import of ours."""
    model = load_reference(folder).double()
    log_probs, _ = reference_log_probs(model, data.responses)
    column = {key: torch.from_numpy(values).double() for key, values in data.columns.items()}
    lengths = data.responses.response_lengths.tolist()
    total = torch.zeros((), dtype=torch.float64)
    parts = zip(
        *(each.split(lengths) for each in (log_probs, *(column[key] for key in NEEDED))),
        strict=True,
    )
    for new, weight, advantage, old, engine in parts:
        ratio, a = torch.exp(new - old), advantage[0]
        if name == "cispo":
            terms = ratio.detach().clip(0.8, 1.28) * a * new
        elif name == "reinforce":
            terms = torch.exp(new - engine).detach().clip(max=1.2) * a * new
        elif name == "sapo":
            tau = 1.0 if a > 0 else 1.05
            terms = 4 / tau / (1 + torch.exp(-tau * (ratio - 1))) * a
        elif name == "gspo":
            s = ratio.prod() ** (1 / len(ratio))
            terms = torch.min(s * a, s.clip(0.95, 1.05) * a).expand(len(ratio))
        else:
            clipped = torch.min(ratio * a, ratio.clip(0.8, 1.28) * a).abs()
            terms = (torch.sign(a) * clipped.prod() ** (1 / len(ratio))).expand(len(ratio))
        total = total - (weight * terms).sum()
    total.backward()
    return {key: parameter.grad for key, parameter in model.named_parameters()}


NEEDED = ("weights", "advantages", "old_log_probs", "rollout_log_probs")


def with_engine(data: Columns) -> Columns:
    """Also with log-probs of the engine."""
    engine = data.columns["old_log_probs"] + np.float32(0.1) * np.sign(data.columns["advantages"])
    return Columns(responses=data.responses, columns=data.columns | {"rollout_log_probs": engine})


def test_no_loss_is_left_out():
    """Eq. 8's own stands in test_step.py."""
    classes = {name: entry.path.rpartition(":")[2] for name, entry in LOSSES.items() if name != "clipped"}
    assert {name: type(loss).__name__ for name, loss in FAMILY.items()} == classes


@pytest.mark.parametrize("name", FAMILY)
def test_every_loss_of_the_family_is_its_papers_on_every_layout_and_packing(gloo, model, data, name):
    """Also ratios of whole responses, which context parallelism cuts in two; near a clip's edge nothing lies."""
    given = with_engine(data)
    wanted, objective = family_reference(model, given, name), PolicyObjective(loss=FAMILY[name])
    layouts: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, {}),
        ({}, {"micro_batch_tokens": 1}),
        ({}, {"micro_batch_tokens": 10_000}),
        ({"context": 2}, {}),
        ({"tensor": 2, "sequence_parallel": True}, {}),
    ]
    for layout, fields in layouts:
        got = gloo(size(layout), gradients_of, model, layout, given, objective, NONE_OF, fields)[0]
        errors = relative_error(got, wanted)
        assert max(errors.values()) < RELATIVE, (layout, fields, errors)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", FAMILY)
def test_every_loss_of_the_family_is_its_papers_on_random_layouts(gloo, model, data, name, seed):
    """Layouts and packings as `certify` draws them; the weights are random, as no aggregation's are."""
    given = with_engine(data)
    wanted, objective = family_reference(model, given, name), PolicyObjective(loss=FAMILY[name])
    rng = np.random.default_rng(seed)
    fitting = fitting_layouts(HFModelConfig.load(model), 4)
    for layout in choose_layouts(fitting, 5, seed=seed, always=LayoutConfig()):
        fields = {"micro_batch_tokens": int(rng.integers(1, 400))}
        chosen = asdict(layout)
        got = gloo(layout.world_size, gradients_of, model, chosen, given, objective, NONE_OF, fields)[0]
        errors = relative_error(got, wanted)
        assert max(errors.values()) < RELATIVE, (layout, fields, errors)


def masked_and_not_a_number(place: RankPlace, folder: Path, data: Columns):
    """A loss that is not a number where the weight is 0."""
    config = actor_config()
    actor = start_actor(place, folder, config)

    class Broken(SupervisedObjective):
        def __call__(self, log_probs, entropy, columns=None):
            result = super().__call__(log_probs, entropy, columns)
            return replace(result, loss=torch.where(columns.advantages == 0, torch.nan, result.loss))

    batch = mini_batch(data, config, without=NONE_OF)
    batch = replace(batch, advantages=(batch.weights != 0).astype(np.float32))
    return loss_and_gradients(actor, batch, Broken(), TEMPERATURE)[0]


def test_a_masked_token_without_a_loss_leaves_the_reported_loss_a_number(gloo, model, data):
    assert np.isfinite(gloo(1, masked_and_not_a_number, model, data)[0])
