"""Routing replay: the gradient is that of the given experts, on every layout, with and without recompute.

The reference is transformers' forward in float64 whose routers are told the experts; the experts are random, so that
none of them is what a router would have chosen.
"""

import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_dapo.actor.model.hf_config import HFModelConfig, check_actor
from megatron_dapo.actor.packing import pack_micro_batch
from megatron_dapo.actor.step_data import Responses
from megatron_dapo.algorithm.policy_loss import PolicyObjective
from megatron_dapo.config.actor_config import ActorConfig, LayoutConfig
from megatron_dapo.config.base import ConfigError
from tests.actor.gloo import RankPlace
from tests.actor.mini_batches import (
    TEMPERATURE,
    Columns,
    actor_config,
    columns,
    eq8_loss,
    mini_batch,
    reference_log_probs,
    relative_error,
    start_actor,
)
from tests.actor.model.test_mixture_of_experts import TENSOR, size
from tests.actor.tiny import MIXTURE, by_expert, load_reference, save_tiny
from tools.actor_job import loss_and_gradients

LAYERS, EXPERTS, TOP_K = 4, 8, 2
NONE_OF = ("reference_log_probs", "correction")


def foreign(responses: Responses) -> np.ndarray:
    """Random experts of each token."""
    draw = np.random.default_rng(5).random((len(responses.token_ids), LAYERS, EXPERTS))
    return draw.argsort(-1)[..., :TOP_K].astype(np.uint8)


def told(model: torch.nn.Module, responses: Responses) -> torch.nn.Module:
    """The model with the experts of its n-th call those of the n-th response."""
    assert responses.routing is not None
    ends, calls = np.cumsum(responses.sequence_lengths), []
    parts = np.split(responses.routing.astype(np.int64), ends[:-1])
    model.register_forward_pre_hook(lambda *_: calls.append(parts[len(calls)]))
    for number, layer in enumerate(model.model.layers):

        def choose(gate: Any, _: Any, output: Any, number: int = number) -> Any:
            chosen = torch.from_numpy(calls[-1][:, number])
            weights = output[0].softmax(-1).gather(1, chosen)
            return output[0], weights / weights.sum(-1, keepdim=True) if gate.norm_topk_prob else weights, chosen

        layer.mlp.gate.register_forward_hook(choose)
    return model


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> list[tuple[Path, Columns, torch.Tensor, dict[str, torch.Tensor]]]:
    """(folder, mini-batch with foreign experts, its log-probs, its gradient): weights normalised, and not."""
    found = []
    for normalised in (True, False):
        folder = save_tiny(tmp_path_factory.mktemp("moe"), MIXTURE, tied=False, norm_topk_prob=normalised)
        data = columns(folder)
        data = replace(data, responses=replace(data.responses, routing=foreign(data.responses)))
        model = told(load_reference(folder).double(), data.responses)
        log_probs, _ = reference_log_probs(model, data.responses)
        eq8_loss(log_probs, data).backward()
        gradient = {name: parameter.grad for name, parameter in model.named_parameters()}
        found.append((folder, data, log_probs.detach(), by_expert(gradient)))
    return found


def replayed(place: RankPlace, folder: Path, layout: dict[str, Any], data: Columns, fields: dict[str, Any]):
    """Rank 0: log-probs, those of the reference weights, and the gradient."""
    config = actor_config(layout, routing_replay=True, **fields)
    actor = start_actor(place, folder, config, keep_reference=True)
    batch = mini_batch(data, config, without=NONE_OF)
    asked = data.responses, batch.plan, TEMPERATURE
    old, reference = actor.log_probs(*asked), actor.reference_log_probs(*asked)
    result = loss_and_gradients(actor, batch, PolicyObjective(), TEMPERATURE)
    return None if result is None else (old.log_probs, reference.log_probs, result[1])


LAYOUTS: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    pytest.param({}, ("none", "full"), marks=pytest.mark.slow),
    pytest.param({"data": 2, "expert": 2}, ("full",), marks=pytest.mark.slow),
    (TENSOR | {"expert": 2}, ("none", "full")),
    ({"context": 2, "expert": 2}, ("none",)),
    pytest.param({"pipeline": 2}, ("full",), marks=pytest.mark.slow),
    ({"pipeline": 2, "virtual_pipeline": 2}, ("none", "full")),
    pytest.param({"data": 2, "expert": 2}, ("none", 1), marks=pytest.mark.slow),
    pytest.param({"context": 2, "expert": 2}, ("full", ("core_attn",)), marks=pytest.mark.slow),
    pytest.param(TENSOR | {"expert_tensor": 2}, ("full",), marks=pytest.mark.slow),
    pytest.param({"pipeline": 2, "data": 2, "expert": 2}, ("none", "full"), marks=pytest.mark.slow),
    pytest.param(TENSOR | {"context": 2, "expert": 4}, ("none", "full"), marks=pytest.mark.slow),
]  # type: ignore[list-item]


@pytest.mark.parametrize(("layout", "recomputes"), LAYOUTS, ids=str)
def test_gradients_are_those_of_the_given_experts(gloo, models, layout, recomputes):
    for recompute in recomputes:
        folder, data, log_probs, gradient = models[recompute == "full"]
        got, reference, grads = gloo(size(layout), replayed, folder, layout, data, {"recompute": recompute})[0]
        np.testing.assert_allclose(got, log_probs, atol=2e-5)
        own = reference_log_probs(load_reference(folder), data.responses)[0].detach()
        np.testing.assert_allclose(reference, own, atol=2e-5)  # a reference routes for itself
        assert float((own - log_probs).abs().mean()) > 0.05
        errors = relative_error(grads, gradient)
        assert max(errors.values()) < 1e-5, (layout, recompute, errors)


@pytest.mark.parametrize("layout", [pytest.param({}, marks=pytest.mark.slow), {"pipeline": 2}], ids=str)
def test_recompute_changes_no_bit(gloo, models, layout):
    folder, data, _, _ = models[0]
    one, other = (gloo(size(layout), replayed, folder, layout, data, {"recompute": how})[0] for how in ("none", "full"))
    np.testing.assert_array_equal(one[0], other[0])
    assert all(torch.equal(one[2][name], other[2][name]) for name in one[2])


def own_and_replayed(place: RankPlace, folder: Path, data: Columns):
    """Log-probs and gradient without replay, and with the experts that its routers chose then."""
    bare, found, chosen = replace(data, responses=replace(data.responses, routing=None)), [], []
    for replay in (False, True):
        config = actor_config(routing_replay=replay, micro_batch_tokens=10_000)
        actor = start_actor(place, folder, config)
        batch = mini_batch(bare, config, without=NONE_OF)
        if replay:
            for layer in actor._chunks[0].module.decoder.layers:
                take = layer.mlp.router.router_replay.get_replay_topk

                def record(*asked: Any, take: Any = take) -> Any:
                    values, ids = take(*asked)
                    chosen.append(ids.numpy().astype(np.uint8))
                    return values, ids

                layer.mlp.router.router_replay.get_replay_topk = record
            actor.log_probs(bare.responses, batch.plan, TEMPERATURE)  # one micro-batch, in the order of the responses
            mine = replace(bare.responses, routing=np.stack(chosen, axis=1))
            batch = mini_batch(replace(bare, responses=mine), config, without=NONE_OF)
        log_probs = actor.log_probs(batch.responses, batch.plan, TEMPERATURE).log_probs
        _, gradient = loss_and_gradients(actor, batch, PolicyObjective(), TEMPERATURE)
        reports = actor.update([batch, batch], PolicyObjective(), TEMPERATURE)
        found.append((log_probs, gradient, reports))
        actor.close()
    return found


def test_replaying_the_own_choice_changes_no_bit(gloo, models):
    folder, data, _, _ = models[0]
    [(before, first, steps), (after, second, again)] = gloo(1, own_and_replayed, folder, data)[0]
    np.testing.assert_array_equal(before, after)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert steps[0] == again[0]


def test_rows_follow_their_tokens(models):
    """Selected, packed and cut for context parallelism; padding has distinct experts."""
    responses = models[0][1].responses
    starts = np.cumsum(responses.sequence_lengths) - responses.sequence_lengths
    chosen = np.array([4, 0])
    layout = LayoutConfig(context=2)
    rows = {}
    for rank in (0, 1):
        packed = pack_micro_batch(responses.select(np.array([4, 7, 0])), np.array([0, 2]), layout, context_rank=rank)
        sequence = np.repeat([0, 1], np.diff(packed.sequence_bounds) // 2)
        for at, key in enumerate(zip(sequence.tolist(), packed.position_ids.tolist(), strict=True)):
            rows[key] = packed.routing[at]
    for sequence, response in enumerate(chosen):
        length = responses.sequence_lengths[response]
        for place in range(length):
            np.testing.assert_array_equal(rows.pop((sequence, place)), responses.routing[starts[response] + place])
    assert rows
    assert all((row == np.arange(TOP_K)).all() for row in rows.values())
    empty = pack_micro_batch(responses, np.zeros(0, np.int64), layout)
    assert (empty.routing == np.arange(TOP_K)).all()
    assert len(empty.routing) == 2


def test_a_wrong_number_of_rows_is_refused():
    pairs = [(np.array([5, 6], np.int32), np.array([7], np.int32)), (np.array([5], np.int32), np.array([7], np.int32))]
    rows = np.zeros((5, LAYERS, TOP_K), np.uint8)
    made = Responses.of(pairs, routing=[rows[:2], rows[:1]])
    assert made.routing.shape == (5, LAYERS, TOP_K)
    assert (made.routing[[2, 4]] == np.arange(TOP_K)).all()
    assert not made.routing[[0, 1, 3]].any()
    with pytest.raises(ValueError, match="response 1 has 2 rows of routing for 2 tokens"):
        Responses.of(pairs, routing=[rows[:2], rows[:2]])


@pytest.mark.parametrize("experts", [None, 257])
def test_a_model_that_cannot_be_replayed_is_refused(tmp_path, experts):
    family, changes = ("qwen3", {}) if experts is None else (MIXTURE, {"num_experts": experts})
    hf = HFModelConfig.load(save_tiny(tmp_path, family, tied=False, num_hidden_layers=1, **changes))
    check_actor(hf, ActorConfig())
    with pytest.raises(ConfigError, match=f"actor.routing_replay = true: the model has {experts or 0} experts"):
        check_actor(hf, ActorConfig(routing_replay=True))


def rows_at_once(place: RankPlace, folder: Path, data: Columns, recompute: str) -> tuple[int, int, int]:
    """Micro-batches, and of how many the rows were on the device at once: in log-probs, in an update."""
    config = actor_config(routing_replay=True, recompute=recompute)
    actor = start_actor(place, folder, config)
    batch = mini_batch(data, config, without=NONE_OF)
    send, sent, most = actor.passes._to_device, [], []

    def counted(array: np.ndarray) -> torch.Tensor:
        tensor = send(array)
        if array.dtype == np.uint8:
            sent.append(weakref.ref(tensor))
            most.append(sum(one() is not None for one in sent))
        return tensor

    actor.passes._to_device = counted
    actor.log_probs(data.responses, batch.plan, TEMPERATURE)
    first, count = max(most), len(most)
    most.clear()
    actor.update([batch], PolicyObjective(), TEMPERATURE)
    return count, first, max(most)


@pytest.mark.parametrize("recompute", [pytest.param("none", marks=pytest.mark.slow), "full"])
def test_rows_come_to_the_device_with_their_micro_batch_and_leave_with_it(gloo, models, recompute):
    folder, data, _, _ = models[0]
    [(count, in_log_probs, in_update)] = gloo(1, rows_at_once, folder, data, recompute)
    assert count > 3
    # The next micro-batch's come before the loop lets go of the one before.
    assert max(in_log_probs, in_update) <= 2
