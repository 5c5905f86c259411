"""How a run is asked to stop by a file, and what is on disk before it says that it is finished."""

import asyncio
import os
from types import SimpleNamespace

import psutil

from megatron_dapo.coordinator import run
from megatron_dapo.coordinator.run import export_model, stop_on_file


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


def test_one_that_was_there_before_the_process_is_of_an_earlier_run(tmp_path, monkeypatch):
    file = tmp_path / "stop"
    file.touch()
    os.utime(file, (psutil.Process().create_time() - 5,) * 2)
    assert not stopped_by(file, monkeypatch, appears=False)
    assert not file.exists()


def test_one_that_came_while_the_process_read_its_data_counts(tmp_path, monkeypatch):
    file = tmp_path / "stop"
    file.touch()
    assert stopped_by(file, monkeypatch, appears=False)


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
