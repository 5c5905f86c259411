"""What is unfinished when a batch is full goes on while the actor trains (`sync`), or is interrupted (`colocated`) and
goes on in the next step, from its tokens.

Groups are written in virtual seconds, by the modelled servers of the simulation or a token a second."""

import asyncio
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from megatron_dapo.algorithm.dynamic_sampling import PassRate
from megatron_dapo.config.algorithm_config import AlgorithmConfig, DynamicSamplingConfig
from megatron_dapo.coordinator import loop
from megatron_dapo.coordinator.sampler import DynamicSampler
from megatron_dapo.experience.groups import SamplerState
from megatron_dapo.monitor.timeline import StepTimer
from megatron_dapo.plan.rollout import Workload
from megatron_dapo.storage.ledger import Event, Ledger, effective_events, read_ledger
from tests.coordinator.test_every_wait import _context
from tests.coordinator.test_sampler import group, ran
from tests.ledger_check import check_ledger
from tests.simulation.modelled_engine import Speed
from tests.simulation.modelled_fleet import ModelledFleet, Prompts

PROMPTS, STEPS = 16, 6
WORKLOAD = Workload(
    mean_response=400, sigma=0.9, difficulty_share=0.5, mean_prompt=20, pass_rate=0.6, longest=2000, group_size=4
)
START = SamplerState(cursor=0, pass_rate=PassRate.start(0.5), carried=())


def sampler_of(fleet, ledger, *, holding, state=START, **dynamic):
    config = AlgorithmConfig(
        prompts_per_step=PROMPTS,
        group_size=4,
        mini_batch_responses=4,
        dynamic_sampling=DynamicSamplingConfig(**{"max_staleness": 1, "surplus": 1.0} | dynamic),
    )
    return DynamicSampler(config, fleet.generate, ledger, state, holding=holding)


async def train(path, *, hold=False, waits=False, **dynamic):
    """Admissions, the fleet, and the seconds in which batches were filled."""
    fleet, ledger = ModelledFleet(Prompts(WORKLOAD, 3), engines=2, slots=16, speed=Speed()), Ledger(path)
    sampler = sampler_of(fleet, ledger, holding=None if waits else fleet, **dynamic)
    admissions, seconds, clock = [], 0.0, asyncio.get_running_loop()
    for step in range(1, STEPS + 1):
        begin = clock.time()
        held = hold or step == STEPS
        admission = await sampler.fill(step, fleet.version, hold=held)
        seconds += clock.time() - begin
        drawn = fleet.drawn_tokens
        await asyncio.sleep(50.0)
        draws = admission.in_flight > 0 and not held
        assert (fleet.drawn_tokens > drawn) == draws, "tokens are drawn while the actor trains, or none"
        await fleet.publish(5.0)
        sampler.record_trained(admission.kept, step, step - 1)
        sampler.snapshot(step)
        ledger.record(Event.CHECKPOINT, rollout_step=step, weight_version=step)
        admissions.append(admission)
    await sampler.close()
    ledger.close()
    return admissions, fleet, seconds


@pytest.mark.parametrize("hold", [False, True])
def test_prompts_are_trained_in_order_once_each_and_within_the_bound(tmp_path, hold):
    admissions, _, seconds = ran(train(tmp_path / "ledger.jsonl", hold=hold))
    kept = [each for admission in admissions for each in admission.kept]
    prompts = Prompts(WORKLOAD, 3)
    positions = [each.position for each in kept]
    assert positions == [at for at in range(1000) if prompts.group(at).kept][: STEPS * PROMPTS]
    assert sum(admission.in_flight for admission in admissions) > 0, "nothing was unfinished: the test shows nothing"
    assert sum(admission.expired + admission.discarded for admission in admissions) == 0
    ages = [step - each.weight_version for step, admission in enumerate(admissions) for each in admission.kept]
    assert max(ages) == 1
    mixed = [one.generation.weight_versions for each in kept for one in each.responses]
    if hold:  # else all may end before the new weights
        assert any(np.ptp(versions) > 0 for versions in mixed), "a response of two versions was trained on"
    assert all((np.diff(versions) >= 0).all() for versions in mixed)
    events = read_ledger(tmp_path / "ledger.jsonl")
    fates = check_ledger(events)
    assert sum(fate == "trained" for fate in fates.values()) == STEPS * PROMPTS
    assert max(Counter(event["prompt"] for event in events if event["event"] == "dispatched").values()) == 1
    _, _, waited = ran(train(tmp_path / "waits.jsonl", waits=True))
    assert seconds < 0.9 * waited


def test_what_goes_on_while_the_actor_trains_makes_the_next_batch_sooner(tmp_path):
    (_, _, on), (_, _, held) = (ran(train(tmp_path / f"{hold}", hold=hold, surplus=6.0)) for hold in (False, True))
    assert on < 0.8 * held


@pytest.mark.parametrize(
    ("mode", "step", "held"),
    [("sync", 1, False), ("sync", 3, True), ("colocated", 1, True), ("async", 1, False), ("async", 3, True)],
)
def test_a_run_holds_what_is_unfinished_where_the_trainer_needs_the_gpus_and_at_its_end(mode, step, held):
    """After the last update nobody would train on it, and the evaluation at the end has the servers for itself."""

    class Asked(Exception):
        pass

    async def fill(number, version, on_kept, *, ahead, hold):
        assert (number, version, hold) == (step, 7, held)
        raise Asked

    async def run():
        context = _context()
        context.sampler = SimpleNamespace(fill=fill)
        context.config = replace(context.config, run=replace(context.config.run, mode=mode, rollout_steps=3))
        with pytest.raises(Asked):
            await loop.fill_batch(context, SimpleNamespace(rollout_step=step - 1, weight_version=7), StepTimer())

    asyncio.run(run())


def test_the_same_prompts_are_sent_as_where_their_end_is_awaited(tmp_path):
    """No prompt is sent ahead: it changes when groups are finished, not which."""
    sent = []
    for way in ("on", "hold", "waits"):
        admissions, *_ = ran(train(tmp_path / f"{way}.jsonl", **({} if way == "on" else {way: True})))
        events = read_ledger(tmp_path / f"{way}.jsonl")
        sent.append([(e["prompt"], e["rollout_step"]) for e in events if e["event"] == "dispatched"])
        left = [admission.carried + admission.in_flight for admission in admissions]
        sent[-1].append(left)
    assert sent[0] == sent[1] == sent[2]


@pytest.mark.parametrize("hold", [False, True])
def test_every_token_has_one_fate_and_the_lengths_are_unbiased(tmp_path, hold):
    admissions, *_ = ran(train(tmp_path / "ledger.jsonl", hold=hold))
    generated = [each for admission in admissions for each in admission.generated]
    positions = [each.position for each in generated]
    assert len(positions) == len(set(positions)), "each group counts as generated in one step"
    decided = {each.position for admission in admissions for each in (*admission.kept, *admission.filtered)}
    assert decided <= set(positions)
    left = admissions[-1].carried
    assert len(positions) - len(decided) in range(left, left + admissions[-1].in_flight + 1)


def test_without_staleness_all_is_given_up_at_once(tmp_path):
    admissions, *_ = ran(train(tmp_path / "ledger.jsonl", max_staleness=0))
    assert sum(admission.discarded for admission in admissions) > 0
    assert [admission.in_flight + admission.carried for admission in admissions] == [0] * STEPS
    assert all(each.weight_version == step for step, one in enumerate(admissions) for each in one.kept)
    check_ledger(read_ledger(tmp_path / "ledger.jsonl"))


class Writers:
    """A token a second of each group, of length 10 + position; what is held stands still. Fails at (position, token)
    `fails`."""

    def __init__(self, fails=None):
        self.version, self.fails, self.begun = 0, fails, []
        self.going = asyncio.Event()
        self.going.set()

    async def generate(self, position, version):
        self.begun.append(position)
        drawn = []
        for token in range(10 + position):
            await self.going.wait()
            if (position, token) == self.fails:
                raise RuntimeError("server gone")
            await asyncio.sleep(1)
            drawn.append(self.version)
        return group(position, 2, len(drawn), min(drawn))

    async def hold(self):
        self.going.clear()

    def let_go(self):
        self.going.set()


def test_a_stop_in_the_middle_leaves_no_task_and_a_resume_sends_again(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl")

    async def first_life():
        writers = Writers()
        sampler = sampler_of(writers, ledger, holding=writers)
        admission = await sampler.fill(1, 0, hold=True)
        assert admission.in_flight > 0
        sampler.record_trained(admission.kept, 1, 0)
        state = sampler.snapshot(1)
        ledger.record(Event.CHECKPOINT, rollout_step=1, weight_version=1)
        writers.version = 1
        filling = asyncio.ensure_future(sampler.fill(2, 1))
        await asyncio.sleep(5)
        filling.cancel()
        await asyncio.wait([filling])
        assert len(asyncio.all_tasks()) == 1, "no task is left behind"
        return state

    state = ran(first_life())
    ledger.record(Event.RESUMED, rollout_step=1, weight_version=1)

    async def second_life():
        writers = Writers()
        writers.version = 1
        sampler = sampler_of(writers, ledger, holding=writers, state=state)
        for step in (2, 3):
            admission = await sampler.fill(step, writers.version, hold=True)
            sampler.record_trained(admission.kept, step, step - 1)
            writers.version = step
        await sampler.close()

    ran(second_life())
    ledger.close()
    events = read_ledger(tmp_path / "ledger.jsonl")
    check_ledger(events)
    trained = [event["prompt"] for event in effective_events(events) if event["event"] == "trained"]
    assert trained == list(range(3 * PROMPTS))


def test_a_failure_while_all_is_held_is_raised_by_the_next_batch(tmp_path):
    async def run():
        writers = Writers()
        sampler = sampler_of(writers, Ledger(tmp_path / "ledger.jsonl"), holding=writers, initial_pass_rate=0.6)
        admission = await sampler.fill(1, 0, hold=True)
        assert admission.in_flight > 0
        last = max(writers.begun)
        writers.fails = (last, last + 9)
        await sampler.fill(2, 1, hold=True)
        with pytest.raises(RuntimeError, match="server gone"):
            await sampler.fill(3, 2)
        assert len(asyncio.all_tasks()) == 1, "no task is left behind"

    ran(run())
