"""Forced interruption of thinking: from the keys to rewards, columns, files and figures, which count drawn tokens."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from megatron_dapo.config import ConfigError, load_config
from megatron_dapo.coordinator.batch import step_arrays
from megatron_dapo.coordinator.step_metrics import _response_metrics, write_samples
from megatron_dapo.data.tokenizer import load_text_tools
from megatron_dapo.diagnostics.evaluation_session import EvaluationError, ResponseLog
from megatron_dapo.experience.episodes import thinking_limit
from megatron_dapo.experience.evaluation import Evaluator
from megatron_dapo.experience.generator import Responder
from megatron_dapo.storage.group_files import load_groups, save_groups
from rollout.config import RolloutConfig
from rollout.generation import FinishReason, Generation
from tests.coordinator.test_sampler import group
from tests.experience.test_evaluation import PROMPTS, Script
from tests.processes import ROOT

QUICKSTART = ROOT / "examples" / "quickstart"
GIVEN = (50, 51)


@pytest.fixture(scope="module")
def text():
    return load_text_tools(QUICKSTART / "base")


def rollout(**keys):
    return RolloutConfig(**{"max_new_tokens": 64, "thinking_budget": 9, "thinking_end": "\nAnswer: "} | keys)


def encoded(text, words):
    return np.array(text.tokenizer.encode(words, add_special_tokens=False), np.int32)


def test_the_keys_become_token_ids_and_a_look_at_the_text(text):
    limit = thinking_limit(rollout(), text)
    assert limit.budget == 9
    assert text.decoder.decode(np.array(limit.end_ids, np.int32), skip_special_tokens=False) == "\nAnswer: "
    assert limit.ended(encoded(text, "3 + 4 = 7\nAnswer: 7"))
    assert not limit.ended(encoded(text, "3 + 4 = 7\n"))
    other = thinking_limit(rollout(thinking_mark=" = "), text)
    assert other.ended(encoded(text, "3 + 4 = 7\n"))
    assert thinking_limit(RolloutConfig(), text) is None


def test_a_phrase_that_cannot_be_given_is_refused(text):
    empty = SimpleNamespace(encode=lambda words, add_special_tokens: [])
    with pytest.raises(ConfigError, match="makes no token of it"):
        thinking_limit(rollout(), replace(text, tokenizer=empty))
    end = text.tokenizer.decode([text.stop_token_ids[0]], skip_special_tokens=False)
    with pytest.raises(ConfigError, match=f"token {text.stop_token_ids[0]} ends a response"):
        thinking_limit(rollout(thinking_end=f"Answer:{end}"), text)


def interrupted(generation: Generation, at: int) -> Generation:
    """The same drawn tokens, with two given in between."""
    ids = np.insert(generation.token_ids, at, GIVEN)
    return replace(generation, token_ids=ids, given=((at, len(GIVEN)),))


def with_interruptions(groups):
    """Every second response of each group, behind its third token."""

    def one(number, response):
        return replace(response, generation=interrupted(response.generation, 3)) if number % 2 else response

    return [replace(each, responses=tuple(map(one, range(9), each.responses))) for each in groups]


@pytest.fixture
def groups():
    return [group(position, 1, 5 + position, shaped=-1.0) for position in range(3)]


def test_given_tokens_are_in_no_length_and_no_column(groups, tmp_path):
    config = load_config(QUICKSTART / "dapo.yaml", [f"algorithm.group_size={len(groups[0].responses)}"])
    plain, marked = step_arrays(groups, config), step_arrays(with_interruptions(groups), config)
    for name in ("rollout_log_probs", "weight_versions", "advantages", "carries_loss"):
        np.testing.assert_array_equal(getattr(plain, name), getattr(marked, name))
    np.testing.assert_array_equal(plain.responses.response_lengths, marked.responses.response_lengths)
    longer = marked.responses.sequence_lengths - plain.responses.sequence_lengths
    assert longer.tolist() == [0, 2] * (len(longer) // 2)
    of_given = [marked.responses.token_ids[at : at + 2].tolist() for at in marked.responses.given_starts]
    assert of_given == [list(GIVEN)] * int(longer.astype(bool).sum())
    assert [each.tokens for each in with_interruptions(groups)] == [each.tokens for each in groups]
    assert _response_metrics(groups) == _response_metrics(with_interruptions(groups)) | {
        "repetition": _response_metrics(groups)["repetition"]
    }


def test_samples_say_which_were_interrupted(groups, tmp_path):
    (first, *others) = with_interruptions(groups)
    first = replace(first, responses=first.responses[1:])
    prompt = SimpleNamespace(place="p", source="s", text="?", answer="1", verifier="robust", environment=None)
    lines = write_samples(1, [first, *others], [prompt] * 3, tmp_path / "samples.jsonl", 2)
    assert [line.get("interrupted", False) for line in lines[:2]] == [True, False]


def test_a_file_of_groups_keeps_what_was_given(groups, tmp_path):
    kept = with_interruptions(groups)
    save_groups(tmp_path, "new", kept, {})
    found, _ = load_groups(tmp_path, "new")
    for one, other in zip(kept, found, strict=True):
        for ours, theirs in zip(one.responses, other.responses, strict=True):
            assert ours.generation.given == theirs.generation.given
            for name in ("token_ids", "log_probs", "weight_versions"):
                np.testing.assert_array_equal(getattr(ours.generation, name), getattr(theirs.generation, name))


class Thinking(Script):
    """As the fleet where every response is interrupted behind its first token."""

    async def generate(self, request):
        generation = await super().generate(request)
        return (
            generation
            if request.sampling.thinking is None
            else interrupted(generation, request.sampling.thinking.budget)
        )


def test_evaluations_are_interrupted_too_and_count_drawn_tokens(text, tmp_path):
    keys = [
        "data.max_prompt_tokens=50",
        "rollout.thinking_budget=1",
        "rollout.thinking_end='Answer:'",
        "evaluation.greedy=false",
    ]
    config, script = load_config(QUICKSTART / "dapo.yaml", ["evaluation.samples=2", *keys]), Thinking()
    evaluator = Evaluator(
        config,
        text=text,
        heldout=SimpleNamespace(prompts=PROMPTS),
        responder=Responder(fleet=script, pool=script, decoder=script),
        folder=tmp_path,
    )
    answers = asyncio.run(evaluator.answer("e"))["sampled"]
    assert {request.sampling.thinking.budget for request in script.asked} == {1}
    assert {(answer.tokens, answer.text.split()[1:3] == ["50", "51"]) for each in answers for answer in each} == {
        (2, True)
    }
    script.asked.clear()
    asyncio.run(evaluator.answer("b", forbid=7))
    budgets = {
        (each.sampling.max_new_tokens, each.sampling.thinking and each.sampling.thinking.budget)
        for each in script.asked
    }
    assert budgets == {(1, None), (63, 0)}, "the forbidden token's place is one of the budget"


def test_answers_of_an_evaluation_without_a_budget_are_not_mixed_with_others(tmp_path):
    ResponseLog(tmp_path, {"seed": None})
    ResponseLog(tmp_path, {"seed": None, "thinking_budget": None})
    with pytest.raises(EvaluationError, match="thinking_budget = None"):
        ResponseLog(tmp_path, {"thinking_budget": 9})


def test_a_truncated_response_is_one_cut_off_at_the_end(groups):
    cut = replace(interrupted(groups[0].responses[0].generation, 3), finish_reason=FinishReason.LENGTH)
    response = replace(groups[0].responses[0], generation=cut)
    assert (response.truncated, response.interrupted, cut.drawn) == (True, True, 5)
