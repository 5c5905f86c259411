"""What a step that fails before it has changed any weights leaves behind."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_dapo.cluster.trainer import Trainer, TrainerError, TrainerLost, TrainerStalled
from megatron_dapo.cluster.waits import Stalled, StopRequested, Waits
from megatron_dapo.config.monitor_config import MonitorConfig
from megatron_dapo.coordinator import loop
from megatron_dapo.monitor.health import HealthLimits, HealthMonitor
from megatron_dapo.monitor.timeline import Timeline
from megatron_dapo.monitor.writer import MetricsWriter

PROGRESS = SimpleNamespace(rollout_step=1)


@pytest.mark.parametrize(
    ("error", "saves"),
    [
        (StopRequested(), True),
        (Stalled("the servers"), True),
        (TrainerStalled("the ranks"), False),
        (TrainerLost("a rank"), False),
    ],
)
def test_what_was_reached_is_saved_unless_the_trainer_cannot(monkeypatch, tmp_path, error, saves):
    saved = []

    async def keep(progress):
        saved.append(progress)

    async def turn():
        saved.append("the trainer's turn")

    parts = failing(monkeypatch, tmp_path, error, keep, turn)
    with pytest.raises(type(error)):
        asyncio.run(loop.train(parts, PROGRESS))
    expected = ["the trainer's turn", PROGRESS] if saves else []
    assert saved == expected, "a trainer that does not answer would be waited for a second time"


@pytest.mark.parametrize(
    ("error", "raised"), [(StopRequested(), TrainerError), (Stalled("the servers"), Stalled)], ids=["stop", "error"]
)
def test_a_stop_whose_save_fails_is_no_stop_and_an_error_stays_what_it_is(monkeypatch, tmp_path, error, raised):
    """Exit code 75 promises that everything is saved, and sends a batch job back into the queue."""
    noted = []

    async def keep(progress):
        raise TrainerError("the checkpoint could not be written: no space left on device")

    async def turn():
        pass

    parts = failing(monkeypatch, tmp_path, error, keep, turn)
    parts.console = SimpleNamespace(note=noted.append)
    with pytest.raises(raised):
        asyncio.run(loop.train(parts, PROGRESS))
    assert len(noted) == (raised is Stalled)


@pytest.mark.parametrize(("gap", "alarms"), [(0.2, []), (0.4, ["alarm: mismatch:"]), (2.0, ["alarm: mismatch_stop:"])])
def test_an_alarm_is_noted_at_the_step_that_raises_it(monkeypatch, tmp_path, gap, alarms):
    noted: list[str] = []
    monkeypatch.setattr(
        loop, "step_metrics", lambda *_: {"rollout_step": 1, "optimizer_step": 4, "mismatch/mean_abs": gap}
    )
    monkeypatch.setattr(loop, "write_samples", lambda *_: None)
    writer = MetricsWriter(tmp_path, tensorboard=False)
    parts = SimpleNamespace(
        config=SimpleNamespace(monitor=MonitorConfig()),
        writer=writer,
        health=HealthMonitor(limits=HealthLimits(mismatch_warn=0.3, mismatch_stop=0.5)),
        run_dir=SimpleNamespace(path=tmp_path),
        console=SimpleNamespace(note=noted.append),
        inputs=SimpleNamespace(prompts=SimpleNamespace(prompts=[])),
    )
    loop.write_records(parts, record=SimpleNamespace())
    writer.close()
    assert [" ".join(line.split()[:2]) for line in noted] == alarms


def failing(monkeypatch, tmp_path, error, keep, turn) -> SimpleNamespace:
    """Parts of a run whose next batch fails with `error`."""

    async def fail(*_):
        raise error

    monkeypatch.setattr(loop, "fill_batch", fail)
    return SimpleNamespace(
        config=SimpleNamespace(run=SimpleNamespace(rollout_steps=2)),
        checkpoints=SimpleNamespace(keep=keep),
        timeline=Timeline(tmp_path, every=0),
        services=SimpleNamespace(turns=SimpleNamespace(trainer=turn)),
    )


def test_ranks_that_do_not_answer_in_time_are_told_apart_from_other_stalls():
    async def test():
        trainer = Trainer(None, None, Path(), Waits(), use_gpu=False)
        never = asyncio.get_running_loop().create_future()
        with pytest.raises(TrainerStalled, match=r"trainer update: 1 trainer rank\(s\) gave no answer within 0.05 s"):
            await trainer._ask("trainer update", 0.05, [never])

    asyncio.run(test())
