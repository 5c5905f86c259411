"""Groups written by a scripted fleet and judged by the real pool: each by the verifier of its prompt."""

import asyncio
import json
import time
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from megatron_dapo.algorithm.dynamic_sampling import PassRate
from megatron_dapo.config.algorithm_config import AlgorithmConfig, OverlongConfig
from megatron_dapo.config.base import ConfigError
from megatron_dapo.coordinator.checkpoints import Progress, load_progress, save_progress
from megatron_dapo.coordinator.step_metrics import _response_metrics, write_samples
from megatron_dapo.data.order import PromptOrder, Span
from megatron_dapo.data.prompts import Prompt, PromptSet
from megatron_dapo.experience.generator import BatchCounter, GroupGenerator, Responder, Unjudged
from megatron_dapo.experience.groups import SamplerState, ScoredResponse
from reward.config import RewardConfig
from reward.pool.pool import RewardPool
from rollout.generation import FinishReason, Generation, SamplingParams
from tests.monitor.declared import check_declared

TEXTS = ("Answer: B", "Answer: 7", "Answer: 7.", '{"n": 7}')
"""What the scripted model says, one a response: token i is text i."""


class Script:
    def __init__(self):
        self.asked = []

    async def generate(self, request):
        self.asked.append(request)
        at = int(request.request_id.split("-s")[1].rstrip("."))
        return Generation(
            request_id=request.request_id,
            token_ids=np.array([at], np.int32),
            log_probs=np.zeros(1, np.float32),
            weight_versions=np.zeros(1, np.int32),
            finish_reason=FinishReason.STOP,
        )

    def decode(self, token_ids, *, skip_special_tokens):
        return TEXTS[token_ids[0]]


def prompt(verifier, answer, source):
    ids = np.ones(1, np.int32)
    return Prompt(text="?", answer=answer, ids=ids, place=f"{source}.jsonl:1", source=source, verifier=verifier)


PROMPTS = (
    prompt("robust", "7", "exam"),
    prompt("exact", "7", "old"),
    prompt("choice", "B", "quiz"),
    prompt("json", '{"equals": {"n": 7}}', "api"),
)


def groups(*prompts, config=None, overlong=None, version=0):
    spans = tuple(Span(start=at, count=1, weight=1.0) for at, p in enumerate(prompts))
    order = PromptOrder(spans, 0)
    at = {order.index_at(position): position for position in range(100)}

    async def generate():
        pool, script = RewardPool(config or RewardConfig(workers=1)), Script()
        generator = GroupGenerator(
            Responder(fleet=script, pool=pool, decoder=script),
            PromptSet(prompts=prompts, spans=spans, counts=Counter(), content_hash=""),
            lambda version: SamplingParams(max_new_tokens=4 + version, temperature=1.0 + version, stop_token_ids=(0,)),
            AlgorithmConfig(group_size=len(TEXTS), overlong=overlong or OverlongConfig(shape="none")),
            seed=0,
        )
        try:
            found = [await generator.group(at[index], version) for index in range(len(prompts))]
            assert {request.sampling.temperature for request in script.asked} == {1.0 + version}
            return found
        finally:
            pool.close()

    return asyncio.run(asyncio.wait_for(generate(), 60))


def test_a_run_mixes_sources_each_with_its_verifier(tmp_path):
    exam, old, quiz, api = found = groups(*PROMPTS)
    assert [[response.accuracy for response in group.responses] for group in found] == [
        [False, True, True, False],
        [False, True, False, False],
        [True, False, False, False],
        [False, False, False, True],
    ]
    assert [response.other_accuracy for response in exam.responses] == [False, True, False, False]
    assert [response.other_accuracy for response in old.responses] == [False, True, True, False]
    assert [response.other_accuracy for response in (*quiz.responses, *api.responses)] == [None] * 8
    assert _response_metrics(found)["verdict_disagreement"] == 2 / 8
    assert "verdict_disagreement" not in _response_metrics([quiz, api])
    state = SamplerState(cursor=0, pass_rate=PassRate.start(0.5, memory=4.0), carried=tuple(found))
    progress = Progress(rollout_step=1, optimizer_step=1, weight_version=1, sampler=state)
    save_progress(progress, tmp_path)
    assert _response_metrics(load_progress(tmp_path).sampler.carried)["verdict_disagreement"] == 2 / 8


def test_several_rewards_are_added_and_the_first_one_is_the_accuracy(tmp_path):
    """Right but not tidy: the filter and the accuracy read `robust` alone, eq. 9 the sum."""
    summed, alone = groups(replace(PROMPTS[0], verifier="robust + 0.25 * exact"), PROMPTS[2])
    assert [response.accuracy for response in summed.responses] == [False, True, True, False]
    assert [response.reward_raw for response in summed.responses] == [-1.25, 1.25, 0.75, -1.25]
    assert [response.reward_shaped for response in summed.responses] == [-1.25, 1.25, 0.75, -1.25]
    assert summed.responses[2].verdict.rewards == {"robust": 1.0, "exact": -1.0}
    assert [response.other_accuracy for response in summed.responses] == [False, True, False, False]
    assert (alone.responses[0].reward_raw, alone.responses[0].verdict.rewards) == (1.0, None)
    metrics = _response_metrics([summed, alone])
    assert (metrics["reward/robust"], metrics["reward/exact"]) == (0.0, -0.5)
    assert metrics["accuracy/mean"] == 3 / 8
    assert not {"reward/robust", "reward/choice"} & _response_metrics([alone]).keys()
    check_declared(metrics)
    state = SamplerState(cursor=0, pass_rate=PassRate.start(0.5, memory=4.0), carried=(summed,))
    save_progress(Progress(rollout_step=1, optimizer_step=1, weight_version=1, sampler=state), tmp_path)
    assert load_progress(tmp_path).sampler.carried[0].responses[2].verdict == summed.responses[2].verdict
    write_samples(3, [summed], [replace(PROMPTS[0], verifier="robust + 0.25 * exact")], tmp_path / "samples.jsonl", 1)
    first = json.loads((tmp_path / "samples.jsonl").read_text().splitlines()[0])
    assert first["rewards"] == {"robust": -1.0, "exact": -1.0}


def test_a_group_is_drawn_and_its_length_judged_as_the_weights_version_says():
    """One token of at most 4 + version, of which the last 3 are punished: eq. 13 at two limits."""
    buffer = OverlongConfig(shape="soft", buffer=4)
    assert [groups(PROMPTS[0], overlong=buffer, version=at)[0].responses[0].reward_shaped for at in (0, 1)] == [
        -1.25,
        -1.0,
    ]


def test_samples_hold_the_first_responses_and_those_on_which_the_rules_disagree(tmp_path):
    write_samples(3, groups(*PROMPTS), PROMPTS, tmp_path / "samples.jsonl", 2)
    lines = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert [(line["source"], line["response"], line["other_accuracy"]) for line in lines] == [
        ("exam", "Answer: B", False),
        ("old", "Answer: B", False),
        ("exam", "Answer: 7.", False),
        ("old", "Answer: 7.", True),
    ]
    assert (lines[0]["answer"], lines[0]["verifier"], lines[0]["place"]) == ("7", "robust", "exam.jsonl:1")


def test_samples_hold_responses_without_a_verdict(tmp_path):
    (group,) = groups(PROMPTS[2])
    *judged, last = group.responses
    failed = replace(last, verdict=replace(last.verdict, accuracy=False, error="timeout"))
    write_samples(3, [replace(group, responses=(*judged, failed))], PROMPTS[2:], tmp_path / "samples.jsonl", 1)
    lines = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert [(line["response"], line["error"]) for line in lines] == [(judged[0].text, None), (last.text, "timeout")]


def test_what_nobody_could_judge_stops_the_run():
    with pytest.raises(
        Unjudged, match=r"no verdict by 'robust \+ 0.1 \* remote': remote: reward\.remote\.url is not set"
    ):
        groups(replace(PROMPTS[0], verifier="robust + 0.1 * remote"))
    with pytest.raises(
        Unjudged, match=r"prompt \d+ \(exam\.jsonl:1\): no verdict by 'remote': reward\.remote\.url is not set"
    ):
        groups(replace(PROMPTS[0], verifier="remote"))
    with pytest.raises(Unjudged, match="ground truth"):
        groups(replace(PROMPTS[0], answer=""))


def test_truncation_is_what_the_server_says_whatever_the_last_token_is():
    """A response of full length whose last token ends it, and one that the server cut off at a stop token's id."""
    stop = SamplingParams(max_new_tokens=2, stop_token_ids=(0,))

    def scored(tokens, reason):
        generation = Generation(
            request_id="r",
            token_ids=np.array(tokens, np.int32),
            log_probs=np.zeros(len(tokens), np.float32),
            weight_versions=np.zeros(len(tokens), np.int32),
            finish_reason=reason,
        )
        verdict = SimpleNamespace()
        return ScoredResponse(
            generation=generation, text="", verdict=verdict, accuracy=0.0, reward_raw=-1.0, reward_shaped=-1.0
        )

    assert not scored([5, stop.stop_token_ids[0]], FinishReason.STOP).truncated
    assert scored([5, stop.stop_token_ids[0]], FinishReason.LENGTH).truncated
    assert scored([5], FinishReason.LENGTH).truncated


def test_a_batch_is_counted_from_its_own_beginning():
    load, kept = (5000, 0, 0.0), []
    generator = SimpleNamespace(finished=7, failing=0)
    counter = BatchCounter(generator, SimpleNamespace(load=lambda: load), 32, kept.append)
    assert (
        counter.count().text()
        == "0 of 32 groups kept, 0 tokens/s, longest running 0.0 s, 0 responses running, 0 groups finished"
    )
    time.sleep(0.1)
    load, generator.finished, generator.failing = (6000, 96, 38.2), 27, 3
    for group in ("first", "second"):
        counter.keep(group)
    count = counter.count()
    assert kept == ["first", "second"]
    assert (count.done, count.total, count.unit) == (2, 32, "groups kept")
    rate = count.figures.pop("tokens/s")
    assert 1000 < rate <= 10_000
    assert count.figures == {
        "longest_running_s": 38.2, "responses_running": 96, "groups_finished": 20, "environments_failing": 3
    }  # fmt: skip


@pytest.mark.parametrize("index", [-1, 3])
def test_an_order_of_ones_own_is_held_to_the_prompts_at_every_position(index):
    """The first thousand positions are tried before a run starts."""
    generator = object.__new__(GroupGenerator)
    generator._prompts, generator._order = PROMPTS[:3], SimpleNamespace(index_at=lambda position: index)
    with pytest.raises(ConfigError, match=rf"data.order: index_at\(1100\) = {index} is no index of the 3 prompts"):
        generator.prompt_at(1100)
