"""Held-out problems answered by a scripted fleet: what is asked, what is taken over, how a forbidden start is kept."""

import asyncio
import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from megatron_dapo.config import load_config
from megatron_dapo.data.prompts import Prompt
from megatron_dapo.experience.evaluation import Answer, Evaluator, problem_id
from megatron_dapo.experience.generator import EngineAborted, Responder
from megatron_dapo.monitor.console import Count
from reward.verdict import Verdict
from rollout.generation import FinishReason, Generation
from tests.processes import ROOT

PROMPTS = [
    Prompt(text=f"{at}?", answer=str(at), ids=np.full(at + 1, 9, np.int32), place="f:1", source="f", verifier="robust")
    for at in range(3)
]
END = 1


class Script:
    """Answers every request with its seed's parity and the end token, as many tokens as it may."""

    def __init__(self, reason=FinishReason.STOP):
        self.asked, self.reason, self.running, self.together = [], reason, [], set()

    async def generate(self, request):
        self.asked.append(request)
        self.running.append(request.sampling.temperature)
        self.together.add(frozenset(self.running))
        await asyncio.sleep(0)
        self.running.remove(request.sampling.temperature)
        ids = np.array([2 + request.seed % 2, END], np.int32)[: request.sampling.max_new_tokens]
        cut = request.sampling.max_new_tokens < 2
        return Generation(
            request_id=request.request_id,
            token_ids=ids,
            log_probs=np.zeros(ids.size, np.float32),
            weight_versions=np.full(ids.size, 5, np.int32),
            finish_reason=FinishReason.LENGTH if cut else self.reason,
        )

    async def verify(self, requests):
        return [
            Verdict(accuracy="2" in each.response, extracted=each.response, rule="", seconds=0) for each in requests
        ]

    def decode(self, token_ids, *, skip_special_tokens):
        return " ".join(map(str, token_ids))


def evaluator(script, folder, *overrides):
    config = load_config(ROOT / "examples" / "quickstart" / "dapo.yaml", ["evaluation.samples=4", *overrides])
    return Evaluator(
        config,
        text=SimpleNamespace(stop_token_ids=(END,)),
        heldout=SimpleNamespace(prompts=PROMPTS),
        responder=Responder(fleet=script, pool=script, decoder=script),
        folder=folder,
    )


def test_every_problem_is_answered_in_every_mode_and_the_figures_are_those_of_the_answers(tmp_path):
    script = Script()
    found = asyncio.run(evaluator(script, tmp_path).run("step3"))
    assert len({request.request_id for request in script.asked}) == len(script.asked) == 3 * (4 + 1)
    assert script.together == {frozenset([1.0]), frozenset([0.0])}, "SGLang draws otherwise where a batch mixes modes"
    greedy = [request for request in script.asked if request.sampling.temperature == 0]
    assert [request.prompt_ids.size for request in greedy] == [1, 2, 3]
    lines = [json.loads(line) for line in (tmp_path / "step3" / "problems.jsonl").read_text().splitlines()]
    assert [(line["way"], line["problem"]) for line in lines] == [
        (mode, problem_id(prompt)) for mode in ("sampled", "greedy") for prompt in PROMPTS
    ]
    for mode, answers in found.items():
        verdicts = np.array([line["correct"] for line in lines if line["way"] == mode])
        assert answers.figures.accuracy == pytest.approx(verdicts.mean())
        assert list(answers.correct) == verdicts[:, 0].tolist()
    again = asyncio.run(evaluator(Script(), tmp_path).run("step6"))
    assert again == found, "the same seeds"


def test_what_is_known_is_not_asked_for_again(tmp_path):
    whole, script = {}, Script()
    first = asyncio.run(evaluator(Script(), tmp_path).answer("eval", record=whole.__setitem__))
    some = dict(list(whole.items())[:7])
    added = {}
    asking = evaluator(script, tmp_path)
    assert asyncio.run(asking.answer("eval", known=some, record=added.__setitem__)) == first
    assert len(script.asked) == len(whole) - 7
    assert some | added == whole
    assert set(asking.keys) == set(whole)
    marked = replace(next(iter(some.values())), text="known")
    kept = asyncio.run(asking.answer("eval", known={next(iter(some)): marked}))
    assert kept["sampled"][0][0] is marked


def test_a_forbidden_token_is_kept_from_the_first_place_alone(tmp_path):
    script = Script()
    answers = asyncio.run(evaluator(script, tmp_path, "evaluation.greedy=false").answer("b", forbid=7))
    first, rest = script.asked[0], next(each for each in script.asked if each.request_id.endswith("rest."))
    assert (first.sampling.max_new_tokens, list(first.sampling.logit_bias)) == (1, [7])
    assert not rest.sampling.logit_bias
    assert rest.sampling.max_new_tokens == 64 - 1
    assert rest.prompt_ids.tolist() == [9, 2 + first.seed % 2]
    assert isinstance(answers["sampled"][0][0], Answer)
    assert answers["sampled"][0][0].tokens == 3


def test_a_response_that_no_server_finished_is_no_wrong_answer(tmp_path):
    with pytest.raises(EngineAborted, match=r"held-out f:1: a server gave up on response step1-sampled-0-0\."):
        asyncio.run(evaluator(Script(FinishReason.ABORT), tmp_path).run("step1"))
    assert not (tmp_path / "step1").exists()


def test_answers_are_counted_as_they_come(tmp_path):
    counts = []

    class Counting(Script):
        async def verify(self, requests):
            counts.append(asking.count())
            return await super().verify(requests)

    asking = evaluator(Counting(), tmp_path)
    for _ in range(2):
        asyncio.run(asking.answer("eval"))
        assert asking.count() == Count(15, 15, "answers")
    assert {count.total for count in counts} == {15}
    done = [count.done for count in counts]
    assert done[:15] == sorted(done[:15])
    assert done[0] == done[15] == 0
    assert done[12] >= 12, "greedy answers come after all sampled ones"
