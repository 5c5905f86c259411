"""Dynamic sampling and admission, laws 2, 3 and 4, with scripted groups instead of servers."""

import asyncio
import random

import numpy as np
import pytest

from megatron_dapo.algorithm.dynamic_sampling import PassRate
from megatron_dapo.config.algorithm_config import AlgorithmConfig, DynamicSamplingConfig
from megatron_dapo.coordinator.sampler import DynamicSampler, OversamplingLimit
from megatron_dapo.coordinator.step_metrics import _sampling_metrics
from megatron_dapo.experience.groups import SamplerState, ScoredGroup, ScoredResponse
from megatron_dapo.storage.ledger import Ledger, read_ledger
from reward.verdict import Verdict
from rollout.generation import FinishReason, Generation
from tests.ledger_check import check_ledger
from tests.outcome_counts import count_outcomes
from tests.simulation.virtual_time import run_virtually

GROUP = 4
CARRYING = {"max_staleness": 1, "surplus": 2.0}
"""A surplus, so that there is something to carry."""


def fates_of(batch) -> dict[str, int]:
    """Tokens by what became of them, besides those trained on."""
    return {name: value for name, value in _sampling_metrics(batch, 1).items() if name.startswith("tokens/")}


def group(position: int, correct: int, length: int, version: int = 0, shaped: float | None = None) -> ScoredGroup:
    def response(sample: int) -> ScoredResponse:
        right = sample < correct
        return ScoredResponse(
            generation=Generation(
                request_id=f"{position}-{sample}",
                token_ids=np.ones(length, np.int32),
                log_probs=np.zeros(length, np.float32),
                weight_versions=np.full(length, version, np.int32),
                finish_reason=FinishReason.STOP,
            ),
            text="",
            verdict=Verdict(accuracy=right, extracted=None, rule="test", seconds=0.0),
            accuracy=right,
            reward_raw=1.0 if right else -1.0,
            reward_shaped=(1.0 if right else -1.0) if shaped is None else shaped + 0.1 * sample,
        )

    return ScoredGroup(
        position=position,
        prompt_index=position,
        prompt_ids=np.ones(2, np.int32),
        weight_version=version,
        responses=tuple(response(sample) for sample in range(GROUP)),
    )


class Script:
    """Groups whose length (and time, a second a token) and right answers are drawn from the position alone."""

    def __init__(self, useful=0.5, hurry=True, seed=0):
        self.useful, self.hurry, self.seed = useful, hurry, seed
        self.made: list[int] = []

    def draw(self, position):
        rng = random.Random(f"{self.seed}-{position}")
        length = int(min(400, rng.lognormvariate(3, 1)) + 1)
        return length, (2 if rng.random() < self.useful else rng.choice([0, GROUP]))

    async def __call__(self, position, version):
        length, correct = self.draw(position)
        await asyncio.sleep(length if self.hurry else random.random() * 400)
        self.made.append(position)
        return group(position, correct, length, version)


def maker(tmp_path):
    """What makes a sampler with a ledger in the folder."""

    def sampler(generate, state=None, name="ledger.jsonl", prompts=8, prompt_at=lambda position: position, **dynamic):
        config = AlgorithmConfig(
            prompts_per_step=prompts,
            group_size=GROUP,
            mini_batch_responses=GROUP,
            dynamic_sampling=DynamicSamplingConfig(**CARRYING | dynamic),
        )
        ledger = Ledger(tmp_path / name)
        start = state or SamplerState(cursor=0, pass_rate=PassRate.start(0.5), carried=())
        return DynamicSampler(config, generate, ledger, start, prompt_at), ledger

    return sampler


@pytest.fixture
def make(tmp_path):
    return maker(tmp_path)


def ran(coroutine):
    """What the coroutine returns, in virtual time: who finishes first follows from the script, not from how busy the
    machine is. asyncio's runner itself would print the result, all token ids included, to restore a signal."""
    results = []

    async def main():
        results.append(await coroutine)

    run_virtually(main())
    return results[0]


def steps(sampler, count, first=1):
    """Batches of the steps from `first` on, each followed by a checkpoint; weights are one version newer each time."""

    async def run():
        batches = []
        for step in range(first, first + count):
            batches.append(await sampler.fill(step, step - 1))
            sampler.snapshot(step)
        return batches

    return ran(run())


def test_a_batch_is_the_first_useful_groups_in_prompt_order(make):
    script = Script()
    sampler, ledger = make(script, surplus=0.0)  # with one, a surplus of more than a batch of 8 becomes too old
    batches = steps(sampler, 5)
    ledger.close()
    kept = [g.position for batch in batches for g in batch.kept]
    useful = [position for position in range(1000) if script.draw(position)[1] == 2]
    assert kept == useful[: 5 * 8], "every useful prompt in order, none skipped, none twice"
    fates = check_ledger(read_ledger(ledger._path))
    assert {p for p, fate in fates.items() if fate == "trained"} == set(), "the loop records trained, not the sampler"
    assert len(script.made) == len(set(script.made)), "nothing is generated twice"


def test_groups_that_are_all_right_or_all_wrong_are_filtered_and_written_down(make):
    sampler, ledger = make(Script())
    (batch,) = steps(sampler, 1)
    ledger.close()
    assert {g.correct for g in batch.kept} == {2}
    assert {g.correct for g in batch.filtered} <= {0, GROUP}
    events = read_ledger(ledger._path)
    assert [e["prompt"] for e in events if e["event"] == "filtered"] == [g.position for g in batch.filtered]
    assert sum(e["event"] == "carried" for e in events) == batch.carried
    assert sum(e["event"] == "dispatched" for e in events) == len(batch.kept) + len(batch.filtered) + batch.carried


def test_the_filter_reads_accuracy_not_the_shaped_reward(make):
    async def overlong(position, version):
        """All wrong, but the lengths differ, so the shaped rewards do."""
        return group(position, 0 if position % 2 else 2, 10, shaped=-1.5)

    sampler, _ = make(overlong)
    (batch,) = steps(sampler, 1)
    assert all(g.position % 2 == 0 for g in batch.kept)


def test_admission_does_not_favour_short_responses(make):
    """Law 3. First-come admission of the same groups is biased; ours is not."""
    script = Script(useful=1.0)
    sampler, _ = make(script, prompts=16, initial_pass_rate=0.3)
    batches = steps(sampler, 6)
    accepted = np.mean([g.tokens for batch in batches for g in batch.kept])
    first_positions = [script.draw(p)[0] * GROUP for p in range(96)]
    assert accepted == np.mean(first_positions), "exactly the lengths of the prompts in order"
    lengths = np.array([script.draw(p)[0] for p in range(96 * 3)])
    first_to_finish = np.concatenate([np.sort(lengths[at : at + 48])[:16] for at in range(0, 288, 48)]).mean()
    assert first_to_finish < 0.6 * lengths.mean(), "the scripted lengths do show the bias of first-come admission"


def test_the_result_does_not_depend_on_who_finishes_first(make):
    fates = []
    for run in range(3):
        script = Script(hurry=False)
        sampler, _ = make(script, name=f"{run}.jsonl")
        batches = steps(sampler, 4)
        fates.append([([g.position for g in b.kept], [g.position for g in b.filtered], b.carried) for b in batches])
    assert fates[0] == fates[1] == fates[2]


def test_a_resume_from_the_state_gives_the_same_batches(make):
    sampler, _ = make(Script(), name="whole.jsonl")
    whole = steps(sampler, 6)
    sampler, _ = make(Script(), name="first.jsonl")
    steps(sampler, 3)
    again, _ = make(Script(), state=sampler.snapshot(3), name="second.jsonl")
    rest = steps(again, 3, first=4)
    assert [[g.position for g in b.kept] for b in rest] == [[g.position for g in b.kept] for b in whole[3:]]
    assert [b.carried for b in rest] == [b.carried for b in whole[3:]]


def test_a_surplus_spares_most_batches_a_second_round(make):
    """A second round: prompts sent when the first dispatch of the batch is already decided."""
    short = {}
    for surplus in (0.0, 2.0):
        sampler, _ = make(Script(), name=f"{surplus}.jsonl", prompts=64, surplus=surplus)
        batches = steps(sampler, 12)[2:]  # the first ones know no pass rate
        short[surplus] = sum(len(b.kept) + len(b.filtered) > b.predicted_groups for b in batches)
        assert all(len(b.kept) == 64 for b in batches)
    assert short[0.0] >= 4
    assert short[2.0] <= 1


def test_carried_groups_that_are_too_old_are_generated_again(make):
    script = Script(useful=1.0)
    sampler, ledger = make(script, initial_pass_rate=0.25, max_staleness=1)

    async def run():
        first = await sampler.fill(1, 0)
        return first, await sampler.fill(2, 2)  # two updates later

    first, second = ran(run())
    ledger.close()
    assert first.carried > 0
    assert second.expired == first.carried
    assert all(g.weight_version == 2 for g in second.kept)
    events = read_ledger(ledger._path)
    check_ledger(events)
    assert sum(event["event"] == "expired" for event in events) == second.expired


def test_without_staleness_the_surplus_is_given_up_when_the_batch_is_full_and_nobody_waits_for_it(make):
    async def slow_after_the_batch(position, version):
        await asyncio.sleep(1 if position < 8 else 10_000)
        return group(position, 2, 3, version)

    sampler, ledger = make(slow_after_the_batch, max_staleness=0)

    async def run():
        first = await sampler.fill(1, 0)
        return first, asyncio.get_running_loop().time(), sampler.snapshot(1)

    first, seconds, state = ran(run())
    ledger.close()
    assert seconds < 100
    assert first.discarded > 0
    assert (first.carried, first.in_flight, first.discarded_tokens, state.carried) == (0, 0, 0, ())
    events = read_ledger(ledger._path)
    check_ledger(events)
    assert sum(event["event"] == "expired" for event in events) == first.discarded


@pytest.mark.parametrize("max_staleness", [0, 9])
def test_every_token_has_one_fate(make, max_staleness):
    """Generated or carried into the step: trained, filtered as right or as wrong, carried out of it, or expired."""
    sampler, ledger = make(Script(), initial_pass_rate=0.25, max_staleness=max_staleness)
    batches = steps(sampler, 6)
    ledger.close()
    before = 0
    for batch in batches:
        fates = fates_of(batch)
        assert fates["tokens/all_correct"] + fates["tokens/all_wrong"] == sum(g.tokens for g in batch.filtered)
        spent = sum(g.tokens for g in batch.kept) + sum(fates.values())
        assert sum(g.tokens for g in batch.generated) + before == spent
        before = fates["tokens/carried"]
    assert (sum(batch.discarded_tokens for batch in batches) > 0) == (max_staleness == 0)
    written = count_outcomes(ledger._path)
    for fate, name in (("all right", "all_correct"), ("all wrong", "all_wrong"), ("generated again", "expired")):
        given_up = sum(fates_of(batch)["tokens/discarded"] for batch in batches) if name == "expired" else 0
        assert written.tokens[fate] == sum(fates_of(batch)[f"tokens/{name}"] for batch in batches) + given_up


def test_carried_groups_within_the_bound_are_used_as_they_are(make):
    script = Script(useful=1.0)
    sampler, _ = make(script, initial_pass_rate=0.25, max_staleness=1)
    first, second = steps(sampler, 2)
    assert second.expired == 0
    assert sum(g.weight_version == 0 for g in second.kept) == min(8, first.carried)


def test_at_the_limit_the_smaller_batch_is_trained_or_the_run_stops(make):
    sampler, _ = make(Script(useful=0.3), max_oversampling=2.0, on_limit="train")
    (batch,) = steps(sampler, 1)
    assert batch.limit_reached
    assert 0 < len(batch.kept) < 8
    assert len(batch.generated) == 16
    sampler, _ = make(Script(useful=0.3), name="b.jsonl", max_oversampling=2.0, on_limit="stop")
    with pytest.raises(OversamplingLimit, match="raise the limit"):
        steps(sampler, 1)
    sampler, _ = make(Script(useful=0.0), name="c.jsonl", max_oversampling=2.0)
    with pytest.raises(OversamplingLimit, match="too hard or too easy"):
        steps(sampler, 1)


def test_without_dynamic_sampling_every_group_is_kept(make):
    sampler, _ = make(Script(), filter="off")
    batches = steps(sampler, 2)
    assert [g.position for b in batches for g in b.kept] == list(range(16))


def test_a_failure_ends_the_others_and_is_not_lost(make):
    async def fails(position, version):
        if position == 3:
            raise RuntimeError("server gone")
        await asyncio.sleep(60)

    async def run():
        sampler, _ = make(fails)
        with pytest.raises(RuntimeError, match="server gone"):
            await asyncio.wait_for(sampler.fill(1, 0), 5)
        assert len(asyncio.all_tasks()) == 1, "no task is left behind"

    asyncio.run(run())


def test_by_default_no_group_is_trained_that_other_weights_drew_and_little_is_sent_twice(make):
    """Eq. 8 draws from the pi_old of its ratio."""
    paper = DynamicSamplingConfig()
    defaults = {"max_staleness": paper.max_staleness, "surplus": paper.surplus}
    script = Script(useful=0.7)
    sampler, _ = make(script, prompts=64, **defaults)
    batches = steps(sampler, 6)
    for step, batch in enumerate(batches):
        assert {each.weight_version for each in batch.kept} == {step}
        assert batch.discarded < 0.15 * 64
    decided = sum(len(batch.kept) + len(batch.filtered) for batch in batches)
    assert len(script.made) < 1.1 * decided


def test_drop_leaves_groups_without_spread_out_and_sends_no_others(make):
    script = Script()
    sampler, ledger = make(script, filter="drop", on_limit="stop")
    batches = steps(sampler, 3)
    ledger.close()
    for number, batch in enumerate(batches):
        positions = range(8 * number, 8 * number + 8)
        assert [each.position for each in batch.kept] == [at for at in positions if script.draw(at)[1] == 2]
        assert sorted(each.position for each in (*batch.kept, *batch.filtered)) == list(positions)
        assert not batch.limit_reached
        assert 0 < len(batch.kept) < 8
    assert len(script.made) == 24
    sampler, _ = make(Script(useful=0.0), name="none.jsonl", filter="drop")
    with pytest.raises(OversamplingLimit, match=r"0 of 8 groups after 8 prompts \(.*filter = drop\): .* or too easy"):
        steps(sampler, 1)
