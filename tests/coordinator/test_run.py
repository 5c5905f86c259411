"""How a run is asked to stop by a file, how often it begins again, and what is on disk before it says that it ended."""

import asyncio
import errno
import os
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_dapo.cluster.placement import PlacementError
from megatron_dapo.cluster.trainer import TrainerLost
from megatron_dapo.config import load_config
from megatron_dapo.coordinator import run
from megatron_dapo.coordinator.run import export_model, stop_on_file
from megatron_dapo.data.prompts import read_prompts
from megatron_dapo.data.records import heldout_files
from megatron_dapo.monitor.timeline import PHASES, StepTimer
from megatron_dapo.report.source import Run
from megatron_dapo.storage.run_dir import RunDir
from tests.processes import ROOT


def stopped_by(file, monkeypatch, *, appears: bool) -> bool:
    """Whether a run that begins now is asked to stop soon."""
    monkeypatch.setattr(run, "STOP_FILE_INTERVAL_S", 0.01)

    async def test():
        stop = asyncio.get_running_loop().create_future()
        watching = asyncio.create_task(stop_on_file(file, stop, SimpleNamespace(note=lambda line: None)))
        await asyncio.sleep(0.05)
        if appears:
            file.touch()
        await asyncio.wait([stop], timeout=0.3)
        watching.cancel()
        return stop.done()

    return asyncio.run(test())


def test_a_file_that_appears_stops_the_run(tmp_path, monkeypatch):
    assert stopped_by(tmp_path / "stop", monkeypatch, appears=True)


def test_a_share_that_gives_no_answer_once_does_not_end_the_look(tmp_path, monkeypatch):
    asked, real = [], os.stat

    def stat(path, *args, **options):
        if Path(path) == tmp_path / "stop" and not asked:
            asked.append(path)
            raise OSError(errno.ESTALE, "Stale file handle")
        return real(path, *args, **options)

    monkeypatch.setattr(os, "stat", stat)
    assert stopped_by(tmp_path / "stop", monkeypatch, appears=True)
    assert asked


def test_the_time_limits_warning_is_not_called_the_users_file(tmp_path, monkeypatch):
    notes = []

    async def test():
        (tmp_path / "stop").write_text("7\n")
        stop = asyncio.get_running_loop().create_future()
        await stop_on_file(tmp_path / "stop", stop, SimpleNamespace(note=notes.append))

    asyncio.run(test())
    assert notes == ["Slurm's warning before the time limit: stopping; what was trained is saved first"]


def test_one_that_came_while_the_process_read_its_data_counts(tmp_path, monkeypatch):
    file = tmp_path / "stop"
    file.touch()
    assert stopped_by(file, monkeypatch, appears=False)


def test_where_nothing_is_held_out_nothing_is_asked_and_the_summary_says_so(tmp_path, monkeypatch):
    """`tmp_path` without metrics: no step was made."""

    async def no_steps(context, progress):
        return progress

    monkeypatch.setattr(run, "train", no_steps)
    config = load_config(ROOT / "examples" / "quickstart" / "dapo.yaml", ["evaluation.path=null"])
    config = replace(config, run=replace(config.run, export_at_end=False))
    heldout = read_prompts(heldout_files(config.data, config.evaluation), config.data, None, None)
    assert heldout.summary() == "none (evaluation.path is not set)"
    folder = RunDir(tmp_path / "run", resume=False)
    state = SimpleNamespace(rollout_step=0, optimizer_step=0)
    drawn = []
    writer = SimpleNamespace(show=lambda at, figures: drawn.append(figures))
    context = SimpleNamespace(
        config=config,
        console=None,
        progress=state,
        run_dir=folder,
        inputs=SimpleNamespace(heldout=heldout),
        writer=writer,
    )
    summary = asyncio.run(run._measure_and_train(context, StepTimer(), 0.0))
    folder.write_json("summary.json", summary)
    folder.close()
    assert summary["heldout"] == {"before": None, "baseline": None, "after": None}
    assert summary["examples"] == []
    assert not any(drawn)
    shown = Run(tmp_path / "run")
    assert (shown.held_out, shown.notes[1:]) == ({}, [])


def test_a_resumed_runs_total_holds_the_steps_of_earlier_starts(tmp_path, monkeypatch):
    async def two_more_steps(context, progress):
        return SimpleNamespace(rollout_step=4, optimizer_step=4)

    monkeypatch.setattr(run, "train", two_more_steps)
    monkeypatch.setattr(time, "monotonic", lambda: 20.0)
    timer = StepTimer()
    monkeypatch.setattr(time, "monotonic", lambda: 130.0)
    config = load_config(ROOT / "examples" / "quickstart" / "dapo.yaml", ["evaluation.path=null"])
    config = replace(config, run=replace(config.run, export_at_end=False))
    heldout = read_prompts(heldout_files(config.data, config.evaluation), config.data, None, None)
    folder = RunDir(tmp_path / "run", resume=False)
    folder.write_json(run.BEFORE, {"before": {}, "baseline": None})
    phases = {f"timing/{phase}": 0.0 for phase in PHASES} | {"timing/step": 50.0, "timing/update": 40.0}
    lines = [{"rollout_step": step, **phases} for step in (1, 2, 3, 4)]
    lines = [line | {"tokens/generated": 1, "tokens/trained": 1} for line in lines]
    monkeypatch.setattr(run, "read_metrics", lambda path: lines)
    context = SimpleNamespace(
        config=config,
        progress=SimpleNamespace(rollout_step=2, optimizer_step=2),
        run_dir=folder,
        inputs=SimpleNamespace(heldout=heldout),
        writer=SimpleNamespace(show=lambda at, figures: None),
    )
    seconds = asyncio.run(run._measure_and_train(context, timer, 0.0))["seconds"]
    assert (seconds["total"], seconds["update"]) == (2 * 50 + 110, 4 * 40), "no status.json tells of them"
    longer = asyncio.run(run._measure_and_train(context, timer, 400.0))["seconds"]
    folder.close()
    assert longer["total"] == 400 + 110, "with starts, evaluations and steps that were lost"


def test_the_exported_model_and_its_name_are_on_disk_before_the_run_goes_on(tmp_path, monkeypatch):
    synced, sync = set(), os.fsync

    def fsync(descriptor):
        synced.add(os.readlink(f"/proc/self/fd/{descriptor}"))
        sync(descriptor)

    async def export_hf(folder):
        (folder / "below").mkdir(parents=True)
        for name in ("model.safetensors", "below/tokenizer.json"):
            (folder / name).write_text("x")

    monkeypatch.setattr(os, "fsync", fsync)

    async def to_trainer():
        pass

    context = SimpleNamespace(
        handover=SimpleNamespace(to_trainer=to_trainer),
        trainer=SimpleNamespace(export_hf=export_hf),
        run_dir=SimpleNamespace(path=tmp_path),
    )
    asyncio.run(export_model(context))
    names = ("", "model", "model/below", "model/model.safetensors", "model/below/tokenizer.json")
    assert synced == {str(tmp_path / name) for name in names}


@pytest.mark.parametrize(
    ("allowed", "newest", "begun"),
    [
        (0, [5, 5], [False]),
        (3, [5, 5, 5, 5, 5], [False, True, True, True]),
        (3, [0, 0, 0, 0, 0], [False, True, True, True]),
        (2, [0, 0, 4, 4, 4], [False, True, True, True]),
        (1, [0, 1, 2, 3, 3], [False, True, True, True]),
    ],
    ids=["never", "three times", "three times from the beginning", "two of each checkpoint", "one of each checkpoint"],
)
def test_lost_ranks_restart_a_run_so_often_without_a_new_checkpoint_as_the_config_says(
    allowed, newest, begun, monkeypatch
):
    """`newest`: checkpoints at the start and at each loss."""
    resumed, seen = [], iter(newest)

    async def lost(config, inputs, console, stop):
        resumed.append(config.run.resume)
        raise TrainerLost("rank 0: its process ended")

    monkeypatch.setattr(run, "run", lost)
    monkeypatch.setattr(run, "newest_step", lambda path: next(seen))
    config = load_config(ROOT / "examples" / "quickstart" / "dapo.yaml", [f"run.max_restarts={allowed}"])
    with pytest.raises(TrainerLost):
        asyncio.run(run.run_with_restarts(config, None, SimpleNamespace(note=lambda line: None), None))
    assert resumed == begun


@pytest.mark.parametrize(("left_s", "begun"), [(60.0, 4), (1e-9, 2)], ids=["in time", "too late"])
def test_the_place_of_a_lost_rank_may_come_back(left_s, begun, monkeypatch):
    starts, notes = [], []

    async def started(config, inputs, console, stop):
        starts.append(config.run.resume)
        if len(starts) == 1:
            raise TrainerLost("rank 0: its process ended")
        if len(starts) < 4:
            raise PlacementError("no node has room for a group of ranks")
        return {"rollout_steps": 5}

    monkeypatch.setattr(run, "run", started)
    monkeypatch.setattr(run, "newest_step", lambda path: 0)
    monkeypatch.setattr(run, "PLACE_AGAIN_S", 0.01)
    config = load_config(ROOT / "examples" / "quickstart" / "dapo.yaml")
    config = replace(config, run=replace(config.run, start_deadline_s=left_s))

    async def whole():
        stop = asyncio.get_running_loop().create_future()
        return await run.run_with_restarts(config, None, SimpleNamespace(note=notes.append), stop)

    if begun < 4:
        with pytest.raises(PlacementError):
            asyncio.run(whole())
    else:
        assert asyncio.run(whole()) == {"rollout_steps": 5}
        assert "looking again" in notes[-1]
    assert starts == [False, *[True] * (begun - 1)]


def test_a_first_start_without_room_ends_at_once(monkeypatch):
    async def started(config, inputs, console, stop):
        raise PlacementError("no node has room for a group of ranks")

    monkeypatch.setattr(run, "run", started)
    config = load_config(ROOT / "examples" / "quickstart" / "dapo.yaml")
    with pytest.raises(PlacementError):
        asyncio.run(run.run_with_restarts(config, None, SimpleNamespace(note=print), None))


def test_what_fails_while_a_run_is_closed_does_not_hide_why_it_ended():
    """A lost rank is what a run begins again after."""
    said = []

    async def ends(error, fault):
        async with run._Closing(SimpleNamespace(aside=said.append)) as stack:

            def close():
                raise fault

            stack.callback(close)
            if error:
                raise error

    with pytest.raises(TrainerLost):
        asyncio.run(ends(TrainerLost("rank 0: its process ended"), OSError("disk full")))
    assert said == ["while the run was closed: OSError: disk full"]
    with pytest.raises(OSError, match="disk full"):
        asyncio.run(ends(None, OSError("disk full")))
