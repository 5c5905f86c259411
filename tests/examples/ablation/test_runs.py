"""What is skipped, what is resumed, what is begun anew, and what stops the ladder."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from examples.ablation import runs
from examples.ablation.cost import estimate
from examples.ablation.rungs import Place
from examples.ablation.runs import LadderStopped, State, execute, run_command, state_of
from tests.examples.ablation.folders import begin, finish, planned
from tests.processes import ROOT


@pytest.fixture
def run(tmp_path):
    (one,) = planned(tmp_path, ["full"], [3])
    return one


def test_states(run) -> None:
    assert state_of(run) is State.NEW
    begin(run)
    assert state_of(run) is State.HALF
    finish(run, sampled=0.5)
    assert state_of(run) is State.FINISHED


def test_a_run_that_ended_while_it_started_is_gone_on_with(run) -> None:
    run.folder.mkdir(parents=True)
    assert state_of(run) is State.NEW
    (run.folder / "ledger.jsonl").touch()
    assert state_of(run) is State.HALF


def test_a_damaged_summary_counts_as_half(run) -> None:
    finish(run, sampled=0.5)
    (run.folder / "summary.json").write_text("{")
    assert state_of(run) is State.HALF


def test_a_failure_of_the_rung_is_not_tried_again(run) -> None:
    begin(run)
    (run.folder / runs.FAILURE).write_text("{}")
    assert state_of(run) is State.FAILED


def test_more_steps_continue_it_and_fewer_are_refused(run, tmp_path) -> None:
    finish(run, sampled=0.5)
    (longer,) = planned(tmp_path, ["full"], [3], steps=8)
    assert state_of(longer) is State.HALF
    (shorter,) = planned(tmp_path, ["full"], [3], steps=2)
    with pytest.raises(LadderStopped, match="has 6 rollout steps, 2 are asked for; give --steps 6 or more"):
        state_of(shorter)


def test_other_settings_are_refused_by_key(run) -> None:
    begin(run)
    file = run.folder / "config.yaml"
    file.write_text(re.sub(r"lr: \S+", "lr: 0.01", file.read_text()))
    with pytest.raises(LadderStopped, match=r"actor\.optimizer\.lr was 0\.01, now 0\.0003"):
        state_of(run)


class Commands:
    """Stands for `run_command`: keeps what would be run, and answers with a code after doing something."""

    def __init__(self, code: int = 0, then=lambda: None) -> None:
        self.code, self.then, self.calls = code, then, []

    def __call__(self, command: list[str], log: Path) -> tuple[int, str]:
        self.calls.append(command)
        self.then()
        return self.code, "the end of the log"


def beat(folder: Path, error: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    content = {"pid": 1, "host": "h", "started": 0.0, "written": 0.0, "state": "failed", "rollout_steps": 6}
    (folder / "status.json").write_text(json.dumps(content | {"waits": [], "error": error, "error_at": 0.0}))


def test_a_new_run_starts_and_a_half_one_resumes(run, monkeypatch) -> None:
    commands = Commands(then=lambda: finish(run, sampled=0.5))
    monkeypatch.setattr(runs, "run_command", commands)
    assert execute(run) is State.FINISHED
    assert commands.calls[0][1:4] == ["-m", "megatron_dapo.cli.main", "train"]
    assert "run.resume=true" not in commands.calls[0]
    (run.folder / "summary.json").unlink()
    execute(run)
    assert commands.calls[1] == [*commands.calls[0], "run.resume=true"]


@pytest.mark.parametrize(
    ("code", "error"), [(3, "Diverged: loss is nan"), (1, "OversamplingLimit: 0 of 32 groups after 320 prompts")]
)
def test_what_the_rung_itself_brings_about_is_kept_as_its_result(run, monkeypatch, code, error) -> None:
    monkeypatch.setattr(runs, "run_command", Commands(code, then=lambda: beat(run.folder, error)))
    assert execute(run) is State.FAILED
    assert json.loads((run.folder / runs.FAILURE).read_text()) == {"exit_code": code, "error": error}


@pytest.mark.parametrize(
    ("code", "says"), [(75, "stopped and saved"), (130, "the same command goes on"), (5, "exit code 5"), (1, "OSError")]
)
def test_what_the_machine_brings_about_stops_the_ladder(run, monkeypatch, code, says) -> None:
    monkeypatch.setattr(runs, "run_command", Commands(code, then=lambda: beat(run.folder, "OSError: disk full")))
    with pytest.raises(LadderStopped, match=says):
        execute(run)
    assert not (run.folder / runs.FAILURE).exists()


def test_inputs_are_made_once_and_never_half(tmp_path, monkeypatch) -> None:
    place = Place(folder=tmp_path)

    def make(command: list[str], log: Path) -> tuple[int, str]:
        made.append(Path(command[1]).name)
        folder = Path(command[command.index("--out") + 1])
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ("heldout.jsonl" if "data" in folder.name else "model.safetensors")).touch()
        return code, ""

    made: list[str] = []
    monkeypatch.setattr(runs, "run_command", make)
    code = 1
    with pytest.raises(LadderStopped, match=r"make_data\.py ended with exit code 1"):
        runs.make_inputs(place, 0)
    assert not place.data.exists()
    code = 0
    for seed in (0, 1, 0):
        runs.make_inputs(place, seed)
    assert made == ["make_data.py", "make_data.py", "make_base.py", "make_base.py"]
    assert (place.base(1) / "model.safetensors").exists()


SLOW = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
print("up", flush=True)
time.sleep(60)
"""


def test_a_signal_is_handed_on_and_the_answer_awaited(tmp_path) -> None:
    log = tmp_path / "log"
    body = f"from examples.ablation.runs import run_command\nimport sys\nfrom pathlib import Path\n\
sys.exit(run_command([sys.executable, '-c', {SLOW!r}], Path({str(log)!r}))[0])"
    for number, code in ((signal.SIGTERM, 75), (signal.SIGKILL, -signal.SIGKILL)):
        log.unlink(missing_ok=True)
        process = subprocess.Popen([sys.executable, "-c", body], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
        deadline = time.monotonic() + 30
        while not (log.exists() and "up" in log.read_text()):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        (child,) = _children(process.pid)
        process.send_signal(number)
        assert process.wait(20) == code
        while Path(f"/proc/{child}").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not Path(f"/proc/{child}").exists(), "the run outlived the ladder"


def test_a_run_that_ends_well_after_a_signal_is_the_last_one(tmp_path) -> None:
    """The signal comes while this process waits; without the handing-on it would end the test session."""
    ends_well = f"""
import os, signal
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
os.kill({os.getpid()}, signal.SIGTERM)
signal.sigwait([signal.SIGTERM])
"""
    assert run_command([sys.executable, "-c", ends_well], tmp_path / "log")[0] == 75


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_output_is_returned_and_appended_to_the_log(tmp_path) -> None:
    log = tmp_path / "below" / "log"
    assert run_command([sys.executable, "-c", "print(1)"], log) == (0, "1\n")
    assert run_command([sys.executable, "-c", "print(2); raise SystemExit(4)"], log) == (4, "2\n")
    assert log.read_text() == "1\n2\n"


def test_the_estimate_comes_from_the_runs_that_are_done(tmp_path) -> None:
    all_runs = planned(tmp_path, ["naive", "filter", "full"], [0, 1])
    assert estimate(all_runs, [state_of(run) for run in all_runs]) is None
    finish(all_runs[0], sampled=0.3, wall=100.0)  # 60 s of steps, 10 s each of 6, and 40 s around them
    states = [state_of(run) for run in all_runs]
    left = estimate(all_runs, states)
    assert left is not None
    assert left.seconds == pytest.approx(3 * (40 + 6 * 10) + 2 * (40 + 6 * 10 * 2.4))
    finish(all_runs[2], sampled=0.5, wall=150.0)
    left = estimate(all_runs, [state_of(run) for run in all_runs])
    assert left is not None
    assert left.seconds == pytest.approx(3 * 100 + 150)
    assert left.measured == 2
