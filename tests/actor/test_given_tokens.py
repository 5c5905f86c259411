"""Tokens within a response that the policy did not draw: the gradient is that of the drawn ones alone, on every layout.

Real Megatron-Core over gloo against the formulas on transformers' forward in float64, one sequence at a time, without
padding; which tokens were drawn is written out token by token.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_dapo.actor.packing import pack_micro_batch, plan_for_actor
from megatron_dapo.actor.step_data import Responses
from megatron_dapo.algorithm.losses.clipped import Clipped
from megatron_dapo.algorithm.losses.gmpo import GMPO
from megatron_dapo.algorithm.losses.gspo import GSPO
from megatron_dapo.algorithm.policy_loss import PolicyObjective
from tests.actor.gloo import RankPlace
from tests.actor.mini_batches import TEMPERATURE, Columns, actor_config, relative_error, start_actor
from tests.actor.test_packing import ONE_RANK
from tests.actor.test_step import NONE_OF, gradients_of, size
from tests.actor.tiny import load_reference, save_tiny

STRETCHES = (
    (5, "ddddd ggg dddd"),
    (3, "dddddddddddddddd gggg ddddddddd gg ddddd"),
    (1, "d"),
    (8, "dd g"),
    (2, "gggggg d"),
    (6, "ddddddddddddddddddddd"),
    (4, "g d g d g ddd g"),
)
"""(prompt tokens, what each token of the response is: d drawn, g given)"""


@dataclass(frozen=True)
class Sequence:
    ids: list[int]
    drawn: list[int]
    """Places of the drawn tokens in `ids`."""


def sequences() -> list[Sequence]:
    rng = np.random.default_rng(4)
    made = []
    for prompt, kinds in STRETCHES:
        kinds = kinds.replace(" ", "")
        ids = rng.integers(0, 101, prompt + len(kinds)).tolist()
        made.append(Sequence(ids, [prompt + at for at, kind in enumerate(kinds) if kind == "d"]))
    return made


def responses() -> Responses:
    pairs, given = [], []
    for sequence, (prompt, kinds) in zip(sequences(), STRETCHES, strict=True):
        ids, kinds = np.array(sequence.ids, np.int32), kinds.replace(" ", "")
        pairs.append((ids[:prompt], ids[prompt:]))
        starts = [at for at, kind in enumerate(kinds) if kind == "g" and kinds[at - 1 : at] != "g"]
        given.append([(at, len(kinds[at:]) - len(kinds[at:].lstrip("g"))) for at in starts])
    return Responses.of(pairs, given)


def log_probs_of(model: torch.nn.Module) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Log-probs and entropies of each sequence's drawn tokens, float64."""
    log_probs, entropies = [], []
    for sequence in sequences():
        logits = model(torch.tensor([sequence.ids])).logits[0] / TEMPERATURE
        rows = [torch.log_softmax(logits[place - 1], dim=-1) for place in sequence.drawn]
        log_probs.append(
            torch.stack([row[sequence.ids[place]] for row, place in zip(rows, sequence.drawn, strict=True)])
        )
        entropies.append(torch.stack([-(row.exp() * row).sum() for row in rows]))
    return log_probs, entropies


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("qwen2"), "qwen2", tied=False)


@pytest.fixture(scope="module")
def numbers(model) -> dict[str, list[np.ndarray]]:
    """By sequence: advantages, and old log-probs near the model's own, so that clips cut."""
    rng = np.random.default_rng(9)
    with torch.no_grad():
        log_probs, _ = log_probs_of(load_reference(model).double())
    return {
        "old": [(each.numpy() + rng.normal(0, 0.2, len(each))).astype(np.float32) for each in log_probs],
        "advantage": [np.float32(rng.normal()) for _ in log_probs],
    }


CASES = {
    "token_mean": Clipped(low=0.2, high=0.28),
    "sequence_mean": Clipped(low=0.2, high=0.28),
    "gspo": GSPO(low=0.03, high=0.03),
    "gmpo": GMPO(low=0.2, high=0.28),
}


def weights_of(name: str) -> list[np.ndarray]:
    lengths = [len(sequence.drawn) for sequence in sequences()]
    if name == "token_mean":
        return [np.full(length, 1 / sum(lengths)) for length in lengths]
    return [np.full(length, 1 / length / len(lengths)) for length in lengths]


def reference_gradient(folder: Path, numbers: dict[str, Any], name: str) -> dict[str, torch.Tensor]:
    model = load_reference(folder).double()
    log_probs, _ = log_probs_of(model)
    total = torch.zeros((), dtype=torch.float64)
    for new, old, a, weight in zip(log_probs, numbers["old"], numbers["advantage"], weights_of(name), strict=True):
        ratio, a = torch.exp(new - torch.from_numpy(old).double()), torch.tensor(float(a), dtype=torch.float64)
        if name == "gspo":
            s = ratio.prod() ** (1 / len(ratio))
            terms = torch.min(s * a, s.clip(0.97, 1.03) * a).expand(len(ratio))
        elif name == "gmpo":
            clipped = torch.min(ratio * a, ratio.clip(0.8, 1.28) * a).abs()
            terms = (torch.sign(a) * clipped.prod() ** (1 / len(ratio))).expand(len(ratio))
        else:
            terms = torch.min(ratio * a, ratio.clip(0.8, 1.28) * a)
        total = total - (torch.from_numpy(weight) * terms).sum()
    total.backward()
    return {key: parameter.grad for key, parameter in model.named_parameters()}


def columns_of(numbers: dict[str, Any], name: str) -> Columns:
    lengths = [len(sequence.drawn) for sequence in sequences()]
    return Columns(
        responses=responses(),
        columns={
            "weights": np.concatenate(weights_of(name)).astype(np.float32),
            "advantages": np.repeat(numbers["advantage"], lengths).astype(np.float32),
            "old_log_probs": np.concatenate(numbers["old"]),
        },
    )


LAYOUTS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({}, {"micro_batch_tokens": 10_000}),
    ({"context": 2}, {}),
    ({"tensor": 2, "sequence_parallel": True}, {}),
    ({"pipeline": 2}, {"recompute": "full"}),
]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in ("token_mean", "gspo") else [pytest.mark.slow]) for name in CASES]
)
def test_the_gradient_is_that_of_the_drawn_tokens(gloo, model, numbers, name):
    data, wanted = columns_of(numbers, name), reference_gradient(model, numbers, name)
    objective = PolicyObjective(loss=CASES[name])
    for layout, fields in LAYOUTS:
        got = gloo(size(layout), gradients_of, model, layout, data, objective, NONE_OF, fields)[0]
        errors = relative_error(got, wanted)
        assert max(errors.values()) < 1e-5, (layout, fields, errors)


def scored(place: RankPlace, folder: Path, layout: dict[str, Any], asked: Responses):
    config = actor_config(layout)
    actor = start_actor(place, folder, config)
    return actor.log_probs(asked, plan_for_actor(asked.sequence_lengths, config, hidden_size=64), TEMPERATURE)


@pytest.mark.parametrize("layout", [{}, {"context": 2}], ids=str)
def test_log_probs_and_entropies_are_those_of_the_drawn_tokens(gloo, model, layout):
    with torch.no_grad():
        log_probs, entropies = log_probs_of(load_reference(model).double())
    got = gloo(size(layout), scored, model, layout, responses())[0]
    np.testing.assert_allclose(got.log_probs, torch.cat(log_probs), atol=2e-5)
    np.testing.assert_allclose(got.entropy, torch.cat(entropies), atol=2e-5)


def test_given_tokens_by_hand():
    pairs = [([5, 6], [7, 8, 2]), ([9], [3, 3, 2])]
    arrays = [(np.array(prompt, np.int32), np.array(response, np.int32)) for prompt, response in pairs]
    responses = Responses.of(arrays, [[(1, 1)], [(0, 2)]])
    assert (responses.given_starts.tolist(), responses.given_lengths.tolist()) == ([3, 6], [1, 2])
    assert (responses.response_lengths.tolist(), responses.num_response_tokens) == ([2, 1], 3)
    packed = pack_micro_batch(responses, np.array([0, 1]), ONE_RANK)
    assert packed.input_ids.tolist() == [5, 6, 7, 8, 2, 9, 3, 3, 2]
    assert (packed.rows.tolist(), packed.targets.tolist()) == ([1, 3, 7], [7, 2, 2])
