"""Dynamic sampling with look-ahead (async): what is in flight when a batch is full outlives the new weights.

Time is counted in rounds of the event loop."""

import asyncio
import random
from dataclasses import replace

import numpy as np
import pytest

from megatron_dapo.algorithm.dynamic_sampling import PassRate
from megatron_dapo.config.algorithm_config import AlgorithmConfig, DynamicSamplingConfig
from megatron_dapo.coordinator.sampler import DynamicSampler
from megatron_dapo.experience.groups import SamplerState
from megatron_dapo.storage.ledger import Event, Ledger, LedgerError, effective_events, read_ledger
from tests.coordinator.test_sampler import GROUP, group, ran
from tests.ledger_check import check_ledger

PROMPTS = 8
START = SamplerState(cursor=0, pass_rate=PassRate.start(0.5), carried=())


async def rounds(count):
    for _ in range(count):
        await asyncio.sleep(0)


class Servers:
    """Writes groups at a random pace, in no order; the version of a token is that of the moment it is written in."""

    def __init__(self, *, pace=None, useful=0.5):
        self.version = 0
        self.pace, self.useful = pace or random.Random(), useful
        self.sent: list[int] = []
        self.hung = False

    def draw(self, position):
        """Length and number of right answers of a group, from its position alone."""
        rng = random.Random(f"draw-{position}")
        return int(min(60, rng.lognormvariate(2, 1)) + 1), (2 if rng.random() < self.useful else rng.choice([0, GROUP]))

    async def __call__(self, position, version):
        self.sent.append(position)
        length, correct = self.draw(position)
        versions = []
        for _ in range(length):
            versions.append(self.version)
            await rounds(10**6 if self.hung else self.pace.randrange(4))
        return group(position, correct, length, min(versions))


def sampler_of(servers, ledger, state=START, prompt_at=lambda position: position, **dynamic):
    config = AlgorithmConfig(
        prompts_per_step=PROMPTS,
        group_size=GROUP,
        mini_batch_responses=GROUP,
        dynamic_sampling=DynamicSamplingConfig(**dynamic),
    )
    return DynamicSampler(config, servers, ledger, state, prompt_at)


async def train(sampler, servers, ledger, count, *, ahead=PROMPTS, first=1, last=None, busy=30):
    """The loop's calls without its trainer. Returns batches and the snapshots after them."""
    batches, snapshots = [], []
    for step in range(first, first + count):
        admission = await sampler.fill(step, servers.version, ahead=0 if step == last else ahead)
        await rounds(busy)
        servers.version = step
        for each in admission.kept:
            ledger.record(Event.TRAINED, prompt=each.position, rollout_step=step, weight_version=step - 1)
        batches.append(admission)
        snapshots.append(sampler.snapshot(step))
        ledger.record(Event.CHECKPOINT, rollout_step=step, weight_version=step)
    return batches, snapshots


def test_batches_are_still_the_first_useful_groups_in_prompt_order(tmp_path):
    servers = Servers()
    ledger = Ledger(tmp_path / "ledger.jsonl")
    batches, _ = ran(train(sampler_of(servers, ledger, max_staleness=3), servers, ledger, 6, last=6))
    ledger.close()
    kept = [each.position for batch in batches for each in batch.kept]
    assert kept == [position for position in range(1000) if servers.draw(position)[1] == 2][: 6 * PROMPTS]
    fates = check_ledger(read_ledger(tmp_path / "ledger.jsonl"))
    assert set(fates.values()) == {"trained", "filtered", "carried"}, "without look-ahead at the end nothing is left"
    assert batches[-1].in_flight == 0
    assert sum(batch.in_flight for batch in batches) > 0, "nothing was in flight: the test shows nothing"


def test_what_is_dispatched_does_not_depend_on_who_finishes_first(tmp_path):
    seen = []
    for run in range(3):
        servers, ledger = Servers(), Ledger(tmp_path / f"{run}.jsonl")
        sampler = sampler_of(servers, ledger, max_staleness=1)
        batches, _ = ran(train(sampler, servers, ledger, 5, last=5))
        ledger.close()
        sent = [
            (event["event"], event["prompt"], event["rollout_step"])
            for event in read_ledger(tmp_path / f"{run}.jsonl")
            if event["event"] in ("dispatched", "expired", "filtered", "trained")
        ]
        seen.append((sorted(sent), [batch.expired for batch in batches]))
    assert seen[0] == seen[1] == seen[2]


@pytest.mark.parametrize("staleness", [1, 2])
def test_no_token_that_is_trained_on_is_older_than_the_bound(tmp_path, staleness):
    """More is sent ahead than the bound allows to be trained: the rest must expire, and be written down."""
    servers, ledger = Servers(), Ledger(tmp_path / "ledger.jsonl")
    sampler = sampler_of(servers, ledger, max_staleness=staleness)
    batches, _ = ran(train(sampler, servers, ledger, 8, ahead=4 * PROMPTS, last=8))
    ledger.close()
    ages = [step - each.weight_version for step, batch in enumerate(batches) for each in batch.kept]
    assert max(ages) == staleness
    expired = sum(batch.expired for batch in batches)
    events = read_ledger(tmp_path / "ledger.jsonl")
    assert expired == sum(event["event"] == "expired" for event in events) > 0
    assert len(servers.sent) == len(set(servers.sent)) + expired, "nothing else is written twice"
    check_ledger(events)


def test_expiry_favours_no_length(tmp_path):
    """A group expires for its place in line, not for being unfinished: the accepted lengths are those of the prompts
    in order, though long groups are the ones still in flight when the weights change."""
    servers, ledger = Servers(useful=1.0), Ledger(tmp_path / "ledger.jsonl")
    sampler = sampler_of(servers, ledger, max_staleness=1)
    batches, _ = ran(train(sampler, servers, ledger, 6, ahead=3 * PROMPTS, last=6))
    kept = [each for batch in batches for each in batch.kept]
    assert sum(batch.expired for batch in batches) > 0
    assert np.mean([each.tokens for each in kept]) == np.mean([servers.draw(p)[0] * GROUP for p in range(6 * PROMPTS)])


def test_look_ahead_is_what_the_next_batch_is_expected_to_need(tmp_path):
    servers, ledger = Servers(useful=1.0), Ledger(tmp_path / "ledger.jsonl")

    async def run():
        sampler = sampler_of(servers, ledger)
        admission = await sampler.fill(1, 0, ahead=PROMPTS)
        rate = sampler.snapshot(1).pass_rate.mean
        await sampler.close()
        return admission, rate

    admission, rate = ran(run())
    assert admission.carried + admission.in_flight >= PROMPTS / rate, "enough for one more batch"
    assert admission.predicted_groups == 2 * PROMPTS, "of its own batch, not of the look-ahead"


def test_a_resume_sends_again_what_was_in_flight_and_keeps_what_was_finished(tmp_path):
    """Killed at any checkpoint, and in the step after it: nothing lost, nothing trained twice."""
    interrupted = 0
    for steps in (1, 2, 3):
        path = tmp_path / f"{steps}.jsonl"
        servers, ledger = Servers(pace=random.Random(steps)), Ledger(path)

        async def first_life(servers=servers, ledger=ledger, steps=steps):
            sampler = sampler_of(servers, ledger, max_staleness=3)
            _, snapshots = await train(sampler, servers, ledger, steps, ahead=PROMPTS // 2, busy=0)
            await rounds(20)
            servers.hung = True
            filling = asyncio.ensure_future(sampler.fill(steps + 1, steps))
            await rounds(20)
            filling.cancel()
            await asyncio.wait([filling])
            assert filling.cancelled()
            return snapshots[-1]

        state = ran(first_life())
        ledger.record(Event.RESUMED, rollout_step=steps, weight_version=steps)
        again = Servers(pace=random.Random(steps))
        again.version = steps
        resumed = sampler_of(again, ledger, state, max_staleness=3)
        ran(train(resumed, again, ledger, 5 - steps, first=steps + 1, last=5))
        ledger.close()
        events = read_ledger(path)
        check_ledger(events)
        trained = [event["prompt"] for event in effective_events(events) if event["event"] == "trained"]
        assert trained == [position for position in range(1000) if servers.draw(position)[1] == 2][: 5 * PROMPTS]
        assert not {each.position for each in state.carried} & set(again.sent), "what was finished is not written again"
        interrupted += sum(event["event"] == "interrupted" for event in effective_events(events))
    assert interrupted > 0, "nothing was in flight at a checkpoint: the test shows nothing"


def test_a_failure_between_two_batches_is_raised_by_the_next(tmp_path):
    async def fails(position, version):
        if position == 12:
            await rounds(50)
            raise RuntimeError("server gone")
        return group(position, 2, 3)

    async def run():
        ledger = Ledger(tmp_path / "ledger.jsonl")
        sampler = sampler_of(fails, ledger)
        await sampler.fill(1, 0, ahead=PROMPTS)
        await rounds(100)
        with pytest.raises(RuntimeError, match="server gone"):
            await sampler.fill(2, 1, ahead=PROMPTS)
        assert len(asyncio.all_tasks()) == 1, "no task is left behind"

    ran(run())


def test_the_limit_counts_what_a_batch_decides_and_bounds_the_look_ahead(tmp_path):
    servers, ledger = Servers(useful=0.25), Ledger(tmp_path / "ledger.jsonl")

    async def run():
        sampler = sampler_of(servers, ledger, max_oversampling=2.0, max_staleness=5, on_limit="train")
        batches = [await sampler.fill(step, step - 1, ahead=PROMPTS) for step in (1, 2)]
        await sampler.close()
        return batches

    for batch in ran(run()):
        assert batch.limit_reached
        assert len(batch.kept) + len(batch.filtered) == 2 * PROMPTS
        assert batch.carried + batch.in_flight <= 2 * PROMPTS


def test_a_position_may_not_be_sent_twice_without_a_reason():
    twice = [{"event": "dispatched", "prompt": 0, "rollout_step": 1, "weight_version": 0}] * 2
    with pytest.raises(LedgerError, match="dispatched after dispatched"):
        check_ledger(twice)


def test_after_a_resume_a_group_is_as_old_as_its_dispatch_not_as_its_tokens(tmp_path):
    """A group sent before the weights changed and written after: the same groups expire as without the kill."""

    def finished(position, version=2):
        return group(position, 2, 3, version)

    def state(sent_with, count=4):
        carried = tuple(finished(position) for position in range(count))
        rate = PassRate.start(0.5)
        return SamplerState(cursor=0, pass_rate=rate, carried=carried, sent_with=sent_with, next=count)

    sampler = sampler_of(Servers(useful=1.0), Ledger(tmp_path / "a.jsonl"), state((0, 0, 1, 2)), max_staleness=1)
    assert ran(sampler.fill(3, 2)).expired == 2
    sent_with = (2,) * PROMPTS + (1, 1, 2)
    sampler = sampler_of(Servers(), Ledger(tmp_path / "c.jsonl"), state(sent_with, PROMPTS + 3), max_staleness=1)
    ran(sampler.fill(3, 2))
    assert sampler.snapshot(3).sent_with == (1, 1, 2), "what the next resume reads"


CARRYING = {"max_staleness": 1, "surplus": 2.0}


@pytest.mark.parametrize(
    ("ahead", "dynamic"),
    [
        (0, {"max_staleness": 0, "retire_for": 3}),
        (0, CARRYING),
        (0, CARRYING | {"retire_for": 3}),
        (PROMPTS, {"max_staleness": 2}),
        (PROMPTS, {"max_staleness": 2, "retire_for": 2}),
        (PROMPTS, {"max_staleness": 2, "retire_for": 3, "filter": "drop"}),
    ],
)
def test_a_resume_sends_and_passes_over_what_the_run_did(tmp_path, ahead, dynamic):
    """Prompts that are retired after some of their positions were sent, and come back after some were passed over."""
    steps, prompts = 12, 40

    def prompt_at(position):
        epoch, place = divmod(position, prompts)
        return random.Random(epoch).sample(range(prompts), prompts)[place]

    async def servers(position, version):
        rng = random.Random(f"{position}")
        length = int(min(400, rng.lognormvariate(3, 1)) + 1)
        await asyncio.sleep(length)
        return replace(group(position, rng.choice([0, 2, 2, 4, 4]), length, version), prompt_index=prompt_at(position))

    async def batches(cut=None):
        ledger = Ledger(tmp_path / f"{cut}.jsonl")
        sampler, decided = sampler_of(servers, ledger, prompt_at=prompt_at, retire_at=0.9, **dynamic), []
        for step in range(1, steps + 1):
            batch = await sampler.fill(step, step - 1, ahead=ahead if step < steps else 0)
            decided.append([[each.position for each in groups] for groups in (batch.kept, batch.filtered)])
            state = sampler.snapshot(step)
            if step == cut:
                await sampler.close()
                before = sampler_of(servers, ledger, state, prompt_at, retire_at=0.9, **dynamic)
                sampler = sampler_of(servers, ledger, before.snapshot(step), prompt_at, retire_at=0.9, **dynamic)
        await sampler.close()
        ledger.close()
        return decided

    whole = ran(batches())
    for cut in range(1, steps):
        assert ran(batches(cut)) == whole, f"resumed after step {cut}"


def test_an_error_of_what_is_given_up_is_nobodys_failure(tmp_path):
    async def breaks(position, version):
        try:
            await asyncio.sleep(1 if position < PROMPTS or version else 1000)
        except asyncio.CancelledError:
            raise RuntimeError("broke while it was given up") from None
        return group(position, 2, 3, version)

    async def run():
        sampler = sampler_of(breaks, Ledger(tmp_path / "ledger.jsonl"), surplus=0.0)
        return [await sampler.fill(step, step - 1) for step in (1, 2)]

    first, second = ran(run())
    assert first.discarded > 0
    assert [each.position for each in second.kept] == list(range(PROMPTS, 2 * PROMPTS))
