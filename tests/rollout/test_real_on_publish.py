"""`rollout.on_publish` with a real server on the CPU: which weights draw a token, and whose keys and values it reads.

Reference: Hugging Face's forward of each version, at once or on the keys and values that the version before has left.
"""

import asyncio
import copy
import uuid
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations as pairs
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollout.errors import ServerUnavailable
from rollout.generation import FinishReason, Generation, GenerationRequest, SamplingParams, ServedPart, ThinkingLimit
from rollout.server.server_command import read_key
from rollout.wire.client import SglangClient
from rollout.wire.reply import Reply
from tests.rollout.fleet_kit import closing_client
from tests.rollout.folders import VOCABULARY, save_model
from tests.rollout.real_kit import (
    SHAPES,
    START_S,
    Place,
    all_of,
    begun,
    make_place,
    on_publish,
    reference,
    reference_in_flight,
)

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(torch.cuda.is_available(), reason="this server is started for the CPU"),
]
PROMPT, TOKENS = 40, 420


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    root, loop = tmp_path_factory.mktemp("servers"), asyncio.new_event_loop()
    made = make_place(loop, root, "qwen2", deterministic=False, **SHAPES["qwen2"])
    try:
        made.run(made.fleet.start(START_S))
        yield made
    finally:
        made.run(made.fleet.close())
        loop.close()


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.nn.Module]:
    """Other weights, of which a response of the first is unlikely."""
    folder = tmp_path_factory.mktemp("other")
    return folder, save_model(folder, "qwen2", seed=10, **SHAPES["qwen2"])


@pytest.fixture(scope="module")
def near(place: Place, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.nn.Module]:
    """The first weights after a small change, as by an update."""
    folder, model = tmp_path_factory.mktemp("near"), copy.deepcopy(place.model)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor += 0.03 * tensor.square().mean().sqrt() * torch.randn(tensor.shape, generator=draw)
    model.save_pretrained(folder)
    return folder, model


def long_ones(seed: int, count: int = 8, tokens: int = TOKENS) -> list[GenerationRequest]:
    """Two groups, whose prompts are longer than what tells versions apart."""
    draw = np.random.default_rng(seed)
    prompts = draw.integers(0, VOCABULARY, (2, PROMPT)).astype(np.int32)
    return [
        GenerationRequest(
            request_id=f"{seed}/{index}",
            group_id=f"{seed}/{index % 2}",
            prompt_ids=prompts[index % 2],
            sampling=SamplingParams(max_new_tokens=tokens),
            seed=index,
        )
        for index in range(count)
    ]


def gap(one: Generation, expected: np.ndarray, places: np.ndarray | slice = slice(None)) -> float:
    """Largest difference of log-probs, nats."""
    return float(np.abs(one.log_probs - expected)[places].max())


def alike_at_first(one: np.ndarray, other: np.ndarray) -> int:
    """Tokens before the first difference."""
    return int(np.argmin(np.append(one == other, False)))


@pytest.mark.parametrize("mode", [pytest.param("restart", marks=pytest.mark.slow), "recompute", "keep"])
def test_tokens_have_the_version_that_drew_them(place: Place, near: tuple[Path, torch.nn.Module], mode: str) -> None:
    folder, changed = near
    asked, parts = long_ones(seed=1), list[ServedPart]()
    models = {20: place.model, 21: changed, 22: place.model}

    async def work() -> tuple[list[Generation], list[Generation], list[GenerationRequest]]:
        on_publish(place, mode)
        await place.fleet.publish(place.folder, 19)
        await place.fleet.publish(place.folder, 20)
        place.fleet._requests.observe = parts.append
        tasks = [asyncio.ensure_future(place.fleet.generate(one)) for one in asked]
        await begun(place, len(asked))
        for version, weights in ((21, folder), (22, place.folder)):
            await place.fleet.publish(weights, version)
            await begun(place, len(asked))
        answers = await asyncio.gather(*tasks)
        # Their prompts, and the responses for another turn, are in the cache, with keys and values of older weights.
        short = SamplingParams(max_new_tokens=5)
        new = [replace(one, request_id=f"new{one.request_id}", sampling=short) for one in asked]
        for one, answer in zip(asked, answers, strict=True):
            turn = np.concatenate([one.prompt_ids, answer.token_ids, one.prompt_ids[:3]])
            new.append(replace(one, request_id=f"turn{one.request_id}", sampling=short, prompt_ids=turn))
        return answers, await all_of(place.fleet, new), new

    answers, new, asked_new = place.run(work())
    kept, stale = [], []
    for one, answer in zip(asked, answers, strict=True):
        assert answer.token_ids.size == TOKENS
        assert (np.diff(answer.weight_versions) >= 0).all()
        assert set(answer.weight_versions) == {20, 21, 22}
        wholes = {by: reference(model, one.prompt_ids, answer.token_ids) for by, model in models.items()}
        if mode == "keep":
            assert gap(answer, reference_in_flight(models, one, answer)) < 1e-4
        for by, whole in wholes.items():
            places = answer.weight_versions == by
            assert (mode == "keep" and by > 20) or gap(answer, whole, places) < 1e-4
        places = answer.weight_versions == 21
        kept.append(np.abs(answer.log_probs - wholes[21])[places].mean())
        stale.append(np.abs(wholes[20] - wholes[21])[places].mean())
    # Old keys and values show, but hardly more than all of the old weights would: which tokens are compared is chance.
    assert np.mean(stale) > 0.01
    assert mode != "keep" or 0.1 * np.mean(stale) < np.mean(kept) < 1.5 * np.mean(stale)
    for one, answer in zip(asked_new, new, strict=True):
        assert set(answer.weight_versions) == {22}
        assert gap(answer, reference(place.model, one.prompt_ids, answer.token_ids)) < 1e-4
    again = [part for part in parts if part.request_id in {one.request_id for one in asked}]
    again = [part for part in again if part.prompt_tokens > PROMPT]
    assert len(again) == 2 * len(asked)
    drawn = [answer.token_ids for answer in answers]
    alike = max(alike_at_first(one, other) for group in (drawn[::2], drawn[1::2]) for one, other in pairs(group, 2))
    for part in again:
        assert part.cached_tokens is not None
        # `keep` reads the last token alone; the others find at most what another of the group has read.
        assert part.cached_tokens == part.prompt_tokens - 1 if mode == "keep" else part.cached_tokens <= PROMPT + alike


@pytest.mark.parametrize("mode", ["recompute", pytest.param("keep", marks=pytest.mark.slow)])
def test_thinking_is_interrupted_and_a_carried_response_goes_on(
    place: Place, other: tuple[Path, torch.nn.Module], mode: str
) -> None:
    """A publish before the budget, and one behind the phrase; the phrase is given, and read by the newer weights."""
    folder, changed = other
    limit = ThinkingLimit(budget=150, end_ids=(3, 4, 5), ended=lambda drawn: False)
    asked = [replace(one, sampling=replace(one.sampling, thinking=limit)) for one in long_ones(seed=2)]

    async def work() -> list[Generation]:
        on_publish(place, mode)
        await place.fleet.publish(place.folder, 30)
        await place.fleet.publish(place.folder, 31)
        tasks = [asyncio.ensure_future(place.fleet.generate(one)) for one in asked]
        await begun(place, len(asked))
        await place.fleet.publish(folder, 32)
        return await asyncio.gather(*tasks)

    answers = place.run(work())
    for one, answer in zip(asked, answers, strict=True):
        assert answer.given == ((150, 3),)
        old = answer.weight_versions == 31
        assert 0 < old.sum() <= 150
        drawn = np.delete(np.arange(answer.token_ids.size), [150, 151, 152])
        expected = {
            model: reference(model, one.prompt_ids, answer.token_ids)[drawn] for model in (place.model, changed)
        }
        assert gap(answer, expected[place.model], old) < 1e-4
        if mode == "recompute":
            assert gap(answer, expected[changed], ~old) < 1e-4
    # One that another run began has no keys and values here: the newest weights read it.
    first = next(answer for answer in answers if answer.drawn > 0)
    cut = 100
    begun_one = replace(
        asked[0],
        request_id="carried",
        begun=replace(
            first,
            token_ids=first.token_ids[:cut],
            log_probs=first.log_probs[:cut],
            weight_versions=first.weight_versions[:cut],
            finish_reason=FinishReason.ABORT,
            given=(),
        ),
    )
    carried = place.run(place.fleet.generate(begun_one))
    drawn = np.delete(np.arange(carried.token_ids.size), [150, 151, 152])
    expected_rest = reference(changed, begun_one.prompt_ids, carried.token_ids)[drawn]
    assert set(carried.weight_versions[cut:]) == {32}
    assert gap(carried, expected_rest, slice(cut, None)) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("pause", ["in_place", "retract"])
def test_why_running_requests_are_never_paused(place: Place, other: tuple[Path, torch.nn.Module], pause: str) -> None:
    """SGLang's own pause: tokens of the old weights come out under the new label, and the cache cannot be flushed, so
    that a retracted request finds its prompt's old keys and values. If this fails with a newer SGLang, `recompute` and
    `keep` may use it."""
    folder, changed = other
    asked = long_ones(seed=3)
    place.run(place.fleet.publish(place.folder, 40))

    async def later(client: SglangClient, at: int, segments: list[Reply]) -> Reply:
        await asyncio.sleep(0.03 * at)  # else all would stream at the same tokens
        one = asked[at]
        return await client.generate(uuid.uuid4().hex, one.prompt_ids, one.sampling, segments=segments)

    async def work() -> tuple[list[Reply], list[list[Reply]]]:
        key = read_key(place.folder.with_suffix(".key"))
        options: dict[str, Any] = {"request_deadline_s": 60.0, "control_deadline_s": 5.0, "api_key": key}
        async with closing_client(SglangClient(place.server.url, **options)) as client:
            segments: list[list[Reply]] = [[] for _ in asked]
            tasks = [asyncio.ensure_future(later(client, at, segments[at])) for at in range(len(asked))]
            while not all(segments):
                await asyncio.sleep(0.01)
            await client._call("/pause_generation", {"mode": pause})
            await client.update_weights("disk", {"model_path": str(folder)}, "41", 60)
            with pytest.raises(ServerUnavailable, match="a request still runs"):
                await client.flush_cache()
            await client.resume()
            return await asyncio.gather(*tasks), segments

    replies, segments = place.run(work())
    wrong, differ = 0, []
    for one, reply, parts in zip(asked, replies, segments, strict=True):
        ids = reply.token_ids
        old = np.abs(reply.log_probs - reference(place.model, one.prompt_ids, ids)) < 1e-4
        assert old[0]
        first_new = int(np.flatnonzero(~old)[0])
        labels = np.concatenate([[int(part.weight_label or 0)] * part.token_ids.size for part in parts])
        wrong += int((labels[:first_new] == 41).sum())
        differ.append(np.abs(reply.log_probs - reference(changed, one.prompt_ids, ids))[first_new:].max())
    assert wrong > 0
    assert max(differ) > 0.05
    place.run(place.fleet.publish(place.folder, 42))
