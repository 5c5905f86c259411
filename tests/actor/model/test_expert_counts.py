"""Tokens of each expert and what the routers say, counted by the log-prob pass: as transformers' router logits say, on
every layout, with the routers' own choice and with replay."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_dapo.actor.packing import plan_for_actor
from megatron_dapo.actor.step_data import Responses
from megatron_dapo.algorithm.policy_loss import PolicyObjective
from tests.actor.gloo import RankPlace
from tests.actor.mini_batches import TEMPERATURE, Columns, actor_config, columns, mini_batch, start_actor
from tests.actor.model.test_mixture_of_experts import TENSOR, size
from tests.actor.model.test_routing_replay import EXPERTS, LAYERS, NONE_OF, TOP_K, foreign, told
from tests.actor.tiny import FAMILIES, MIXTURE, load_reference, save_tiny

LAYOUTS = [
    pytest.param({}, marks=pytest.mark.slow),
    TENSOR | {"expert": 2},
    pytest.param({"context": 2, "expert": 2}, marks=pytest.mark.slow),
    pytest.param({"data": 2, "expert": 2}, marks=pytest.mark.slow),
    pytest.param({"pipeline": 2}, marks=pytest.mark.slow),
    {"pipeline": 2, "virtual_pipeline": 2},
    pytest.param({"data": 2}, marks=pytest.mark.slow),
    pytest.param(TENSOR | {"expert_tensor": 2}, marks=pytest.mark.slow),
    pytest.param({"pipeline": 2, "data": 2, "expert": 2}, marks=pytest.mark.slow),
    pytest.param(TENSOR | {"context": 2, "expert": 4}, marks=pytest.mark.slow),
    pytest.param(TENSOR | {"pipeline": 2, "expert": 2}, marks=pytest.mark.slow),
]


def recount(folder: Path, responses: Responses) -> np.ndarray:
    """float64 [layers, experts + 3], token by token, from transformers' router logits in float64."""
    model, logits = load_reference(folder).double(), [[] for _ in range(LAYERS)]
    if responses.routing is not None:
        told(model, responses)
    for seen, layer in zip(logits, model.model.layers, strict=True):
        layer.mlp.gate.register_forward_hook(lambda _, __, output, seen=seen: seen.append(output[0].detach().numpy()))
    counts, start = np.zeros((LAYERS, EXPERTS + 3)), 0
    for number, length in enumerate(responses.sequence_lengths.tolist()):
        with torch.no_grad():
            model(torch.from_numpy(responses.token_ids[start : start + length].astype(np.int64))[None])
        for layer in range(LAYERS):
            for at in range(length - 1):
                scores = logits[layer][number][at]
                own = set(np.argsort(-scores)[:TOP_K].tolist())
                went = own if responses.routing is None else set(responses.routing[start + at, layer].tolist())
                share = np.exp(scores - scores.max()) / np.exp(scores - scores.max()).sum()
                counts[layer, list(went)] += 1
                counts[layer, EXPERTS:] += 1, -(share * np.log(share)).sum(), went != own
        start += length
    return counts


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> list[tuple[Path, Columns, list[tuple[Responses, np.ndarray]]]]:
    """(folder, mini-batch, responses with what is counted of them): chosen experts' weights normalised, and not;
    without and with replay, and one response alone, which leaves other data-parallel ranks without any."""
    found = []
    for normalised in (True, False):
        folder = save_tiny(tmp_path_factory.mktemp("moe"), MIXTURE, tied=False, norm_topk_prob=normalised)
        data = columns(folder)
        replayed = replace(data.responses, routing=foreign(data.responses))
        asked = [data.responses, replayed, replayed.select(np.array([3]))]
        found.append((folder, data, [(each, recount(folder, each)) for each in asked]))
    return found


def counted(
    place: RankPlace, folder: Path, layout: dict[str, Any], data: Columns, asked: list[Responses]
) -> list[np.ndarray] | None:
    """Rank 0: what is counted of each, and of the first again after an update, which recomputes its layers."""
    config = actor_config(layout, routing_replay=True, recompute="full", optimizer={"lr": 1e-30})
    actor = start_actor(place, folder, config)

    def counts(responses: Responses) -> np.ndarray | None:
        plan = plan_for_actor(responses.sequence_lengths, config, hidden_size=64)
        found = actor.log_probs(responses, plan, TEMPERATURE)
        return None if found is None else found.expert_counts

    before = [counts(each) for each in asked]
    actor.update([mini_batch(data, config, without=NONE_OF)], PolicyObjective(), TEMPERATURE)
    return [*before, counts(asked[0])]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_each_token_is_counted_once_a_layer(gloo, models, layout):
    for folder, data, asked in models:
        results = gloo(size(layout), counted, folder, layout, data, [each for each, _ in asked])
        assert all(count is None for other in results[1:] for count in other)
        wanted = [count for _, count in asked]
        for got, expected in zip(results[0], [*wanted, wanted[0]], strict=True):
            exact = [*range(EXPERTS + 1), EXPERTS + 2]
            np.testing.assert_array_equal(got[:, exact], expected[:, exact])
            np.testing.assert_allclose(got[:, EXPERTS + 1], expected[:, EXPERTS + 1], rtol=1e-6)


def test_the_recount_is_of_what_it_is_for(models):
    """The routers do differ from the replayed experts, and some expert of the lone response gets nothing."""
    for _, data, asked in models:
        tokens = (data.responses.sequence_lengths - 1).sum()
        (_, own), (_, replayed), (_, alone) = asked
        assert (own[:, EXPERTS] == tokens).all()
        assert (own[:, :EXPERTS].sum(axis=1) == TOP_K * tokens).all()
        assert not own[:, -1].any()
        assert (replayed[:, -1] > tokens / 2).all()
        assert not np.array_equal(own, replayed)
        assert alone[:, EXPERTS].tolist() == [24] * LAYERS


def test_a_dense_model_counts_nothing(gloo, tmp_path):
    folder = save_tiny(tmp_path, FAMILIES[1], tied=False)
    data = columns(folder)
    assert gloo(1, counted_dense, folder, data)[0] is None


def counted_dense(place: RankPlace, folder: Path, data: Columns) -> np.ndarray | None:
    config = actor_config()
    plan = plan_for_actor(data.responses.sequence_lengths, config, hidden_size=64)
    found = start_actor(place, folder, config).log_probs(data.responses, plan, TEMPERATURE)
    assert found is not None
    return found.expert_counts
