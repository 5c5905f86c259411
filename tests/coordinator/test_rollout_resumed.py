"""A rollout that is cut anywhere goes on from what was saved of it: the same batches, no group drawn twice or lost."""

import asyncio
import random
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest

from megatron_dapo.algorithm.dynamic_sampling import PassRate
from megatron_dapo.config.algorithm_config import AlgorithmConfig, DynamicSamplingConfig
from megatron_dapo.coordinator.checkpoints import Progress, load_progress, save_progress, with_rollout
from megatron_dapo.coordinator.sampler import DynamicSampler
from megatron_dapo.experience.groups import SamplerState
from megatron_dapo.storage.ledger import Event, Ledger, effective_events, read_ledger
from megatron_dapo.storage.run_dir import RunDir
from tests.coordinator.test_sampler import GROUP, group, ran
from tests.ledger_check import check_ledger

PROMPTS, STEPS, ROWS = 8, 7, 40
START = SamplerState(cursor=0, pass_rate=PassRate.start(0.5), carried=())
CARRYING = {"max_staleness": 1, "surplus": 2.0}


def prompt_at(position):
    """Each row once an epoch, in another order."""
    epoch, place = divmod(position, ROWS)
    return random.Random(epoch).sample(range(ROWS), ROWS)[place]


class Writers:
    """A token a second of each group; lengths and right answers follow from the position."""

    def __init__(self):
        self.made = Counter()

    async def generate(self, position, version):
        rng = random.Random(f"{position}")
        length = int(min(400, rng.lognormvariate(3, 1)) + 1)
        await asyncio.sleep(length)
        self.made[position, version] += 1
        return replace(group(position, rng.choice([0, 2, 2, 4, 4]), length, version), prompt_index=prompt_at(position))


class Run:
    """Steps with a checkpoint after each, cut in the middle of one and resumed."""

    def __init__(self, folder, ahead, dynamic):
        self.run_dir, self.ahead = RunDir(folder, resume=True), ahead
        self.ledger, self.writers = Ledger(self.run_dir.ledger), Writers()
        self.config = AlgorithmConfig(
            prompts_per_step=PROMPTS,
            group_size=GROUP,
            mini_batch_responses=GROUP,
            dynamic_sampling=DynamicSamplingConfig(retire_at=0.9, **dynamic),
        )

    def sampler(self, state):
        return DynamicSampler(self.config, self.writers.generate, self.ledger, state, prompt_at)

    def fill(self, sampler, step):
        return asyncio.ensure_future(sampler.fill(step, step - 1, ahead=self.ahead if step < STEPS else 0))

    async def batches(self, cut_at=0, seconds=(), *, killed=False):
        """What each step decided. `seconds`: into step `cut_at`, one for each life that ends there; `killed`: after a
        save by time, else stopped."""
        state, decided = START, []
        sampler = self.sampler(state)
        for step in range(1, STEPS + 1):
            for second in seconds if step == cut_at else ():
                state = self.resume(self.load(step), await self.cut(sampler, step, second, state, killed=killed))
                sampler = self.sampler(state)
            batch = await self.fill(sampler, step)
            decided.append([[each.position for each in groups] for groups in (batch.kept, batch.filtered)])
            told = {each.position for each in batch.generated}
            missing = set(decided[-1][0] + decided[-1][1]) - told
            assert not missing or self.ahead or self.config.dynamic_sampling.max_staleness, "drawn in their own step"
            sampler.record_trained(batch.kept, step, step - 1)
            state = sampler.snapshot(step)
            folder = self.run_dir.path / f"step_{step}"
            folder.mkdir()
            save_progress(self.progress(step, state), folder)
            self.ledger.record(Event.CHECKPOINT, rollout_step=step, weight_version=step)
        await sampler.close()
        self.ledger.close()
        self.run_dir.close()
        return decided

    def progress(self, step, state):
        return Progress(rollout_step=step, optimizer_step=step, weight_version=step, sampler=state)

    def load(self, step):
        """The checkpoint before `step`."""
        return load_progress(self.run_dir.path / f"step_{step - 1}") if step > 1 else self.progress(0, START)

    async def cut(self, sampler, step, second, state, *, killed):
        """Ends a life in the middle of `step`. Returns the positions that were saved as finished."""
        before, filling = set(self.writers.made.elements()), self.fill(sampler, step)
        await asyncio.wait([filling], timeout=second)
        saved, made = sampler.under_way(), set(self.writers.made.elements()) - before
        there = {(each.position, by) for each, by in zip(saved.carried, saved.sent_with, strict=True)}
        assert filling.done() or made <= there, "given up when the batch was full"
        if killed:
            await asyncio.wait([filling], timeout=7)  # lost
        filling.cancel()
        await asyncio.wait([filling])
        await sampler.close()
        assert len(asyncio.all_tasks()) == 1, "no task is left behind"
        saved = saved if killed else sampler.under_way()
        self.run_dir.drop_rollout()
        self.run_dir.rollout.mkdir()
        save_progress(self.progress(step - 1, saved), self.run_dir.rollout)
        return {each.position for each in saved.carried}

    def resume(self, progress, finished):
        state = with_rollout(progress, self.run_dir, [], SimpleNamespace(note=lambda text: None))
        assert {each.position for each, _ in state.drawn} == finished
        continued = [*finished, *(each.position for each in state.unfinished)]
        at = {"rollout_step": progress.rollout_step, "weight_version": progress.weight_version}
        self.ledger.record(Event.RESUMED, **at, continued=continued)
        self.once = {key: count for key, count in self.writers.made.items() if key[0] in finished}
        return state


CUTS = [
    (0, {"max_staleness": 0}),
    (0, {"max_staleness": 0, "retire_for": 3}),
    (0, CARRYING | {"retire_for": 3}),
    (PROMPTS, {"max_staleness": 2}),
    (PROMPTS, {"max_staleness": 2, "retire_for": 2}),
    (PROMPTS, {"max_staleness": 1, "filter": "drop"}),
]


@pytest.mark.parametrize(
    ("ahead", "dynamic", "killed"),
    [
        # By default each setting once, by turns with either end.
        pytest.param(*cut, killed, marks=[] if killed == at % 2 else [pytest.mark.slow])
        for at, cut in enumerate(CUTS)
        for killed in (False, True)
    ],
    ids=str,
)
def test_a_rollout_that_is_cut_gives_the_batches_of_one_that_ran_through(tmp_path, ahead, dynamic, killed):
    whole = ran(Run(tmp_path / "whole", ahead, dynamic).batches())
    saved = 0
    for step in (1, 2, 5):
        for number, seconds in enumerate([(1,), (40,), (15, 30), (2, 1000)]):
            run = Run(tmp_path / f"{step}-{number}", ahead, dynamic)
            decided = ran(run.batches(step, seconds, killed=killed))
            assert decided == whole, (step, seconds)
            assert {key: run.writers.made[key] for key in run.once} == run.once, "what is saved is not drawn again"
            saved += len(run.once)
            events = read_ledger(run.run_dir.ledger)
            check_ledger(events)
            trained = [event["prompt"] for event in effective_events(events) if event["event"] == "trained"]
            assert trained == [position for batch in whole for position in batch[0]]
    assert saved > 50


def test_what_has_become_too_old_by_then_is_drawn_again(tmp_path):
    """A resume may lower `max_staleness`."""
    finished = tuple((group(at, 2, 5, version=at % 3), at % 3) for at in range(PROMPTS))
    run = Run(tmp_path / "run", 0, {"max_staleness": 1})
    batch = ran(run.sampler(replace(START, next=PROMPTS, drawn=finished)).fill(3, 2))
    drawn = {each.position for each in batch.generated if (each.position, 2) in run.writers.made}
    assert drawn & set(range(PROMPTS)) == {0, 3, 6}
    assert {each.weight_version for each in batch.kept} == {1, 2}


def test_what_a_stop_before_the_first_answer_finds_stays_as_it_was(tmp_path):
    """A resumed run that is stopped before it has sent anything again, and one that failed twice."""
    finished = tuple((group(at, 2, 5), 0) for at in range(3, 6))

    async def run():
        sampler = Run(tmp_path / "run", 0, {}).sampler(replace(START, drawn=finished))
        before = sampler.under_way()
        filling = asyncio.ensure_future(sampler.fill(1, 0))
        filling.cancel()  # it never begins
        await asyncio.wait([filling])
        return before, sampler.under_way()

    for state in ran(run()):
        assert [each.position for each in state.carried] == [3, 4, 5]
        assert state.sent_with == (0, 0, 0)
