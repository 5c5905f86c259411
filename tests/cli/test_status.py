"""Alive, dead or stuck: what `megatron-dapo status` makes of lock, sign of life and files."""

import io
import os
import socket
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_dapo.cli import status
from megatron_dapo.cli.status import STALE_S, liveness, lock_holder
from megatron_dapo.cli.status import status as status_command
from megatron_dapo.cluster.heartbeat import Heartbeat, read_heartbeat
from megatron_dapo.monitor.console import QUIET_S, Count
from megatron_dapo.report.source import ReportError
from tests.monitor.runs import metrics
from tests.processes import ROOT
from tests.report.folders import write_lines, write_run


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch):
    """No Slurm of this machine answers."""
    monkeypatch.setenv("SLURM_CONF", os.devnull)


HOLD = """
import sys
from megatron_dapo.storage.run_dir import RunDir
held = RunDir(sys.argv[1], resume=True)
print("held", flush=True)
sys.stdin.read()
"""


def beat(**changes) -> Heartbeat:
    usual = {
        "pid": 7, "host": socket.gethostname(), "started": 0.0, "written": 1000.0, "state": "running",
        "rollout_steps": 12, "waits": [], "error": None, "error_at": None,
    }  # fmt: skip
    return Heartbeat(**{**usual, **changes})


@pytest.mark.parametrize(
    ("sign", "holder", "now", "alive", "text"),
    [
        (beat(), 7, 1001, True, "process 7 on this machine holds the lock"),
        (beat(), 7, 1001 + STALE_S, True, "no sign of life for 31 s: the coordinator is busy or stuck"),
        (beat(), None, 1001, False, "died without an error message"),
        (beat(host="node-3"), None, 1005, True, "process 7 on node-3 (5.0 s ago)"),
        (beat(host="node-3"), None, 2000, False, "died without an error message (or its coordinator is stuck)"),
        (beat(host="node-3"), None, -2000, False, "ahead of this clock"),
        (beat(state="stopped"), None, 1005, False, "continue with run.resume=true"),
        (beat(state="failed"), None, 1005, False, "failed"),
        (beat(state="finished"), None, 1005, False, "finished"),
        (None, 7, 1005, True, "process 7"),
        (None, None, 1005, False, "not running"),
    ],
)
def test_liveness(sign, holder, now, alive, text):
    goes_on, said = liveness(sign, holder, finished=False, now=now)
    assert goes_on == alive
    assert text in said


def test_a_run_that_was_killed_while_it_closed_is_finished():
    assert liveness(beat(), None, finished=True, now=1005) == (False, "finished (5.0 s ago)")
    assert liveness(beat(), 7, finished=True, now=1001)[0]
    assert liveness(beat(host="node-3"), None, finished=True, now=2000) == (False, "finished (17 min ago)")


@pytest.mark.skipif(not os.path.exists("/proc/locks"), reason="the kernel's table of locks is Linux's")
def test_the_holder_of_the_lock_is_seen_and_its_death_too(tmp_path):
    assert lock_holder(tmp_path) is None
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as holder:
        assert holder.stdout.readline() == "held\n"
        assert lock_holder(tmp_path) == holder.pid
        holder.kill()
        holder.wait(10)
        assert lock_holder(tmp_path) is None, "the file is still there, the lock is not"
    assert (tmp_path / ".lock").exists()


def test_a_dead_run_in_full(tmp_path, capsys):
    folder = write_run(tmp_path / "run", finished=False, steps=7)
    write_lines(
        folder / "metrics.jsonl",
        [line | {"truncated_fraction": 0.5, "timing/step": 10.0, "tokens/generated": 4000} for line in metrics()[:7]],
    )
    (folder / "checkpoints" / "step_5").mkdir(parents=True)
    sign = beat(state="failed", error="Stalled: no answer\n  open waits", error_at=1000.0, written=time.time() - 600)
    write_lines(folder / "status.json", [asdict(sign)])
    status_command(folder)
    text = capsys.readouterr().out
    for part in (
        "failed, see the last error (10 min ago)",
        "7 of 12 rollout steps, 28 optimizer steps; newest checkpoint after rollout step 5",
        "step  7/12",
        "Stalled: no answer",
        "truncation",
        "section 3.4",
        "Change first: rollout.max_new_tokens or algorithm.overlong.filter",
    ):
        assert part in text


def test_a_run_that_has_only_begun(tmp_path, capsys):
    waits, note = ["server start: waiting for SGLang servers for 3 of 600 s"], "server http://a is down; restarting it"
    sign = beat(waits=waits, note=note, written=time.time(), host="node-9")
    write_lines(tmp_path / "status.json", [asdict(sign)])
    status_command(tmp_path)
    text = capsys.readouterr().out
    assert "running, process 7 on node-9" in text
    assert "waits       server start: waiting for SGLang servers for 3 of 600 s" in text
    assert "last note   server http://a is down; restarting it" in text
    assert "no rollout step of 12 is done; no checkpoint yet" in text


@pytest.mark.parametrize(("state", "said"), [("running", "running, process 7"), ("stopped", "with the same command")])
def test_an_evaluation_alone_says_how_far_it_is(state, said, tmp_path, capsys):
    progress = {"evaluation": Count(120, 400, "responses")}
    sign = beat(rollout_steps=0, progress=progress, state=state, written=time.time(), host="node-9")
    write_lines(tmp_path / "status.json", [asdict(sign)])
    status_command(tmp_path)
    text = capsys.readouterr().out
    assert "progress    evaluation: 120 of 400 responses\n" in text
    assert said in text
    assert "resume" not in text


def test_no_run(tmp_path):
    with pytest.raises(ReportError, match="no run directory"):
        status_command(tmp_path)


@pytest.mark.parametrize("name", ["metrics.jsonl", "config.yaml"])
def test_somebody_elses_run_that_may_not_be_read(tmp_path, capsys, monkeypatch, name):
    folder = write_run(tmp_path / "run", finished=False, steps=2)
    opened = io.open

    def refuse(file, *arguments):
        if str(file).endswith(name):
            raise PermissionError(13, "Permission denied", str(file))
        return opened(file, *arguments)

    monkeypatch.setattr(io, "open", refuse)
    if name == "metrics.jsonl":
        with pytest.raises(ReportError, match="Permission denied; ask the owner"):
            status_command(folder)
        return
    status_command(folder)
    assert "Permission denied" in capsys.readouterr().out


@pytest.mark.skipif(not os.path.exists("/proc/locks"), reason="the kernel's table of locks is Linux's")
@pytest.mark.parametrize(
    "line", ["1: OFDLCK ADVISORY  WRITE -1", "1: FLOCK  ADVISORY  WRITE {own}", "1: -> FLOCK ADVISORY  WRITE 1"]
)
def test_a_line_of_the_table_that_names_no_holder_is_looked_past(tmp_path, monkeypatch, line):
    """No process of this machine, one that has not opened the file (another one of the same number), one that waits."""
    (tmp_path / ".lock").touch()
    inode = os.stat(tmp_path / ".lock").st_ino
    monkeypatch.setattr(Path, "read_text", lambda *_: f"{line.format(own=os.getpid())} fe:00:{inode} 0 EOF\n")
    assert lock_holder(tmp_path) is None


STRANGE = (
    '{"pid": 1, "host": "a", "started": "x", "written": 1, "state": "running", "rollout_steps": 3, "waits": [], '
    '"error": null, "error_at": null}'
)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"pid": 1}', STRANGE])
def test_a_sign_of_life_that_cannot_be_read_is_none(tmp_path, content):
    (tmp_path / "status.json").write_text(content)
    assert read_heartbeat(tmp_path) is None


@pytest.mark.parametrize("stop", ["the run's end", "a key"])
def test_following_a_run(tmp_path, capsys, monkeypatch, stop):
    def write(done, **changes):
        what = f"held-out answers: waiting for rollout servers for 3 of 600 s; {done} of 9 answers"
        sign = beat(**({"waits": [what], "written": time.time(), "host": "node-9"} | changes))
        write_lines(tmp_path / "status.json", [asdict(sign)])

    passed = []

    def sleep(seconds):
        passed.append(seconds)
        if len(passed) == 3:
            if stop == "a key":
                raise KeyboardInterrupt
            write(9, state="finished", waits=[])
        else:
            write(len(passed))

    write(0)
    monkeypatch.setattr(status.time, "sleep", sleep)
    status_command(tmp_path, follow=True)
    text = capsys.readouterr().out
    said = [line.split("; ")[-1] for line in text.splitlines() if line.startswith("waits")]
    assert said == ["0 of 9 answers", "1 of 9 answers", "2 of 9 answers"]
    assert ("state       finished" in text) == (stop != "a key")
    assert passed == [QUIET_S] * 3, "a log gets a few lines, a terminal many"
    assert "\x1b" not in text


def followed(folder, monkeypatch, *changes) -> None:
    """`status --follow`, where each of `changes` happens in a pause; then a key ends it."""
    left = list(changes)

    def sleep(seconds):
        if not left:
            raise KeyboardInterrupt
        left.pop(0)()

    monkeypatch.setattr(status, "time", SimpleNamespace(**vars(time) | {"sleep": sleep}))  # subprocess needs its own
    status_command(folder, follow=True)


def test_a_run_in_the_queue_is_waited_for(tmp_path, capsys, monkeypatch):
    (tmp_path / "logs").mkdir()
    with pytest.raises(ReportError, match="no run has begun there; its job waits in the queue"):
        status_command(tmp_path)

    def write(**changes):
        write_lines(tmp_path / "status.json", [asdict(beat(written=time.time(), host="node-9", **changes))])

    followed(tmp_path, monkeypatch, write, lambda: write(state="finished"))
    text = capsys.readouterr().out
    assert text.index("no run has begun there yet") < text.index("running, process 7") < text.index("finished")


def test_a_job_that_ended_before_its_run_began_has_a_log_that_says_why(tmp_path):
    (tmp_path / "logs").mkdir()
    for number, job in enumerate((12, 9)):
        (tmp_path / "logs" / f"slurm-{job}.log").touch()
        os.utime(tmp_path / "logs" / f"slurm-{job}.log", (number, number))
    with pytest.raises(ReportError, match=f"no run has begun there; what its job says: {tmp_path}/logs/slurm-9.log"):
        status_command(tmp_path)


@pytest.mark.parametrize("state", ["stopped", "running", "failed"])
def test_a_run_under_slurm_is_followed_over_the_queue(state, tmp_path, capsys, monkeypatch):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "slurm-7.log").touch()

    def write(**changes):
        write_lines(tmp_path / "status.json", [asdict(beat(host="node-9", **changes))])

    write(state=state, written=time.time() - 4000)
    goes_on = lambda: write(written=time.time())  # noqa: E731
    followed(tmp_path, monkeypatch, goes_on, lambda: write(state="finished", written=time.time()))
    states = [line for line in capsys.readouterr().out.splitlines() if line.startswith("state")]
    assert len(states) == 3
    assert "running, process 7" in states[1]
    assert "finished" in states[2]


def test_a_dead_run_under_slurm_names_the_log_of_its_job(tmp_path, capsys):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "slurm-7.log").touch()
    write_lines(tmp_path / "status.json", [asdict(beat())])
    status_command(tmp_path)
    assert f"what its job says: {tmp_path}/logs/slurm-7.log" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("says", "waits"),
    [
        ("saved; job 7 is going back into the queue", True),
        ("saved; going back into the queue", True),
        (
            "saved; job 7 may not start again, so not going back into the queue. The next job of the chain goes on",
            False,
        ),
        ("saved; stopped by stop, so not going back into the queue. To go on, submit the script again", False),
        ("CANCELLED AT 2026-11-23T17:00:00 DUE TO PREEMPTION", True),
        ("an error", False),
    ],
)
def test_a_dead_run_is_followed_only_where_its_job_may_start_again(says, waits, tmp_path, monkeypatch):
    (tmp_path / "logs").mkdir()
    log = tmp_path / "logs" / "slurm-7.log"
    log.write_text(f"{says}\n")
    os.utime(log, (time.time() - 4000,) * 2)
    write_lines(tmp_path / "status.json", [asdict(beat(host="node-9", written=time.time() - 4000))])
    paused = []
    followed(tmp_path, monkeypatch, lambda: paused.append(1))
    assert bool(paused) == waits


def slurm_has(queue, folder, monkeypatch) -> None:
    """A program that stands in for squeue: the log files that its jobs write."""
    program = folder / "bin" / "squeue"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\necho '{queue}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    status._has_job.cache_clear()


@pytest.mark.parametrize("queued", [True, False])
def test_a_run_whose_jobs_have_left_the_queue_is_followed_no_more(queued, tmp_path, capsys, monkeypatch):
    folder = tmp_path / "run"
    (folder / "logs").mkdir(parents=True)
    (folder / "logs" / "slurm-7.log").write_text("saved; job 7 is going back into the queue\n")
    write_lines(folder / "status.json", [asdict(beat(state="stopped"))])
    slurm_has(f"{folder}/logs/slurm-8.log" if queued else f"{folder}2/logs/slurm-9.log", tmp_path, monkeypatch)
    paused = []
    followed(folder, monkeypatch, lambda: paused.append(1))
    assert bool(paused) == queued
    told = capsys.readouterr().out
    assert "saved; job 7 is going back into the queue" in told
    assert ("Slurm may start it again" in told) == queued


def test_a_job_that_failed_before_its_run_began_ends_the_following_with_its_last_lines(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    (folder / "logs").mkdir(parents=True)
    (folder / "logs" / "slurm-7.log").write_text("[a]\n" * 9 + "DataError: no rows\nsrun: error: exit code 2\n")
    slurm_has("", tmp_path, monkeypatch)
    with pytest.raises(
        ReportError, match=r"(?s)no run has begun there; .*slurm-7.log.*DataError: no rows\nsrun: error"
    ):
        followed(folder, monkeypatch)


def test_a_cancelled_job_says_so(tmp_path, capsys):
    (tmp_path / "logs").mkdir()
    says = "SIGTERM: stopping; Slurm leaves no time to save\nslurmstepd: error: *** JOB 7 CANCELLED AT 2026 ***\n"
    (tmp_path / "logs" / "slurm-7.log").write_text(says)
    write_lines(tmp_path / "status.json", [asdict(beat())])
    status_command(tmp_path)
    text = capsys.readouterr().out
    assert text.index("ended by SIGTERM") < text.index("*** JOB 7 CANCELLED")


def test_a_run_that_starts_lacks_no_file(tmp_path, capsys):
    write_lines(tmp_path / "status.json", [asdict(beat(written=time.time(), host="node-9"))])
    status_command(tmp_path)
    assert "metrics.jsonl is missing" not in capsys.readouterr().out
    write_lines(tmp_path / "status.json", [asdict(beat(state="failed"))])
    status_command(tmp_path)
    assert "metrics.jsonl is missing" in capsys.readouterr().out
    write_lines(tmp_path / "status.json", [asdict(beat(state="failed", rollout_steps=0))])
    status_command(tmp_path)
    assert "metrics.jsonl is missing" not in capsys.readouterr().out, "an evaluation has none"
