"""A real SGLang server on the CPU tells which experts each token was sent to: those of transformers' routers, of the
weights that drew the token."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from rollout.generation import FinishReason, Generation, GenerationRequest, RoutingShape, SamplingParams, ThinkingLimit
from tests.rollout.folders import save_model
from tests.rollout.real_kit import (
    START_S,
    Place,
    all_of,
    assert_log_probs,
    make_place,
    on_publish,
    read_in_turn,
    requests_of,
)

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(torch.cuda.is_available(), reason="this server is started for the CPU"),
]
SHAPE = RoutingShape(layers=4, top_k=2, experts=6)
NEAR = 1e-4
"""Two experts whose probabilities differ by less may change places."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    root, loop = tmp_path_factory.mktemp("servers"), asyncio.new_event_loop()
    made = make_place(loop, root, "qwen3_moe", deterministic=False, routed_experts=True)
    try:
        made.run(made.fleet.start(START_S))
        yield made
    finally:
        made.run(made.fleet.close())
        loop.close()


def asked(count: int, seed: int, **sampling: Any) -> list[GenerationRequest]:
    return [replace(one, routing=SHAPE) for one in requests_of(count, seed, **sampling)]


def probabilities(model: torch.nn.Module, ids: np.ndarray) -> np.ndarray:
    """[tokens, layers, experts] by transformers' routers."""
    return routed(model, torch.from_numpy(ids.astype(np.int64))[None])


def routed(model: torch.nn.Module, ids: torch.Tensor, cache: DynamicCache | None = None) -> np.ndarray:
    """As `probabilities`, of tokens behind those whose keys and values are in `cache`."""
    found: list[torch.Tensor] = []
    gates = [layer.mlp.gate for layer in model.model.layers]  # type: ignore[union-attr, operator]
    hooks = [gate.register_forward_hook(lambda _, __, output: found.append(output[0].softmax(-1))) for gate in gates]
    with torch.no_grad():
        model(ids, past_key_values=cache, use_cache=cache is not None)
    for hook in hooks:
        hook.remove()
    return torch.stack(found, dim=1).numpy()


def check(model: torch.nn.Module, ids: np.ndarray, rows: np.ndarray, first: int = 0) -> None:
    """Rows of the tokens from `first` on are the experts with the largest probabilities."""
    most_likely(probabilities(model, ids)[first : first + len(rows)], rows)


def most_likely(of: np.ndarray, rows: np.ndarray) -> None:
    least = np.take_along_axis(of, rows.astype(np.int64), -1).min(-1)
    np.testing.assert_array_less(np.sort(of, -1)[..., -SHAPE.top_k], least + NEAR)


def whole(one: GenerationRequest, drawn: Generation) -> tuple[np.ndarray, np.ndarray]:
    """Ids of prompt and response; their experts, a row for each token but the last."""
    ids = np.concatenate([one.prompt_ids, drawn.token_ids])
    assert drawn.routing is not None
    assert drawn.routing.dtype == np.uint8
    assert drawn.routing.shape == (ids.size - 1, SHAPE.layers, SHAPE.top_k)
    assert (drawn.routing[..., 0] != drawn.routing[..., 1]).all()
    return ids, drawn.routing


def test_experts_are_those_of_the_model(place: Place) -> None:
    """Also of prompts that the prefix cache held."""
    requests = asked(16, seed=1)
    drawn = place.run(all_of(place.fleet, requests))
    assert_log_probs(place.model, requests, drawn)
    for one, generation in zip(requests, drawn, strict=True):
        check(place.model, *whole(one, generation))
    unasked = place.run(place.fleet.generate(replace(requests[0], routing=None)))
    assert unasked.routing is None


def test_given_tokens_have_rows_too(place: Place) -> None:
    limit = ThinkingLimit(budget=5, end_ids=(7, 8, 9), ended=lambda drawn: False)
    requests = [one for one in asked(12, seed=2) if one.sampling.max_new_tokens > limit.budget]
    requests = [replace(one, sampling=replace(one.sampling, thinking=limit)) for one in requests]
    for one, drawn in zip(requests, place.run(all_of(place.fleet, requests)), strict=True):
        assert drawn.given == ((5, 3),)
        check(place.model, *whole(one, drawn))


def test_rows_alone_are_read_again(place: Place) -> None:
    """Of a complete response whose rows were lost with its server; no token is drawn."""
    for one in asked(4, seed=3):
        drawn = place.run(place.fleet.generate(one))
        ids, rows = whole(one, drawn)
        for kept in (None, rows[: len(rows) // 2]):
            begun = replace(drawn, routing=kept, finish_reason=FinishReason.ABORT)
            again = place.run(place.fleet.generate(replace(one, begun=begun)))
            np.testing.assert_array_equal(again.token_ids, drawn.token_ids)
            assert again.finish_reason is FinishReason.LENGTH
            check(place.model, ids, whole(one, again)[1])


@pytest.mark.parametrize("mode", [pytest.param("restart", marks=pytest.mark.slow), "keep"])
def test_after_a_publish_each_row_is_of_the_weights_that_drew_the_token(
    place: Place, tmp_path: Path, mode: str
) -> None:
    """Under `keep` also those that it reads on top of old keys and values."""
    other = save_model(tmp_path / "new", "qwen3_moe", seed=9)
    requests = [
        replace(one, prompt_ids=one.prompt_ids[:20], sampling=replace(one.sampling, max_new_tokens=300))
        for one in asked(8, seed=4)
    ]

    async def work() -> list[Generation]:
        on_publish(place, mode)
        await place.fleet.publish(place.folder, 1)  # `keep` forgets what there was before the first
        answers = asyncio.ensure_future(all_of(place.fleet, requests))
        while place.fleet.load()[0] < before + 8 * 32:
            await asyncio.sleep(0.02)
        await place.fleet.publish(tmp_path / "new", 2)
        return await answers

    before = place.fleet.load()[0]
    interrupted = 0
    for one, drawn in zip(requests, place.run(work()), strict=True):
        ids, rows = whole(one, drawn)
        first = int((drawn.weight_versions == 1).sum())
        interrupted += 0 < first < drawn.drawn
        last = one.prompt_ids.size + first - 1
        check(place.model, ids, rows[:last])
        if mode == "keep":
            most_likely(read_in_turn({1: place.model, 2: other}, one, drawn, routed), rows)
        else:
            check(other, ids, rows[last:], first=last)
    assert interrupted == len(requests)
    on_publish(place, "restart")
    place.run(place.fleet.publish(place.folder, 3))


@pytest.mark.slow
def test_responses_that_lost_their_places_have_all_rows(tmp_path: Path) -> None:
    """Publishes of the same weights come meanwhile, so that one model is the reference."""
    loop, tokens = asyncio.new_event_loop(), 450
    settings = {"max_running_requests": 16, "kv_cache_tokens": 1200, "stream_every": 8}
    settings["extra_args"] = ("--schedule-conservativeness", "0.01")  # takes in more than it has room for
    made = make_place(loop, tmp_path, "qwen3_moe", deterministic=False, routed_experts=True, settings=settings)
    requests = [
        replace(one, sampling=SamplingParams(max_new_tokens=tokens), prompt_ids=one.prompt_ids[:20])
        for one in asked(16, seed=4)
    ]

    async def later(seconds: float, one: GenerationRequest) -> Generation:
        await asyncio.sleep(seconds)
        return await made.fleet.generate(one)

    async def work() -> list[Generation]:
        try:
            await made.fleet.start(START_S)
            answers = asyncio.gather(*(later(at * 0.05, one) for at, one in enumerate(requests)))
            for version in (1, 2, 3):
                while (tmp_path / "qwen3_moe.log").read_text().count("Retract requests") < version:
                    assert not answers.done(), "no response lost its place"
                    await asyncio.sleep(0.02)
                await made.fleet.publish(made.folder, version)
            return await answers
        finally:
            await made.fleet.close()

    for one, drawn in zip(requests, made.run(work()), strict=True):
        assert drawn.token_ids.size == tokens
        check(made.model, *whole(one, drawn))
    loop.close()
