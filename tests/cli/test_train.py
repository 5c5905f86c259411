"""`megatron-dapo train` before there is a run."""

import asyncio
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from megatron_dapo.cli import train
from megatron_dapo.cli.exit_codes import ExitCode
from megatron_dapo.cluster.waits import StopRequested
from megatron_dapo.storage.run_dir import RunDirError
from tests.processes import ROOT


@pytest.fixture(autouse=True)
def heeded():
    """Under `nohup` SIGHUP is ignored, and a run leaves it so."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def test_an_error_that_another_setting_ends_comes_with_the_whole_command(tmp_path, monkeypatch, capfd):
    def load(*_):
        raise RunDirError("other prompts", "run.resume=false", "run.dir=a b")

    monkeypatch.setattr(train, "prepare_environment", lambda: None)
    monkeypatch.setattr(train, "load_config", load)
    given = ["run.dir=x", "run.resume=true", "run.seed=1", "run.resume_step=3"]
    assert train.train_command(tmp_path / "c.yaml", given) == ExitCode.CONFIG
    shown = " ".join(capfd.readouterr().out.split())
    command = f"megatron-dapo train {tmp_path}/c.yaml run.seed=1 run.resume=false 'run.dir=a b'"
    assert command.replace(" ", "") in shown.replace(" ", "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_a_stop_signal_while_data_and_parts_are_read_means_continue_me(number, tmp_path, monkeypatch, capfd):
    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)}

    def load(*_):
        try:
            os.kill(os.getpid(), number)
        except Exception:
            pytest.fail("whoever catches every error must not catch the stop")

    monkeypatch.setattr(train, "prepare_environment", lambda: None)
    monkeypatch.setattr(train, "load_config", load)
    assert train.train_command(tmp_path / "a b.yaml", ["run.dir=x"]) == ExitCode.CONTINUE
    shown = " ".join(capfd.readouterr().out.split())
    assert f"{number.name}: stopped before the run began; continue with: megatron-dapo train" in shown
    assert {each: signal.getsignal(each) for each in before} == before


ENDING = """
import atexit, sys, time
from megatron_dapo.cli.main import main
atexit.register(lambda: (print("ending", flush=True), time.sleep(1)))
sys.argv = ["megatron-dapo", "train", "no-such.yaml"]
main()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_python_ends_changes_no_exit_code(number):
    """A batch system that repeats its signal would else not see that the run is to be continued."""
    process = subprocess.Popen([sys.executable, "-c", ENDING], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None
    while process.stdout.readline() != "ending\n":
        assert process.poll() is None
    process.send_signal(number)
    assert process.wait(60) == ExitCode.CONFIG
    process.stdout.close()


@pytest.mark.parametrize(
    ("content", "job", "kept"),
    [("", None, False), ("", "7", False), ("7\n", "7", True), ("6\n", "7", False), ("7\n", None, False)],
    ids=["mine", "mine under Slurm", "this job's", "another job's", "a job's, by hand now"],
)
def test_a_file_stop_from_before_the_start_is_removed_but_for_the_warning_of_this_job(
    content, job, kept, tmp_path, monkeypatch, capsys
):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    if job:
        monkeypatch.setenv("SLURM_JOB_ID", job)
    file = tmp_path / "stop"
    said = []
    train.forget_stop(file, SimpleNamespace(note=said.append))
    assert said == []
    file.write_text(content)
    train.forget_stop(file, SimpleNamespace(note=said.append))
    assert file.exists() == kept
    assert [f"removed {file}" in line for line in said] == [True] * (not kept)


@pytest.mark.parametrize(
    ("job", "number", "words"),
    [(None, signal.SIGTERM, "saved first"), ("7", signal.SIGUSR1, "saved first"), ("7", signal.SIGTERM, "no time")],
)
def test_what_a_signal_promises(job, number, words, monkeypatch):
    """scancel's SIGTERM reaches Ray and the ranks too: nothing can be saved."""
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    if job:
        monkeypatch.setenv("SLURM_JOB_ID", job)
    said = []

    async def signalled():
        stop = asyncio.get_running_loop().create_future()
        train.save_on_signals(stop, asyncio.current_task(), SimpleNamespace(note=said.append))
        signal.raise_signal(number)
        await asyncio.wait_for(stop, 5)

    asyncio.run(signalled())
    (line,) = said
    assert line.startswith(f"{number.name}: stopping; ")
    assert words in line


def test_a_batch_job_that_stops_is_not_told_to_be_started_by_hand_alone(tmp_path, monkeypatch, capfd):
    def load(*_):
        raise StopRequested

    monkeypatch.setattr(train, "prepare_environment", lambda: None)
    monkeypatch.setattr(train, "load_config", load)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert train.train_command(tmp_path / "c.yaml", []) == ExitCode.CONTINUE
    assert "(a batch job: by its script)" in " ".join(capfd.readouterr().out.split())
