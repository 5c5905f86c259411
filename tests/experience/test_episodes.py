"""Episodes from the first turn to rewards, files and figures: a fleet that talks, real tokenizers and environments."""

import asyncio
import json
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from megatron_dapo.algorithm.dynamic_sampling import PassRate
from megatron_dapo.config import load_config
from megatron_dapo.config.algorithm_config import AlgorithmConfig, OverlongConfig
from megatron_dapo.coordinator.batch import step_arrays
from megatron_dapo.coordinator.checkpoints import Progress, load_progress, save_progress
from megatron_dapo.coordinator.step_metrics import _episode_metrics, _response_metrics, histograms, write_samples
from megatron_dapo.data.order import Span
from megatron_dapo.data.prompts import PromptSet
from megatron_dapo.diagnostics.evaluation_session import ResponseLog
from megatron_dapo.experience.episodes import UNENDED, drawn_turns, turn_rules
from megatron_dapo.experience.evaluation import Evaluator
from megatron_dapo.experience.generator import GroupGenerator, Responder, Unjudged
from megatron_dapo.experience.groups import SamplerState
from reward.config import RewardConfig
from reward.pool.pool import RewardPool
from rollout.config import CONTEXT_RESERVE
from rollout.generation import SamplingParams
from tests.experience.chat_models import Talker, prompt_of
from tests.experience.test_observations import config
from tests.monitor.declared import check_declared
from tests.processes import ROOT

GUESSES = ("5", "9", "7", "3")


def speak(before, sample):
    """Bisects; the fourth sample says something that is no number first."""
    said = before.count("<|im_start|>assistant")
    if sample == 3 and said == 1:
        return "seven<|im_end|>"
    return f"{GUESSES[(sample + said - 1) % 3]}<|im_end|>"


def generator_of(text, prompts, fleet, pool, *overrides, limit=60, routing=None, **algorithm):
    prompts = prompts if isinstance(prompts, list) else [prompts]
    spans = (Span(start=0, count=len(prompts), weight=1.0),)
    rules = turn_rules(config(*overrides), text, prompts)
    return GroupGenerator(
        Responder(fleet=fleet, pool=pool, decoder=text.decoder, rules=rules),
        PromptSet(prompts=tuple(prompts), spans=spans, counts=Counter(), content_hash=""),
        lambda version: SamplingParams(max_new_tokens=limit, stop_token_ids=text.stop_token_ids),
        AlgorithmConfig(**{"group_size": 4, "overlong": OverlongConfig(shape="none")} | algorithm),
        seed=0,
        routing=routing,
    )


def pool_of(**keys):
    return RewardPool(RewardConfig(**{"workers": 1, "timeout_s": 2.0} | keys))


def group_of(text, prompt, said=speak, *overrides, fleet=None, **keys):
    fleet = fleet or Talker(text, said)

    async def generate():
        pool = pool_of()
        try:
            return await generator_of(text, prompt, fleet, pool, *overrides, **keys).group(0, 3)
        finally:
            pool.close()

    return asyncio.run(asyncio.wait_for(generate(), 60)), fleet


def check_sequence(text, prompt, response):
    """The tokens are the conversation as the chat template writes it; what was drawn says where it was drawn."""
    generation = response.generation
    messages = [{"role": "user", "content": prompt.text.split("user\n")[1].split("<|im_end|>")[0]}]
    for turn in response.earlier:
        messages.append({"role": "assistant", "content": turn.response})
        messages.append({"role": turn.role, "content": turn.observation})
    before = text.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    whole = np.concatenate([prompt.ids, generation.token_ids])
    newest = text.tokenizer.decode(drawn_turns(generation)[-1])
    assert text.tokenizer.decode(whole) == before + newest
    drawn = np.ones(whole.size, bool)
    drawn[: prompt.ids.size] = False
    for first, tokens in generation.given:
        drawn[prompt.ids.size + first :][:tokens] = False
    np.testing.assert_allclose(generation.log_probs, -np.flatnonzero(drawn) / 1000, rtol=1e-5)
    assert generation.drawn == drawn.sum() == generation.weight_versions.size == generation.drawn_ids.size
    assert len(generation.given) == len(response.earlier)


def test_an_episode_is_one_sequence_of_drawn_and_given_tokens(text, own):
    prompt = prompt_of(text, "Guess.", environment=own("guess"))
    group, fleet = group_of(text, prompt)
    said = [[turn.response for turn in each.earlier] + [each.text] for each in group.responses]
    assert said == [["5", "9", "7"], ["9", "7"], ["7"], ["seven", "9", "7"]]
    assert [[turn.observation for turn in each.earlier] for each in group.responses[:3]] == [
        ["higher", "lower"],
        ["lower"],
        [],
    ]
    error = group.responses[3].earlier[0]
    assert error.observation.startswith("error: ValueError: invalid literal")
    assert error.error.startswith("ValueError")
    for response in group.responses:
        check_sequence(text, prompt, response)
        assert (response.accuracy, response.reward_raw, response.verdict.rule) == (True, 1.0, "environment")
        assert (response.verdict.error, response.interrupted, response.other_accuracy) == (None, False, None)
    assert [request.request_id for request in fleet.asked if "-s0-" in request.request_id] == [
        f"p0-v3-s0-t{turn}." for turn in range(3)
    ]
    first, second, third = [request for request in fleet.asked if "-s0-" in request.request_id]
    assert {request.group_id for request in fleet.asked} == {"p0"}, "a turn goes where its prefix is cached"
    for one, other in pairwise((first, second, third)):
        np.testing.assert_array_equal(other.prompt_ids[: one.prompt_ids.size], one.prompt_ids)
        assert one.seed != other.seed
    assert [each.sampling.max_new_tokens for each in (first, second, third)] == [60, 58, 56]


def test_the_environment_gets_every_turn_with_its_tokens_and_its_state(text, own):
    group, _ = group_of(text, prompt_of(text, "?", environment=own("counts")))
    for response in group.responses:
        turns = json.loads(response.verdict.extracted)
        assert [turn[1:3] for turn in turns] == [["turn 1", "tool"], ["turn 2", "tool"], ["", "user"]]
        assert [turn[3] for turn in turns] == [ids.tolist() for ids in drawn_turns(response.generation)]
        assert [text.tokenizer.decode(turn[3], skip_special_tokens=True) for turn in turns] == [
            turn[0] for turn in turns
        ]
        assert (response.reward_raw, response.accuracy, response.verdict.rule) == (0.5, False, "counted")
        assert response.state is None


def test_the_environment_knows_the_turns_that_it_failed_on_and_so_does_who_waits(text, own):
    seen = []

    def says(before, sample):
        said = before.count("<|im_start|>assistant")
        if sample == 3:
            seen.append(generator.failing)
        return f"{'seven' if sample == 3 and said == 2 else said}<|im_end|>"

    async def generate():
        nonlocal generator
        pool = pool_of()
        try:
            generator = generator_of(text, prompt_of(text, "?", environment=own("falters")), Talker(text, says), pool)
            return await generator.group(0, 3)
        finally:
            pool.close()

    generator = None
    group = asyncio.run(asyncio.wait_for(generate(), 60))
    found = [json.loads(response.verdict.extracted) for response in group.responses]
    assert found == [[2, False, False, False]] * 3 + [[1, False, True, False]]
    assert seen == [0, 0, 1]
    assert generator.failing == 0, "nothing is under way"


def test_a_tool_is_called_at_its_mark_and_the_verifier_judges_the_last_turn(text, own):

    def calls(before, sample):
        if sample % 2 == 0 and "<tool_response>" not in before:
            return "<tool_call>3+4</tool_call><|im_end|>"
        return f"Answer: {7 + (sample == 3)}<|im_end|>"

    prompt = prompt_of(text, "3 + 4?", environment=own("calculator"))
    mark = text.tokenizer.encode("</tool_call>", add_special_tokens=False)[0]
    group, fleet = group_of(text, prompt, calls, "rollout.turn_end=[</tool_call>]")
    assert [each.accuracy for each in group.responses] == [True, True, True, False]
    assert [each.verdict.rule for each in group.responses] == ["integer"] * 4
    assert group.responses[0].other_accuracy is True
    called = group.responses[0]
    assert [(turn.response, turn.observation, turn.role) for turn in called.earlier] == [
        ("<tool_call>3+4</tool_call>", "7", "tool")
    ]
    assert drawn_turns(called.generation)[0][-1] == mark, "the server stops at the mark"
    check_sequence(text, prompt, called)
    assert all(request.sampling.stop_token_ids == (*text.stop_token_ids, mark) for request in fleet.asked)


def test_turns_and_tokens_that_are_used_up_end_an_episode_as_wrong(text, own):
    never = prompt_of(text, "?", environment=own("never"))
    group, fleet = group_of(text, never, speak, "rollout.max_turns=3")
    assert {len(each.earlier) for each in group.responses} == {2}
    assert {(each.accuracy, each.reward_raw, each.verdict.rule) for each in group.responses} == {(False, -1.0, UNENDED)}
    assert len(fleet.asked) == 3 * 4
    group, fleet = group_of(text, never, speak, limit=5)
    for response in group.responses[:3]:
        assert [ids.size for ids in drawn_turns(response.generation)] == [2, 2, 1]
        assert (response.truncated, response.generation.drawn) == (True, 5)
        assert response.verdict.rule == UNENDED
    exact, _ = group_of(text, never, speak, limit=4)
    assert [ids.size for ids in drawn_turns(exact.responses[0].generation)] == [2, 2], "no token is left for a third"
    failing, _ = group_of(text, prompt_of(text, "?", environment=own("guess")), lambda *_: "x<|im_end|>", limit=4)
    for response in failing.responses:
        assert response.verdict.error.startswith("ValueError")
        assert (response.accuracy, response.reward_raw) == (False, -1.0)


def test_turn_rewards_are_added_where_the_key_says_so(text, own):
    prompt = prompt_of(text, "Guess.", environment=own("guess"))
    group, _ = group_of(text, prompt, speak, turn_rewards=True)
    assert [each.reward_raw for each in group.responses] == [0.5, 0.75, 1.0, 0.75]
    assert [turn.reward for turn in group.responses[0].earlier] == [-0.25, -0.25]
    never, _ = group_of(
        text, prompt_of(text, "?", environment=own("never")), speak, "rollout.max_turns=3", turn_rewards=True
    )
    assert {each.reward_raw for each in never.responses} == {2.0}, "all three turns, and -1"


def test_a_turn_for_which_a_server_has_no_room_is_not_asked_for(text, own):
    never = prompt_of(text, "?" * 200, environment=own("never"))
    keys = ("rollout.max_turns=3", "rollout.max_observation_tokens=80", "data.max_prompt_tokens=1")
    keys += ("rollout.max_new_tokens=16", "algorithm.overlong.buffer=8")
    whole, fleet = group_of(text, never, speak, *keys)
    second = next(request for request in fleet.asked if "-s0-t1" in request.request_id)
    there = second.prompt_ids.size + drawn_turns(whole.responses[0].generation)[1].size
    for context, turns in ((there + 80 + CONTEXT_RESERVE, 3), (there + 80 + CONTEXT_RESERVE - 1, 2)):
        group, _ = group_of(text, never, speak, *keys, f"model.context_length={context}")
        assert {1 + len(each.earlier) for each in group.responses[:3]} == {turns}
        assert {each.verdict.rule for each in group.responses} == {UNENDED}


def test_seconds_in_which_only_environments_are_awaited_have_a_place_of_their_own(text, own, tmp_path):
    gate = tmp_path / "gate"
    waiting = prompt_of(text, "?", environment=own("waits"), answer=str(gate))
    single = prompt_of(text, "3 + 4?")

    async def seconds(prompt):
        pool, found = pool_of(timeout_s=60.0), []
        generator = generator_of(text, prompt, Talker(text, lambda *_: "Answer: 7<|im_end|>"), pool)
        try:
            task = asyncio.ensure_future(generator.group(0, 3))
            await asyncio.sleep(1.0)
            found.append(generator.take_seconds())
            gate.write_text("")
            await task
            return [*found, generator.take_seconds()]
        finally:
            pool.close()

    first, _ = asyncio.run(asyncio.wait_for(seconds(waiting), 60))
    assert first == {"environment": pytest.approx(1.0, abs=0.3), "reward": 0.0}
    both = asyncio.run(asyncio.wait_for(seconds(single), 60))
    assert sum(each["environment"] for each in both) == 0.0
    assert sum(each["reward"] for each in both) > 0.0


def test_what_an_environment_returns_by_mistake_stops_the_run_in_words(text, own, tmp_path):
    (tmp_path / "own_episodes.py").write_text("def wrong(episode): return 7")
    with pytest.raises(Unjudged, match=r"environment 'own_episodes:wrong': it returned '7', which is no Observation"):
        group_of(text, prompt_of(text, "?", environment=own("wrong")))


def test_verifier_none_is_never_asked_where_the_environment_ends_each_episode(text, own):
    game = prompt_of(text, "Guess.", environment=own("guess"), verifier="none")
    group, _ = group_of(text, game)
    assert all(each.by_environment and each.accuracy for each in group.responses)
    with pytest.raises(Unjudged, match=r"no verdict by 'none': an environment left the verdict"):
        group_of(text, prompt_of(text, "?", environment=own("calculator"), verifier="none"))


def test_an_environment_that_nobody_can_ask_stops_the_run(text, own):
    with pytest.raises(Unjudged, match=r"prompt 0 \(f:1\): environment 'own_episodes:away': no such table"):
        group_of(text, prompt_of(text, "?", environment=own("away")))


def test_a_single_answer_beside_episodes_is_asked_and_judged_as_without_them(text, own):

    def answers(before, sample):
        return f"Answer: {7 + sample % 2}<|im_end|>"

    alone, plain = group_of(text, prompt_of(text, "3 + 4?"), answers)
    prompts = [prompt_of(text, "3 + 4?"), prompt_of(text, "?", environment=own("calculator"))]

    async def both():
        pool, fleet = pool_of(), Talker(text, answers)
        generator = generator_of(text, prompts, fleet, pool)
        at = next(position for position in range(9) if generator.prompt_at(position) == 0)
        try:
            return await generator.group(at, 3), fleet, at
        finally:
            pool.close()

    beside, fleet, at = asyncio.run(asyncio.wait_for(both(), 60))
    assert [request.request_id for request in fleet.asked] == [f"p{at}-v3-s{sample}." for sample in range(4)]
    for one, other in zip(plain.asked, fleet.asked, strict=True):
        assert one.sampling == other.sampling
    assert (
        [each.accuracy for each in alone.responses] == [each.accuracy for each in beside.responses] == [True, False] * 2
    )
    assert {each.earlier for each in beside.responses} == {()}


def test_files_columns_figures_and_samples_know_turns(text, own, tmp_path):
    prompt = prompt_of(text, "Guess.", environment=own("guess"))
    group, _ = group_of(text, prompt)
    carried = SamplerState(cursor=0, pass_rate=PassRate.start(0.5), carried=(group,))
    save_progress(Progress(rollout_step=1, optimizer_step=1, weight_version=3, sampler=carried), tmp_path)
    (loaded,) = load_progress(tmp_path).sampler.carried
    for one, other in zip(group.responses, loaded.responses, strict=True):
        assert one.by_environment is other.by_environment is True
        assert (one.earlier, one.verdict, one.generation.given) == (
            other.earlier,
            other.verdict,
            other.generation.given,
        )
    arrays = step_arrays(
        [loaded], load_config(ROOT / "examples" / "quickstart" / "dapo.yaml", ["algorithm.group_size=4"])
    )
    assert arrays.responses.response_lengths.tolist() == [each.generation.drawn for each in group.responses]
    assert len(arrays.rollout_log_probs) == sum(each.generation.drawn for each in group.responses)
    metrics = _response_metrics([loaded]) | _episode_metrics([loaded])
    check_declared(metrics)
    assert metrics["response_length/mean"] == np.mean([each.generation.drawn for each in group.responses])
    assert metrics["episode/turns"] == np.mean([3, 2, 1, 3])
    assert metrics["episode/errors"] == 1 / 4
    assert metrics["episode/turn_reward"] == np.mean([-0.5, -0.25, 0, -0.25])
    given = [sum(tokens for _, tokens in each.generation.given) for each in group.responses]
    assert metrics["episode/observation_tokens"] == np.mean(given)
    assert histograms([loaded])["histograms/response_length"] == arrays.responses.response_lengths.tolist()
    (line,) = write_samples(1, [loaded], [prompt], tmp_path / "samples.jsonl", 1)
    assert [(turn["response"], turn["observation"]) for turn in line["earlier"]] == [("5", "higher"), ("9", "lower")]
    assert line["response"] == "7"
    assert (line["environment"], line["judged_by"]) == (own("guess"), "environment")


def evaluated(text, prompt, fleet, folder, *overrides):
    settings = config("evaluation.samples=2", "evaluation.greedy=false", *overrides)
    pool = pool_of()
    rules = turn_rules(settings, text, [prompt])
    responder = Responder(fleet=fleet, pool=pool, decoder=text.decoder, rules=rules)
    heldout = PromptSet(prompts=(prompt,), spans=(), counts=Counter(), content_hash="")
    return Evaluator(settings, text=text, heldout=heldout, responder=responder, folder=folder), pool


def test_held_out_problems_are_episodes_too_and_their_log_knows_turns(text, own, tmp_path):
    prompt = prompt_of(text, "Guess.", environment=own("guess"))

    def said(before, sample):
        return speak(before, 1)

    async def answer(forbid=None):
        fleet = Talker(text, said)
        evaluator, pool = evaluated(text, prompt, fleet, tmp_path)
        (tmp_path / "log").mkdir(exist_ok=True)
        try:
            log = ResponseLog(tmp_path / "log", {})
            found = await evaluator.answer("e", known=log.known, record=log.add, forbid=forbid)
            return found["sampled"][0], fleet
        finally:
            pool.close()

    (first, _), fleet = asyncio.run(asyncio.wait_for(answer(), 60))
    assert (first.text, first.correct, first.tokens) == ("7", True, 4)
    assert [(turn.response, turn.observation) for turn in first.earlier] == [("9", "lower")]
    assert [request.request_id for request in fleet.asked[:1]] == ["e-sampled-0-0-t0."]
    (known, _), again = asyncio.run(asyncio.wait_for(answer(), 60))
    assert known == first
    assert again.asked == []
