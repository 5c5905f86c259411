"""When what a rollout has is saved, what a resume then finds, and when it may not use it."""

import asyncio
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from megatron_dapo.algorithm.dynamic_sampling import PassRate
from megatron_dapo.cluster.trainer import Diverged, TrainerLost, TrainerStalled
from megatron_dapo.cluster.waits import Stalled, StopRequested
from megatron_dapo.coordinator import checkpoints as module
from megatron_dapo.coordinator.batch import MismatchStop
from megatron_dapo.coordinator.checkpoints import load_progress, with_rollout
from megatron_dapo.coordinator.sampler import NothingKept, OversamplingLimit
from megatron_dapo.experience.groups import SamplerState, unjudged
from megatron_dapo.storage.run_dir import RunDir
from rollout.errors import FleetLost
from tests.coordinator.test_checkpoints import FULL, progress, run, steps  # noqa: F401 - a fixture
from tests.coordinator.test_sampler import group

BEGIN = progress(1)


def begun(position, version=0):
    whole = group(position, 2, 7, version)
    return replace(whole, responses=tuple(unjudged(one.generation) for one in whole.responses))


def look(finished=3):
    """A rollout with so many finished groups, and one that was begun."""
    carried = tuple(group(at, 2, 5) for at in range(finished))
    state = replace(BEGIN.sampler, carried=carried, sent_with=(0,) * finished, unfinished=(begun(finished),))
    return lambda: state


def found(run_dir, at=BEGIN, changes=()):
    """(positions finished, positions begun, notes) of a resume from `at`."""
    notes = []
    state = with_rollout(at, run_dir, changes, SimpleNamespace(note=notes.append))
    assert state.cursor == at.sampler.cursor
    if state is at.sampler:  # as a run does once everything has started
        run_dir.drop_rollout()
    return [each.position for each, _ in state.drawn], [each.position for each in state.unfinished], notes


def test_nothing_is_found_where_nothing_was_saved(tmp_path):
    run_dir = RunDir(tmp_path / "run", resume=False)
    assert found(run_dir) == ([], [], [])
    run_dir.close()


@pytest.mark.parametrize(
    "error",
    [StopRequested(), Stalled("the servers"), FleetLost("all"), TrainerStalled("the ranks"), TrainerLost("a rank")],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("step", [0, 1])
def test_a_rollout_that_ends_early_is_found_by_a_resume_from_the_checkpoint_before_it(run, error, step):  # noqa: F811
    """Also without a trainer, and before the first checkpoint."""

    async def test(checkpoints, ranks, around):
        if step:
            await (await checkpoints.begin(BEGIN, wait=True))()
        async with checkpoints.kept_on_failure(progress(step), look()):
            raise error

    with pytest.raises(type(error)):
        run(test)
    left = run(lambda *_: asyncio.sleep(0))
    assert steps(left) == [1] * step
    finished, unfinished, notes = found(left.run_dir, progress(step))
    assert (finished, unfinished) == ([0, 1, 2], [3])
    assert notes == ["its rollout goes on: 3 groups are finished, 1 begun"]
    assert left.run_dir.ledger.stat().st_size or not step, "the directory holds a run"


@pytest.mark.parametrize("error", [TrainerLost("a rank"), StopRequested()], ids=["no trainer", "full disk"])
def test_without_its_checkpoint_it_is_not_saved(run, error):  # noqa: F811
    async def test(checkpoints, ranks, around):
        ranks.failure = FULL
        async with checkpoints.kept_on_failure(BEGIN, look()):
            raise error

    with pytest.raises(type(FULL)):
        run(test)
    assert not run(lambda *_: asyncio.sleep(0)).run_dir.rollout.exists()


def test_an_update_that_fails_costs_no_rollout(run):  # noqa: F811
    async def test(checkpoints, ranks, around):
        await (await checkpoints.begin(BEGIN, wait=True))()
        ranks.failure = AssertionError("the weights are others by now")
        async with checkpoints.kept_on_failure(BEGIN, look(), updating=True):
            raise Diverged("the loss is nan")

    with pytest.raises(Diverged):
        run(test)
    assert found(run(lambda *_: asyncio.sleep(0)).run_dir)[0] == [0, 1, 2]


def test_a_long_rollout_is_saved_by_time_one_save_at_a_time_while_the_run_goes_on(run, monkeypatch):  # noqa: F811
    monkeypatch.setattr(module, "POLL_S", 0.001)
    busy, save = threading.Lock(), module.save_progress
    saves, turns = [], [0]

    def slowly(progress, folder):
        assert busy.acquire(blocking=False), "two saves at a time"
        time.sleep(0.05)
        saves.append(len(progress.sampler.carried))
        save(progress, folder)
        busy.release()

    async def rollout(around):
        while len(saves) < 3:
            turns[0] += 1
            await asyncio.sleep(0.001)
            for line in around.waits.lines():
                assert line.startswith("save of the rollout: waiting for the disk of run.dir for 0 of")
        raise StopRequested

    async def test(checkpoints, ranks, around):
        await (await checkpoints.begin(BEGIN, wait=True))()
        monkeypatch.setattr(module, "save_progress", slowly)
        async with checkpoints.kept_on_failure(BEGIN, lambda: look(turns[0])()):
            await rollout(around)

    with pytest.raises(StopRequested):
        run(test, checkpoint_minutes=0.0005)
    left = run(lambda *_: asyncio.sleep(0))
    assert saves == sorted(saves)
    assert len(saves) >= 4
    assert turns[0] > 20, "the loop turned meanwhile"
    assert len(found(left.run_dir)[0]) == saves[-1] == turns[0], "the last one counts"
    assert not left.notes


def test_it_is_saved_only_when_the_minutes_since_the_checkpoint_have_passed(run):  # noqa: F811
    now = [0.0]

    async def test(checkpoints, ranks, around):
        await (await checkpoints.begin(BEGIN, wait=True))()
        for minutes, there in ((0, False), (59, False), (60, True), (61, False), (119, False), (120, True)):
            now[0] = 60.0 * minutes
            around.run_dir.drop_rollout()
            async with checkpoints.kept_on_failure(BEGIN, look()):
                if there:
                    while not around.run_dir.rollout.exists():
                        await asyncio.sleep(0.001)
                else:
                    await asyncio.sleep(0.05)
            assert around.run_dir.rollout.exists() == there, minutes

    run(test, clock=lambda: now[0])


def test_a_save_that_fails_is_noted_and_leaves_the_one_before(run, monkeypatch):  # noqa: F811
    def full(progress, folder):
        raise OSError(28, "No space left on device", str(folder))

    async def test(checkpoints, ranks, around):
        await (await checkpoints.begin(BEGIN, wait=True))()
        with pytest.raises(StopRequested):
            async with checkpoints.kept_on_failure(BEGIN, look(2)):
                raise StopRequested
        with monkeypatch.context() as broken:
            broken.setattr(module, "save_progress", full)
            with pytest.raises(FleetLost):
                async with checkpoints.kept_on_failure(BEGIN, look(5)):
                    raise FleetLost("why the run ends")
            with pytest.raises(OSError, match="No space left"):
                async with checkpoints.kept_on_failure(BEGIN, look(5)):
                    raise StopRequested  # "stopped" would say that it is saved
        assert found(around.run_dir)[0] == [0, 1]

    (note,) = run(test).notes
    assert "could not be saved (OSError: [Errno 28] No space left on device: " in note


def test_a_disk_that_does_not_answer_has_a_deadline(run, monkeypatch):  # noqa: F811
    awake = threading.Event()
    monkeypatch.setattr(module, "save_progress", lambda *_: awake.wait(60))

    async def test(checkpoints, ranks, around):
        with pytest.raises(Stalled, match=r"the disk of run\.dir took over 0\.1 s"):
            async with checkpoints.kept_on_failure(progress(0), look()):
                raise StopRequested  # "stopped" would say that it is saved
        awake.set()

    run(test, step_deadline_s=0.1)


@pytest.fixture
def saved(run):  # noqa: F811
    """A run directory with a checkpoint after step 1, and a rollout that goes on from it."""

    async def test(checkpoints, ranks, around):
        await (await checkpoints.begin(BEGIN, wait=True))()
        async with checkpoints.kept_on_failure(BEGIN, look()):
            raise StopRequested

    with pytest.raises(StopRequested):
        run(test)
    return run(lambda *_: asyncio.sleep(0)).run_dir


def test_a_later_checkpoint_ends_it(saved, run):  # noqa: F811
    async def test(checkpoints, ranks, around):
        await (await checkpoints.begin(progress(2), wait=True))()

    run(test)
    assert not saved.rollout.exists()
    saved.go_back_to(1)
    assert found(saved) == ([], [], []), "a resume from an earlier step draws anew"


@pytest.mark.parametrize("at", [0, 2])
def test_it_belongs_to_one_step(saved, at):
    finished, begun_, (note,) = found(saved, progress(at))
    assert (finished, begun_) == ([], [])
    assert "other weights drew it" in note
    assert found(saved) == ([], [], []), "nor may a run that comes there again, with other weights, use it"


JUDGED = [
    "reward.verifier",
    "reward.by_source",
    "reward.remote.url",
    "algorithm.overlong.buffer",
    "data.verifier_key",
    "data.path",
]
LIMITS = ["reward.remote.deadline_s", "reward.timeout_s", "reward.memory_mb", "reward.workers", "data.broken_rows"]


@pytest.mark.parametrize("key", LIMITS)
def test_a_limit_that_is_raised_costs_no_token(saved, key):
    assert found(saved, changes=[f"{key} = 1 from here on; the run in run had 2"])[0] == [0, 1, 2]


@pytest.mark.parametrize("key", JUDGED)
def test_what_was_judged_by_other_rules_is_drawn_again(saved, key):
    line = "= 1 from here on; the run in run had 2"
    assert found(saved, changes=[f"rollout.memory_fraction {line}", f"algorithm.clip.high {line}"])[0] == [0, 1, 2]
    assert "other rules judged it" in found(saved, changes=[f"{key} {line}"])[2][0]
    assert not saved.rollout.exists()


@pytest.mark.parametrize("name", ["progress.json", "progress.npz", "unfinished.npz"])
@pytest.mark.parametrize("how", ["flipped", "cut", "gone"])
def test_a_damaged_one_is_said_to_be_and_nothing_else_is_lost(saved, name, how):
    file = saved.rollout / name
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content if how == "flipped" else content[:-100])
    if how == "gone":
        file.unlink()
    finished, begun_, (note,) = found(saved)
    assert (finished, begun_) == ([], [])
    assert name.partition(".")[0] in note
    assert note.endswith("this rollout is drawn again, and nothing else is lost")
    assert load_progress(saved.latest_checkpoint().folder) == BEGIN


def test_tokens_of_weights_that_are_lost_are_left_out(run):  # noqa: F811
    """`async`: the servers may have had the step's new weights when it failed, which a resume computes again."""
    newer = group(2, 2, 5, 1)
    newer = replace(newer.responses[0].generation, weight_versions=np.full(5, 2, np.int32))
    late = replace(group(2, 2, 5, 1).responses[0], generation=newer)
    of_both = replace(group(2, 2, 5, 1), responses=(late, *group(2, 2, 5, 1).responses[1:]))
    carried = (group(0, 2, 5, 1), group(1, 2, 5, 0), of_both)
    state = SamplerState(cursor=8, pass_rate=PassRate.start(0.5), carried=carried, sent_with=(1, 0, 1))
    state = replace(state, unfinished=(begun(3, 1), begun(4, 2)))

    async def test(checkpoints, ranks, around):
        await (await checkpoints.begin(BEGIN, wait=True))()
        async with checkpoints.kept_on_failure(BEGIN, lambda: state, updating=True):
            raise FleetLost("in the publish")

    with pytest.raises(FleetLost):
        run(test)
    assert found(run(lambda *_: asyncio.sleep(0)).run_dir)[:2] == ([0, 1], [3])


@pytest.mark.parametrize(
    ("error", "kept"),
    [
        (MismatchStop("the servers do not hold the trainer's model"), False),
        (NothingKept("a verifier that judged all wrong, and is repaired"), False),
        (OversamplingLimit("raise the limit"), True),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_would_stop_the_next_run_too_is_not_kept(saved, run, error, kept):  # noqa: F811
    async def test(checkpoints, ranks, around):
        async with checkpoints.kept_on_failure(BEGIN, look(5)):
            raise error

    with pytest.raises(type(error)):
        run(test)
    assert saved.rollout.exists() is kept
