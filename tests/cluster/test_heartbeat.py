"""The sign of life of a run: waits while it lives, the way it ended, errors that outlive a restart."""

import asyncio
import json
import os
import socket
from dataclasses import asdict
from types import SimpleNamespace

import pytest

from megatron_dapo.cluster import heartbeat as module
from megatron_dapo.cluster.heartbeat import Heartbeat, heartbeat, read_heartbeat, refuse_live_elsewhere
from megatron_dapo.cluster.waits import StopRequested, Waits
from megatron_dapo.monitor.console import Console, Count
from megatron_dapo.storage.run_dir import RunDir, RunDirError


@pytest.fixture
def run_dir(tmp_path):
    folder = RunDir(tmp_path / "run", resume=False)
    yield folder
    folder.close()


def live(run_dir, body, steps=7):
    async def run():
        waits = Waits()
        async with heartbeat(run_dir.path, waits, steps, Console()):
            await body(waits)

    asyncio.run(run())


async def nothing(waits):
    pass


def test_open_waits_are_written_while_they_last(run_dir, monkeypatch):
    monkeypatch.setattr(module, "INTERVAL_S", 0.01)
    seen = []

    async def body(waits):
        with waits.register("batch of groups", "rollout servers", 60.0):
            await asyncio.sleep(0.05)
            seen.append(read_heartbeat(run_dir.path))
        await asyncio.sleep(0.05)
        seen.append(read_heartbeat(run_dir.path))

    live(run_dir, body)
    during, after = seen
    assert during.waits == ["batch of groups: waiting for rollout servers for 0 of 60 s"]
    assert (during.state, during.pid, during.rollout_steps) == ("running", os.getpid(), 7)
    assert after.waits == []
    assert after.written > during.written


def test_the_newest_note_is_written_while_the_run_waits(run_dir, monkeypatch):
    """A server that is started again looks like any other wait, but for what the run has said of it."""
    monkeypatch.setattr(module, "INTERVAL_S", 0.01)

    async def run():
        console = Console()
        async with heartbeat(run_dir.path, Waits(), 7, console):
            console.note("prompts: 12")
            console.note("server http://a is down: its process ended; restarting it")
            await asyncio.sleep(0.05)
            return read_heartbeat(run_dir.path).note

    assert asyncio.run(run()) == "server http://a is down: its process ended; restarting it"


@pytest.mark.parametrize(
    ("error", "state", "text"),
    [
        (None, "finished", None),
        (StopRequested(), "stopped", None),
        (asyncio.CancelledError(), "ended", None),
        (ValueError("no more\ndisk"), "failed", "ValueError: no more\ndisk"),
    ],
)
def test_the_end_is_written_and_the_error_goes_on(run_dir, error, state, text):
    async def body(waits):
        if error:
            raise error

    if error:
        with pytest.raises(type(error)):
            live(run_dir, body)
    else:
        live(run_dir, body)
    beat = read_heartbeat(run_dir.path)
    assert (beat.state, beat.error) == (state, text)


def test_an_error_outlives_the_next_start(run_dir):
    async def fail(waits):
        raise ValueError("first")

    with pytest.raises(ValueError, match="first"):
        live(run_dir, fail)
    live(run_dir, nothing)
    beat = read_heartbeat(run_dir.path)
    assert beat.state == "finished"
    assert beat.error == "ValueError: first"
    assert beat.error_at < beat.started


def test_a_disk_that_cannot_be_written_does_not_end_the_run(run_dir, monkeypatch):
    def full(name, content, **_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run_dir, "write_json", full)
    live(run_dir, nothing)


def test_it_is_never_read_half(run_dir):
    live(run_dir, nothing)
    assert json.loads((run_dir.path / "status.json").read_text())["state"] == "finished"
    assert not list(run_dir.path.glob("*.tmp"))


def sign_of(run_dir, *, host: str, state: str = "running") -> Heartbeat:
    sign = Heartbeat(
        pid=7,
        host=host,
        started=1.0,
        written=1.0,
        state=state,
        rollout_steps=3,
        waits=[],
        error=None,
        error_at=None,
    )
    run_dir.write_json("status.json", asdict(sign))
    return sign


def test_a_run_of_another_machine_that_goes_on_is_refused_whatever_its_clock(run_dir, monkeypatch):
    monkeypatch.setattr(module, "INTERVAL_S", 0.04)
    sign = sign_of(run_dir, host="node-9")

    async def test():
        watching = asyncio.create_task(refuse_live_elsewhere(run_dir))
        await asyncio.sleep(0.05)
        sign.written = 0.5
        run_dir.write_json("status.json", asdict(sign))
        await watching

    with pytest.raises(RunDirError, match=r"a live run holds it \(process 7 on node-9\)"):
        asyncio.run(test())


@pytest.mark.parametrize(
    ("host", "state"), [("node-9", "running"), ("node-9", "failed"), (socket.gethostname(), "running")]
)
def test_a_dead_one_is_not(run_dir, monkeypatch, host, state):
    monkeypatch.setattr(module, "ELSEWHERE_S", 0.1)
    monkeypatch.setattr(module, "INTERVAL_S", 0.04)
    sign_of(run_dir, host=host, state=state)
    asyncio.run(refuse_live_elsewhere(run_dir))


def test_progress_is_written_and_shown_while_it_lasts(run_dir, monkeypatch):
    monkeypatch.setattr(module, "INTERVAL_S", 0.01)
    seen, shown = [], []
    count = Count(12, 32, "groups kept", {"tokens/s": 1240.5})
    whole = {"run": Count(3, 7, "rollout steps", {"time_left_s": 41.0})}

    def show(progress):
        shown.append(dict(progress))
        raise OSError(28, "No space left on device")  # of the log: the run's own lines end the run, not these

    async def run():
        waits = Waits()
        async with heartbeat(run_dir.path, waits, 7, SimpleNamespace(working=show, run=whole, noted="")):
            with waits.register("batch of groups", "rollout servers", 60.0, lambda: count):
                await asyncio.sleep(0.05)
                seen.append(json.loads((run_dir.path / "status.json").read_text())["progress"])
                seen.append(read_heartbeat(run_dir.path).progress)

    asyncio.run(run())
    as_json = {"done": 12, "total": 32, "unit": "groups kept", "figures": {"tokens/s": 1240.5}}
    assert seen[0].pop("run")["figures"] == {"time_left_s": 41.0}
    assert seen == [{"batch of groups": as_json}, whole | {"batch of groups": count}]
    assert shown.count(whole | {"batch of groups": count}) > 1
    beat = read_heartbeat(run_dir.path)
    assert (beat.waits, beat.progress) == ([], whole)


def test_a_blocking_call_is_written_down_before_the_loop_stands_still(run_dir, monkeypatch):
    monkeypatch.setattr(module, "INTERVAL_S", 60)

    async def body(waits):
        await asyncio.sleep(0.01)
        with waits.blocking("Ray start", "Ray", 60.0, count=lambda: Count(0, 1, "ready")):
            beat = read_heartbeat(run_dir.path)
        assert beat.waits == ["Ray start: waiting for Ray for 0 of 60 s; 0 of 1 ready"]
        assert beat.progress == {"Ray start": Count(0, 1, "ready")}

    live(run_dir, body)


def test_a_file_of_an_earlier_version_has_no_progress(run_dir):
    live(run_dir, nothing)
    file = run_dir.path / "status.json"
    file.write_text(
        json.dumps({key: value for key, value in json.loads(file.read_text()).items() if key != "progress"})
    )
    assert read_heartbeat(run_dir.path).progress == {}


def test_the_seconds_of_earlier_starts_add_up(run_dir):
    def last(started, written):
        file = run_dir.path / "status.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"started": started, "written": written}))

    live(run_dir, nothing)
    last(1000.0, 1090.0)
    live(run_dir, nothing)
    last(2000.0, 2130.0)
    live(run_dir, nothing)
    assert read_heartbeat(run_dir.path).earlier_s == 90 + 130
