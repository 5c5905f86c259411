"""Real, unmodified SGLang over HTTP, on the CPU, with tiny random models. The reference is Hugging Face's forward.

Two servers start once for the module: a deterministic Qwen3 and a fast Qwen2 (tied embeddings, biases).
"""

import asyncio
import uuid
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import aiohttp
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from rollout.errors import ServerRefused, WeightMismatch
from rollout.generation import FinishReason, Generation, GenerationRequest, SamplingParams, ServedPart, ThinkingLimit
from rollout.server.server_command import read_key
from rollout.weights.checksums import expected_checksums, verify
from rollout.wire.client import SglangClient
from rollout.wire.reply import MEDIA_TYPE, Reply
from tests.rollout.fleet_kit import closing_client
from tests.rollout.folders import CONTEXT, VOCABULARY, save_model
from tests.rollout.real_kit import (
    SHAPES,
    Place,
    all_of,
    assert_log_probs,
    begun,
    kill,
    places_fixture,
    reference,
    requests_of,
)
from tools.bisect import score

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(torch.cuda.is_available(), reason="these servers are started for the CPU"),
]
__all__ = ["places_fixture"]  # pytest finds the fixture by its import


@pytest.mark.parametrize("kind", ["qwen3", "qwen2"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_are_those_of_the_model(places: dict[str, Place], kind: str, temperature: float) -> None:
    place = places[kind]
    asked = requests_of(24, seed=1, temperature=temperature)
    answers = place.run(all_of(place.fleet, asked))
    assert_log_probs(place.model, asked, answers)
    assert [answer.token_ids.size for answer in answers] == [one.sampling.max_new_tokens for one in asked]
    assert {answer.finish_reason for answer in answers} == {FinishReason.LENGTH}
    assert len({tuple(answer.token_ids[:3]) for answer in answers}) > 12  # drawn, not greedy


def test_greedy_is_the_most_likely_token(places: dict[str, Place]) -> None:
    place = places["qwen2"]
    (one,) = requests_of(1, seed=2, temperature=0.0)
    answer = place.run(place.fleet.generate(one))
    ids = torch.from_numpy(np.concatenate([one.prompt_ids, answer.token_ids])).long()[None]
    with torch.no_grad():
        best = place.model(ids).logits[0, one.prompt_ids.size - 1 : -1].argmax(-1)
    np.testing.assert_array_equal(answer.token_ids, best.numpy())


def test_a_server_that_left_its_memory_and_came_back_answers_as_before(places: dict[str, Place]) -> None:
    """On the CPU the calls free nothing; that the server survives them and holds its weights shows here."""
    place = places["qwen2"]
    asked = requests_of(4, seed=5, temperature=0.0)
    before = place.run(all_of(place.fleet, asked))
    (given,) = place.run(place.fleet.release_memory())
    assert (given or 0) > 0, "GiB of weights and KV cache, by its own account"
    place.run(place.fleet.resume_memory())
    after = place.run(all_of(place.fleet, asked))
    for first, second in zip(before, after, strict=True):
        np.testing.assert_array_equal(first.token_ids, second.token_ids)
        np.testing.assert_allclose(first.log_probs, second.log_probs, atol=1e-5)
    assert place.reports == []


def test_sampling_parameters_reach_the_sampler(places: dict[str, Place]) -> None:
    place = places["qwen2"]
    prompt = np.array([4, 8, 15], np.int32)

    def ask(index: int, **sampling: object) -> GenerationRequest:
        params = SamplingParams(max_new_tokens=30, **sampling)  # type: ignore[arg-type]
        return GenerationRequest(request_id=f"s{index}", group_id="s", prompt_ids=prompt, sampling=params, seed=0)

    async def work() -> None:
        forced = await place.fleet.generate(ask(0, logit_bias={77: 100.0}))
        assert set(forced.token_ids) == {77}
        stopped = await place.fleet.generate(ask(1, logit_bias={77: 100.0}, stop_token_ids=(77,)))
        assert (stopped.token_ids.tolist(), stopped.finish_reason) == ([77], FinishReason.STOP)
        narrow = await place.fleet.generate(ask(2, top_p=1e-6))
        greedy = await place.fleet.generate(ask(3, temperature=0.0))
        np.testing.assert_array_equal(narrow.token_ids, greedy.token_ids)
        with pytest.raises(ServerRefused, match="context length"):
            await place.fleet.generate(
                GenerationRequest(
                    request_id="long",
                    group_id="l",
                    prompt_ids=prompt,
                    sampling=SamplingParams(max_new_tokens=CONTEXT),
                    seed=0,
                )
            )

    place.run(work())


@pytest.mark.parametrize("kind", ["qwen3", "qwen2"])
def test_score_is_the_models_opinion_of_a_given_response(places: dict[str, Place], kind: str) -> None:
    place, draw = places[kind], np.random.default_rng(5)

    async def work() -> None:
        client = place.fleet.members[0].client
        for prompt_size, size in ((1, 1), (7, 30), (200, 100)):
            prompt, response = (draw.integers(0, VOCABULARY, n).astype(np.int32) for n in (prompt_size, size))
            for _ in range(2):  # the second time from the prefix cache
                scores = await score(client, uuid.uuid4().hex, np.concatenate([prompt, response]), prompt_size)
                np.testing.assert_allclose(scores, reference(place.model, prompt, response), atol=1e-4, rtol=0)

    place.run(work())


def test_a_seed_decides_the_response_whatever_shares_the_batch(places: dict[str, Place]) -> None:
    place = places["qwen3"]
    asked, single = requests_of(16, seed=6, tokens=60), 6

    async def work() -> None:
        alone = [await place.fleet.generate(one) for one in asked[:single]]
        together = await all_of(place.fleet, asked)
        backwards = (await all_of(place.fleet, asked[::-1]))[::-1]
        for first, second in [*zip(alone, together, strict=False), *zip(together, backwards, strict=True)]:
            np.testing.assert_array_equal(first.token_ids, second.token_ids)
            np.testing.assert_array_equal(first.log_probs.view(np.int32), second.log_probs.view(np.int32))
        others = [await place.fleet.generate(replace(one, seed=one.seed + 1)) for one in asked[:single]]
        longer = [index for index in range(single) if alone[index].token_ids.size > 4]
        assert longer
        assert all(alone[index].token_ids.tolist() != others[index].token_ids.tolist() for index in longer)

    place.run(work())


def test_an_interrupted_response_is_the_same_to_the_bit_on_a_server_that_never_saw_its_beginning(
    places: dict[str, Place],
) -> None:
    """On a CPU a token's numbers do not depend on whether it was decoded, cached, or read as a prompt."""
    place = places["qwen3"]
    limit = ThinkingLimit(budget=20, end_ids=(3, 4), ended=lambda drawn: False)
    asked = [
        replace(one, sampling=SamplingParams(max_new_tokens=48, thinking=limit))
        for one in requests_of(16, seed=11, tokens=48)
    ]

    def beginning(one: Generation) -> Generation:
        return replace(
            one,
            token_ids=one.token_ids[:20],
            log_probs=one.log_probs[:20],
            weight_versions=one.weight_versions[:20],
            finish_reason=FinishReason.ABORT,
            given=(),
        )

    async def work() -> None:
        whole = [one for one in await all_of(place.fleet, asked) if one.given]
        assert len(whole) > 4
        by_id = {one.request_id: one for one in asked}
        rest = [replace(by_id[one.request_id], begun=beginning(one)) for one in whole]
        await place.fleet.members[0].client.flush_cache()
        for first, second in zip(whole, await all_of(place.fleet, rest), strict=True):
            np.testing.assert_array_equal(first.token_ids, second.token_ids)
            np.testing.assert_array_equal(first.log_probs.view(np.int32), second.log_probs.view(np.int32))

    place.run(work())


@pytest.mark.parametrize("streamed", [True, False])
def test_frames_are_what_json_says(places: dict[str, Place], streamed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole responses and segments; and a request that is wrong is refused in the same words."""
    place = places["qwen2" if streamed else "qwen3"]
    (one,) = requests_of(1, seed=16)
    sampling = SamplingParams(max_new_tokens=70, temperature=0.0)
    key = read_key(place.folder.with_suffix(".key"))

    async def ask(rid: str, ids: np.ndarray) -> tuple[Reply, int]:
        async with closing_client(SglangClient(place.server.url, request_deadline_s=60.0, api_key=key)) as client:
            segments: list[Reply] | None = [] if streamed else None
            reply = await client.generate(rid, ids, sampling, seed=1, segments=segments)
            return reply, len(segments or [])

    async def work() -> None:
        replies = [await ask("frames", one.prompt_ids)]
        with pytest.raises(ServerRefused, match="longer than") as refusal:
            await ask("too long", np.zeros(CONTEXT + 1, np.int32))
        with monkeypatch.context() as patch:
            read = Mock(side_effect=AssertionError("not asked for"))
            patch.setattr("rollout.wire.client._FRAMES", {"Content-Type": "application/json"})
            patch.setattr("rollout.wire.reply.read_frame", read)
            replies.append(await ask("json", one.prompt_ids))
            with pytest.raises(ServerRefused, match="longer than") as other:
                await ask("too long", np.zeros(CONTEXT + 1, np.int32))
        assert str(refusal.value).rpartition(": ")[2] in str(other.value)
        (ours, parts), (theirs, json_parts) = replies
        # The first token, then 16 at a time, or several times 16 where the server's processes wait for each other.
        assert all(2 <= number <= 6 if streamed else number == 0 for number in (parts, json_parts))
        np.testing.assert_array_equal(ours.token_ids, theirs.token_ids)
        np.testing.assert_allclose(ours.log_probs, theirs.log_probs, rtol=0, atol=1e-5 if streamed else 0)
        assert (ours.finish_reason, ours.weight_label) == (theirs.finish_reason, theirs.weight_label)

    place.run(work())


@pytest.mark.parametrize("headers", [{"Accept": MEDIA_TYPE}, {}])
def test_frames_are_for_who_has_the_key_too(places: dict[str, Place], headers: dict[str, str]) -> None:
    place = places["qwen2"]

    async def work() -> None:
        body = {"rid": "x", "input_ids": [1], "sampling_params": {"max_new_tokens": 1}, "return_logprob": True}
        async with aiohttp.ClientSession(headers=headers) as session:
            async with session.post(f"{place.server.url}/generate", json=body) as answer:
                assert answer.status == 401
            key = {"Authorization": f"Bearer {read_key(place.folder.with_suffix('.key'))}"}
            async with session.post(f"{place.server.url}/generate", json=body, headers=key) as answer:
                assert answer.status == 200
                assert answer.content_type == headers.get("Accept", "application/json")
            async with session.post(f"{place.server.url}/generate", data=b"{not json", headers=key) as answer:
                assert 400 <= answer.status < 500

    place.run(work())


@pytest.mark.parametrize("kind", [pytest.param("qwen3", marks=pytest.mark.slow), "qwen2"])
def test_published_weights_serve_and_their_checksums_agree(places: dict[str, Place], kind: str, tmp_path: Path) -> None:
    place = places[kind]
    changed = save_model(tmp_path / "new", kind, seed=9, **SHAPES[kind])
    asked = requests_of(16, seed=7)

    async def work() -> None:
        before = await all_of(place.fleet, asked)
        report = await place.fleet.publish(tmp_path / "new", 5)
        assert list(report.servers.values()) == [{"qwen3": 35, "qwen2": 30}[kind]]
        after = await all_of(place.fleet, asked)
        assert {version for answer in after for version in answer.weight_versions} == {5}
        assert_log_probs(changed, asked, after)
        # The same prompts were in the cache: keys and values of the old weights would show here.
        assert any(not np.array_equal(old.log_probs, new.log_probs) for old, new in zip(before, after, strict=True))
        await place.fleet.publish(place.folder, 6)
        assert_log_probs(place.model, asked, await all_of(place.fleet, asked))

    place.run(work())


def test_publish_in_the_middle_of_responses(places: dict[str, Place], tmp_path: Path) -> None:
    place = places["qwen2"]
    changed = save_model(tmp_path / "new", "qwen2", seed=10, **SHAPES["qwen2"])
    asked = [
        GenerationRequest(
            request_id=f"m{index}",
            group_id=f"m{index}",
            prompt_ids=np.array([index, 3], np.int32),
            sampling=SamplingParams(max_new_tokens=300),
            seed=index,
        )
        for index in range(8)
    ]

    async def work() -> None:
        await place.fleet.publish(place.folder, 20)
        tasks = [asyncio.ensure_future(place.fleet.generate(one)) for one in asked]
        await begun(place, len(asked))
        await place.fleet.publish(tmp_path / "new", 21)
        answers = await asyncio.gather(*tasks)
        for one, answer in zip(asked, answers, strict=True):
            assert answer.token_ids.size == 300
            assert set(answer.weight_versions) <= {20, 21}
            old = answer.weight_versions == 20
            assert (np.diff(answer.weight_versions) >= 0).all()
            for mask, model in ((old, place.model), (~old, changed)):
                expected = reference(model, one.prompt_ids, answer.token_ids)
                np.testing.assert_allclose(answer.log_probs[mask], expected[mask], atol=1e-4, rtol=0)
        assert all(answer.weight_versions[-1] == 21 for answer in answers)
        assert any(len(set(answer.weight_versions)) == 2 for answer in answers)
        await place.fleet.publish(place.folder, 22)

    place.run(work())


def test_what_is_held_goes_on_with_the_next_weights_after_the_memory_was_left(
    places: dict[str, Place], tmp_path: Path
) -> None:
    """A step of `colocated`: interrupted, memory left and taken back, new weights, an evaluation, the rest."""
    place = places["qwen2"]
    changed = save_model(tmp_path / "new", "qwen2", seed=10, **SHAPES["qwen2"])
    asked = [
        GenerationRequest(
            request_id=f"h{index}",
            group_id=f"h{index}",
            prompt_ids=np.array([index, 5], np.int32),
            sampling=SamplingParams(max_new_tokens=300),
            seed=index,
            holdable=True,
        )
        for index in range(8)
    ]

    async def work() -> None:
        fleet = place.fleet
        await fleet.publish(place.folder, 30)
        tasks = [asyncio.ensure_future(fleet.generate(one)) for one in asked]
        await begun(place, len(asked))
        await fleet.hold()
        await fleet.release_memory()
        await fleet.resume_memory()
        await fleet.publish(tmp_path / "new", 31)
        evaluated = await fleet.generate(replace(asked[0], request_id="e", holdable=False))
        assert set(evaluated.weight_versions) == {31}
        assert not any(task.done() for task in tasks)
        fleet.let_go()
        answers = await asyncio.gather(*tasks)
        for one, answer in zip(asked, answers, strict=True):
            old = answer.weight_versions == 30
            assert answer.token_ids.size == 300
            assert 0 < old.sum() < 300
            for mask, model in ((old, place.model), (~old, changed)):
                expected = reference(model, one.prompt_ids, answer.token_ids)
                np.testing.assert_allclose(answer.log_probs[mask], expected[mask], atol=1e-4, rtol=0)
        await fleet.publish(place.folder, 32)

    place.run(work())


def test_one_wrong_number_in_one_tensor_is_found(places: dict[str, Place], tmp_path: Path) -> None:
    place = places["qwen2"]
    tensors = load_file(place.folder / "model.safetensors")
    tensors["model.layers.2.self_attn.k_proj.bias"][5] += 1e-6
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text((place.folder / "config.json").read_text())
    member = place.fleet.members[0]

    async def work() -> None:
        await member.client.update_weights("disk", {"model_path": str(tmp_path)}, "wrong", 60)
        assert member.info is not None
        expected = expected_checksums(place.folder, member.info)
        with pytest.raises(WeightMismatch) as caught:
            verify(expected, await member.client.checksums(60), place.server.url)
        assert len(caught.value.problems) == 1
        assert "model.layers.2.self_attn.qkv_proj.bias" in str(caught.value)
        await place.fleet.publish(place.folder, 30)

    place.run(work())


@pytest.mark.slow
def test_after_a_kill_deterministic_responses_are_those_of_an_undisturbed_server(places: dict[str, Place]) -> None:
    place, asked = places["qwen3"], requests_of(16, seed=8, tokens=200)

    async def work() -> None:
        await place.fleet.publish(place.folder, 40)
        undisturbed = await all_of(place.fleet, asked)
        tasks = [asyncio.ensure_future(place.fleet.generate(one)) for one in asked]
        await asyncio.sleep(0.2)
        kill(place)
        for first, second in zip(undisturbed, await asyncio.gather(*tasks), strict=True):
            np.testing.assert_array_equal(first.token_ids, second.token_ids)
            np.testing.assert_array_equal(first.log_probs, second.log_probs)
            assert set(second.weight_versions) == {40}

    place.run(work())
    assert place.fleet.members[0].restarts == 1


@pytest.mark.slow
def test_a_killed_server_is_replaced_and_its_responses_go_on(places: dict[str, Place]) -> None:
    """What it had streamed is kept: no token is drawn twice."""
    place, asked = places["qwen2"], requests_of(8, seed=9, tokens=200)
    asked = [replace(one, sampling=replace(one.sampling, max_new_tokens=200)) for one in asked]
    parts: list[ServedPart] = []

    async def work() -> list[Generation]:
        await place.fleet.publish(place.folder, 50)
        place.fleet._requests.observe = parts.append
        tasks = [asyncio.ensure_future(place.fleet.generate(one)) for one in asked]
        await begun(place, 1)
        kill(place)
        return await asyncio.gather(*tasks)

    answers = place.run(work())
    assert place.fleet.members[0].restarts == 1
    assert any("its process ended" in line for line in place.reports)
    assert_log_probs(place.model, asked, answers)
    assert {answer.token_ids.size for answer in answers} == {200}
    assert sum(part.tokens for part in parts) == 8 * 200, "a token was drawn twice"
    lost = [part for part in parts if part.finish_reason is FinishReason.ABORT]
    assert lost
    # The first token comes by itself, the others in sixteens.
    assert all(part.tokens % 16 == 1 for part in lost)
