"""Prompts that are passed over because of what their last groups say: retired, or of a difficulty pool."""

import asyncio
import random
from dataclasses import replace

import numpy as np
import pytest

from megatron_dapo.config.algorithm_config import PoolConfig
from megatron_dapo.coordinator.sampler import OversamplingLimit
from megatron_dapo.coordinator.step_metrics import _sampling_metrics
from megatron_dapo.data.order import PromptOrder, Span
from megatron_dapo.storage.ledger import read_ledger
from tests.coordinator.test_sampler import GROUP, group, maker, steps
from tests.ledger_check import check_ledger


@pytest.fixture
def make(tmp_path):
    return maker(tmp_path)


class Epochs:
    """20 prompts, one epoch after the other; every fifth is always right, the others are useful."""

    PROMPTS = 20

    def __init__(self):
        self.sent: list[int] = []

    def prompt_at(self, position):
        return position % self.PROMPTS

    async def __call__(self, position, version):
        self.sent.append(position)
        prompt = self.prompt_at(position)
        correct = GROUP if prompt % 5 == 0 else 2
        await asyncio.sleep(random.random())
        return replace(group(position, correct, 3, version), prompt_index=prompt)


@pytest.mark.parametrize(("years", "comes_back"), [({}, False), ({"retire_for": 3}, True)])
@pytest.mark.parametrize("carrying", [{"max_staleness": 0}, {"max_staleness": 9}])
def test_a_prompt_that_is_solved_is_retired(make, years, comes_back, carrying):
    """No positive resampling: what a step finds out holds from the next step on, and may end."""
    servers = Epochs()
    given = {"retire_at": 0.9, "surplus": 0.0, **years, **carrying}
    sampler, ledger = make(servers, prompt_at=servers.prompt_at, **given)
    batches = steps(sampler, 12)
    ledger.close()
    check_ledger(read_ledger(ledger._path))
    kept = [each.position for batch in batches for each in batch.kept]
    assert kept == [at for at in range(1000) if servers.prompt_at(at) % 5][: 12 * 8], "no other prompt is left out"
    solved = [each.position for batch in batches for each in batch.filtered]
    assert sorted(map(servers.prompt_at, solved[:4])) == [0, 5, 10, 15]
    assert (len(solved) > 8) == comes_back, "a few of the second epoch may be on their way when the first is decided"
    assert sum(len(batch.passed_over) for batch in batches) > 0


def test_a_turn_that_is_passed_over_counts_once_although_a_surplus_behind_it_is_given_up(make):
    """Those behind the surplus are passed over again in the next step."""
    servers = Epochs()
    sampler, _ = make(servers, prompt_at=servers.prompt_at, retire_at=0.9, surplus=3.0, max_staleness=0)
    batches = steps(sampler, 12)
    assert sum(batch.discarded for batch in batches) > 0
    decided = {group.position for batch in batches for group in (*batch.kept, *batch.filtered)}
    assert sum(len(batch.passed_over) for batch in batches) == sampler.snapshot(12).cursor - len(decided) > 0


def test_retirement_looks_at_the_last_groups_and_survives_a_resume(make):
    def of(sampler, batches):
        return [([each.position for each in batch.kept], len(batch.passed_over)) for batch in batches]

    given = {"retire_at": 0.9, "retire_groups": 2, "surplus": 0.0}
    servers = Epochs()
    sampler, _ = make(servers, name="whole.jsonl", prompt_at=servers.prompt_at, **given)
    whole = of(sampler, steps(sampler, 10))
    assert [retired for _, retired in whole][:3] == [0] * 3, "the second epoch asks the solved ones again"
    assert sum(retired for _, retired in whole) > 0
    for killed_after in (4, 6, 7):
        again = Epochs()
        sampler, _ = make(again, name=f"first{killed_after}.jsonl", prompt_at=again.prompt_at, **given)
        steps(sampler, killed_after)
        state = sampler.snapshot(killed_after)
        resumed, _ = make(again, state=state, name=f"s{killed_after}.jsonl", prompt_at=again.prompt_at, **given)
        assert of(resumed, steps(resumed, 10 - killed_after, first=killed_after + 1)) == whole[killed_after:]


def test_when_every_prompt_is_retired_the_run_ends_and_says_why(make):
    async def solved(position, version):
        return replace(group(position, GROUP, 3, version), prompt_index=position % 4)

    sampler, _ = make(solved, prompt_at=lambda position: position % 4, retire_at=0.9, filter="off")
    with pytest.raises(OversamplingLimit, match=r"hardly any prompt is left: .* retired"):
        steps(sampler, 2)


@pytest.mark.parametrize("sampling", ["refill", "drop"])
def test_a_small_file_that_is_solved_does_not_end_a_run_whose_other_file_has_prompts(make, sampling):
    """Half of the turns are those of 2 prompts: in a batch each is passed over many times."""
    spans = [Span(start=0, count=2, weight=1.0), Span(start=2, count=3000, weight=1.0)]
    order = PromptOrder(spans, 0)

    async def servers(position, version):
        prompt = order.index_at(position)
        return replace(group(position, GROUP if prompt < 2 else 2, 3, version), prompt_index=prompt)

    sampler, _ = make(servers, prompts=64, prompt_at=order.index_at, retire_at=0.9, filter=sampling, max_staleness=0)
    batches = steps(sampler, 5)
    for batch in batches[1:]:
        assert (len(batch.kept), len(batch.filtered)) == (64, 0)
    assert min(len(batch.passed_over) for batch in batches[1:]) > 10 * 2
    kept = [each.position for batch in batches for each in batch.kept]
    assert kept == [at for at in range(3000) if order.index_at(at) >= 2][: len(kept)], "in order, none left out"


def test_when_a_batch_would_hold_little_but_one_prompt_the_run_ends(make):
    """19 of 20 are retired: the last one would be sent 64 times."""

    async def servers(position, version):
        return replace(group(position, 2 if position % 20 == 7 else GROUP, 3, version), prompt_index=position % 20)

    sampler, _ = make(servers, prompts=64, prompt_at=lambda position: position % 20, retire_at=0.9, filter="drop")
    with pytest.raises(OversamplingLimit, match="hardly any prompt is left"):
        steps(sampler, 2)


class Difficulties(Epochs):
    """40 prompts in four kinds: always right, right in 3 of 4, in 2, in 1."""

    PROMPTS = 40

    async def __call__(self, position, version):
        self.sent.append(position)
        await asyncio.sleep(random.random())
        prompt = self.prompt_at(position)
        return replace(group(position, GROUP - prompt % 4, 3, version), prompt_index=prompt)


POOLS = tuple(PoolConfig(at_least=rate, share=share) for rate, share in ((0.5, 1.0), (0.7, 0.5), (0.9, 0.1)))


def test_pools_are_sent_at_their_share_of_turns_also_over_a_resume(make):
    given = {"pools": POOLS, "surplus": 0.0, "max_staleness": 0}

    def run(name, killed_after=0):
        servers, batches, state = Difficulties(), [], None
        if killed_after:
            sampler, _ = make(servers, name=f"{name}-first.jsonl", prompt_at=servers.prompt_at, **given)
            batches, state = steps(sampler, killed_after), sampler.snapshot(killed_after)
        sampler, ledger = make(servers, state=state, name=f"{name}.jsonl", prompt_at=servers.prompt_at, **given)
        batches += steps(sampler, 120 - killed_after, first=killed_after + 1)
        ledger.close()
        if not killed_after:
            check_ledger(read_ledger(ledger._path))
        return batches, sorted(each.position for batch in batches for each in (*batch.kept, *batch.filtered))

    batches, positions = run("whole")
    turns = (positions[-1] - 40) / 4  # after the first epoch, in which nothing is known
    sent = [sum(position % 4 == kind for position in positions if position >= 40) / turns for kind in range(4)]
    assert sent == pytest.approx([0.1, 0.5, 1.0, 1.0], abs=0.1), "below the first pool: always"
    kept = [each.position for batch in batches for each in batch.kept]
    assert kept == [position for position in positions if position % 4], "in prompt order, none left out"
    rates = np.mean([rate for batch in batches for rate in batch.passed_over])
    assert rates == pytest.approx((0.9 * 1.0 + 0.5 * 0.75) / 1.4, abs=0.03)
    assert _sampling_metrics(batches[-1], 8)["bias/passed_over_accuracy"] > 0.75
    for killed_after in (7, 20):
        assert run(f"killed{killed_after}", killed_after)[1] == positions


def test_a_pool_of_share_0_that_holds_every_prompt_ends_the_run(make):
    servers = Difficulties()
    pools = (PoolConfig(at_least=0.0, share=0.0),)
    sampler, _ = make(servers, prompt_at=servers.prompt_at, pools=pools, filter="off")
    with pytest.raises(OversamplingLimit, match="pool whose share is 0"):
        steps(sampler, 9)
