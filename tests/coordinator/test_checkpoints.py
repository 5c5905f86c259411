"""Checkpoints beside the run: what counts when, what a failure does, what is left when a run ends."""

import asyncio
import json
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_dapo.algorithm.dynamic_sampling import PassRate
from megatron_dapo.cluster.trainer import Diverged, TrainerError, TrainerLost, TrainerStalled
from megatron_dapo.cluster.waits import Stalled, StopRequested, Waits
from megatron_dapo.config.run_config import RunConfig
from megatron_dapo.coordinator import checkpoints as module
from megatron_dapo.coordinator.checkpoints import Checkpoints, Progress, load_progress
from megatron_dapo.experience.groups import SamplerState
from megatron_dapo.storage.ledger import Event, Ledger, read_ledger
from megatron_dapo.storage.run_dir import RunDir


def progress(step: int) -> Progress:
    state = SamplerState(cursor=8 * step, pass_rate=PassRate.start(0.5), carried=())
    return Progress(rollout_step=step, optimizer_step=2 * step, weight_version=step, sampler=state)


class Ranks:
    """A trainer whose writers are done when the test says so."""

    def __init__(self) -> None:
        self.room = True
        self.written = asyncio.Event()
        self.failure: Exception | None = None
        self.under_way: Path | None = None

    async def save_checkpoint(self, folder: Path) -> None:
        if self.failure:
            raise self.failure
        folder.mkdir()

    async def begin_checkpoint(self, folder: Path) -> bool:
        assert self.under_way is None, "one copy at a time"
        self.under_way = folder
        if not self.room:
            self.written.set()
        return self.room

    async def checkpoint_finished(self) -> bool:
        if self.failure:
            raise self.failure
        if self.under_way is None:
            return True
        if not self.written.is_set():
            return False
        self.under_way.mkdir()
        self.under_way = None
        self.written.clear()
        return True


Test = Callable[[Checkpoints, Ranks, SimpleNamespace], Awaitable[None]]


@pytest.fixture
def run(tmp_path, monkeypatch):
    """`run(test, **keys)`: runs `test(checkpoints, ranks, around)` in a run directory. `clock`: what is taken for the
    time between checkpoints."""
    monkeypatch.setattr(module, "POLL_S", 0.001)
    run_dir = RunDir(tmp_path / "run", resume=False)
    ledger = Ledger(run_dir.ledger)
    notes: list[str] = []

    def start(test: Test, *, clock: Callable[[], float] = time.monotonic, **keys) -> SimpleNamespace:
        async def body() -> None:
            config = RunConfig(dir=str(tmp_path / "run"), rollout_steps=9, **keys)
            around.waits = Waits()
            ranks = Ranks()
            console = SimpleNamespace(note=notes.append)
            handover = SimpleNamespace(to_trainer=lambda: asyncio.sleep(0))
            parts = config, run_dir, ranks, handover, ledger, around.waits, console
            async with Checkpoints(*parts, clock=clock) as checkpoints:
                await test(checkpoints, ranks, around)

        around = SimpleNamespace(run_dir=run_dir, ledger=ledger, notes=notes)
        asyncio.run(body())
        return around

    yield start
    ledger.close()
    run_dir.close()


def steps(around: SimpleNamespace) -> list[int]:
    return [found.step for found in around.run_dir.checkpoints()]


async def some_polls() -> None:
    for _ in range(20):
        await asyncio.sleep(0.001)


def test_a_checkpoint_counts_once_it_is_written_and_its_event_stands_before(run):
    async def test(checkpoints, ranks, around):
        await (await checkpoints.begin(progress(1), wait=False))()
        await some_polls()
        assert steps(around) == []
        assert [event["event"] for event in read_ledger(around.run_dir.ledger)] == [Event.CHECKPOINT]
        assert around.waits.lines()[0].startswith("checkpoint of step 1: waiting for the trainer ranks' writers")
        ranks.written.set()
        await some_polls()
        assert steps(around) == [1]
        assert load_progress(around.run_dir.latest_checkpoint().folder) == progress(1)
        assert (around.run_dir.path / "checkpoints" / "latest").read_text() == "step_1\n"

    run(test)


def test_the_next_one_waits_for_the_one_under_way_and_the_oldest_goes_only_then(run):
    async def test(checkpoints, ranks, around):
        ranks.room = False
        await (await checkpoints.begin(progress(1), wait=False))()
        assert steps(around) == [1], "no room to copy: written before the run goes on"
        ranks.room = True
        await (await checkpoints.begin(progress(2), wait=False))()
        second = asyncio.create_task(checkpoints.begin(progress(3), wait=False))
        await some_polls()
        assert not second.done()
        assert steps(around) == [1], "the only whole one stays until the next is whole"
        ranks.written.set()
        await (await second)()
        assert steps(around) == [2]
        ranks.written.set()
        await checkpoints.finish()
        assert steps(around) == [3]

    run(test, keep_checkpoints=1)


def test_a_disk_that_is_slow_to_free_an_old_one_holds_up_nobody(run, monkeypatch):
    looked = []

    async def test(checkpoints, ranks, around):
        ranks.room, free = False, threading.Event()
        monkeypatch.setattr(around.run_dir, "keep_newest", lambda count: looked.append((count, free.wait(10))))
        published = asyncio.create_task((await checkpoints.begin(progress(1), wait=True))())
        while not steps(around):
            await asyncio.sleep(0.001)
        free.set()
        await published

    run(test, keep_checkpoints=3)
    assert looked == [(3, True)]


def test_the_config_and_the_last_step_wait_for_it(run):
    async def test(checkpoints, ranks, around):
        await (await checkpoints.begin(progress(4), wait=True))()
        assert steps(around) == [4]

    async def by_config(checkpoints, ranks, around):
        await (await checkpoints.begin(progress(5), wait=False))()
        assert steps(around) == [4, 5]

    run(test)
    run(by_config, checkpoint_in_background=False)


@pytest.mark.parametrize(
    ("minutes", "keys", "expected"),
    [
        (1, {}, [10, 20]),
        (7, {}, [8, 10, 18, 20]),
        (25, {}, [2, 4, 6, 8, 10, 12, 14, 16, 18, 20]),
        (30, {"checkpoint_every": 3}, [2, 3, 5, 6, 8, 9, 11, 12, 14, 15, 17, 18, 20]),
        (40, {}, list(range(1, 21))),
        (211, {"checkpoint_every": 0}, list(range(1, 21))),
        (25, {"checkpoint_every": 0, "checkpoint_minutes": 200}, [8, 16]),
        (211, {"checkpoint_minutes": 0}, [10, 20]),
        (211, {"checkpoint_every": 0, "checkpoint_minutes": 0}, []),
    ],
)
def test_a_lost_job_costs_no_more_than_the_minutes_or_one_step_and_only_the_newest_stay(run, minutes, keys, expected):
    now, due = [0.0], []

    async def test(checkpoints, ranks, around):
        saved = 0.0
        for step in range(1, 21):
            now[0] += 60 * minutes
            cost = now[0] - saved  # of a job that is lost here, before this step is saved
            assert not (most := 60 * keys.get("checkpoint_minutes", 60)) or cost <= max(most, 60 * minutes)
            if checkpoints.due(step):
                due.append(step)
                saved = now[0]
                await (await checkpoints.begin(progress(step), wait=True))()
                assert steps(around) == due[-2:]

    run(test, clock=lambda: now[0], **keys)
    assert due == expected


def test_steps_that_become_longer_are_saved_one_step_later_at_the_latest(run):
    now = [0.0]

    async def test(checkpoints, ranks, around):
        due = []
        for step, minutes in enumerate((20, 20, 35, 35, 10, 10, 10, 10, 10, 10), 1):
            now[0] += 60 * minutes
            if checkpoints.due(step):
                due.append(step)
                await (await checkpoints.begin(progress(step), wait=True))()
        assert due == [3, 4, 10], "after 75, 35 and 60 minutes"

    run(test, clock=lambda: now[0])


def test_what_stands_between_two_steps_is_kept_once(run):
    async def test(checkpoints, ranks, around):
        await checkpoints.save(progress(0))
        assert steps(around) == []
        await (await checkpoints.begin(progress(1), wait=False))()
        ranks.written.set()
        await checkpoints.save(progress(1))
        assert steps(around) == [1]
        await checkpoints.save(progress(2))
        assert steps(around) == [1, 2]
        events = [event["rollout_step"] for event in read_ledger(around.run_dir.ledger)]
        assert events == [1, 2]

    run(test)


@pytest.mark.parametrize(
    ("error", "kept"),
    [
        (StopRequested(), True),
        (Stalled("the servers"), True),
        (TrainerStalled("the ranks"), False),
        (TrainerLost("a rank"), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_stood_before_a_step_that_fails_is_saved_unless_the_trainer_cannot(run, error, kept):
    """A trainer that does not answer would be waited for a second time."""

    async def test(checkpoints, ranks, around):
        async with checkpoints.kept_on_failure(progress(1), lambda: progress(1).sampler):
            raise error

    with pytest.raises(type(error)):
        run(test)
    assert steps(run(lambda *_: asyncio.sleep(0))) == ([1] if kept else [])


@pytest.mark.parametrize(
    ("error", "raised"), [(StopRequested(), TrainerError), (Stalled("the servers"), Stalled)], ids=["stop", "error"]
)
def test_a_stop_whose_save_fails_is_no_stop_and_an_error_stays_what_it_is(run, error, raised):
    """Exit code 75 promises that everything is saved, and sends a batch job back into the queue."""

    async def test(checkpoints, ranks, around):
        ranks.failure = FULL
        async with checkpoints.kept_on_failure(progress(1), lambda: progress(1).sampler):
            raise error

    with pytest.raises(raised):
        run(test)
    left = run(lambda *_: asyncio.sleep(0))
    assert steps(left) == []
    assert len(left.notes) == (raised is Stalled)


FULL = TrainerError("trainer finish_checkpoint failed\n  rank 0: No space left on device")


def test_a_writer_that_fails_ends_whatever_the_run_waits_for_and_earlier_ones_stand(run):
    """As over a full disk; the error is said once."""

    async def test(checkpoints, ranks, around):
        await (await checkpoints.begin(progress(1), wait=True))()
        await (await checkpoints.begin(progress(2), wait=False))()
        ranks.failure = FULL
        await around.waits.wait_for("batch of groups", "rollout servers", 60, asyncio.Event().wait())

    with pytest.raises(TrainerError, match="No space left"):
        run(test)
    left = run(lambda *_: asyncio.sleep(0))
    assert steps(left) == [1]
    assert left.notes == []


@pytest.mark.parametrize(
    ("error", "kept"),
    [
        (StopRequested(), True),
        (Stalled("the servers"), True),
        (Diverged("the loss is nan"), True),
        (OSError("metrics.jsonl: full"), True),
        (TrainerLost("a rank"), False),
        (asyncio.CancelledError(), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_error_ends_the_run_after_the_checkpoint_under_way_unless_it_cannot_end(run, error, kept):
    async def test(checkpoints, ranks, around):
        await (await checkpoints.begin(progress(1), wait=False))()
        asyncio.get_running_loop().call_later(0.05, ranks.written.set)
        raise error

    with pytest.raises(type(error)):
        run(test)
    left = run(lambda *_: asyncio.sleep(0))
    assert steps(left) == ([1] if kept else [])
    assert bool(left.notes) is not kept, "a checkpoint that is lost is said to be"


def test_a_writer_that_never_ends_is_named(run, monkeypatch):
    async def test(checkpoints, ranks, around):
        await (await checkpoints.begin(progress(1), wait=False))()
        await around.waits.wait_for("batch of groups", "rollout servers", 60, asyncio.Event().wait())

    with pytest.raises(Stalled, match=r"checkpoint of step 1: the trainer ranks' writers gave no answer within 0\.1 s"):
        run(test, step_deadline_s=0.05)


def test_what_a_kill_left_half_written_goes_with_the_next_save(run):
    async def test(checkpoints, ranks, around):
        folder = around.run_dir.path / "checkpoints"
        for name in (".step_7.tmp", ".step_3.removed"):
            (folder / name / "actor.partial").mkdir(parents=True)
        await (await checkpoints.begin(progress(8), wait=True))()
        assert sorted(path.name for path in folder.iterdir()) == ["latest", "step_8"]
        assert json.loads((folder / "step_8" / "progress.json").read_text().splitlines()[0])["extra"]["cursor"] == 64

    run(test)
