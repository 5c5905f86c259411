"""`megatron-dapo train` before there is a run."""

import os
import signal

import pytest

from megatron_dapo.cli import train
from megatron_dapo.cli.exit_codes import ExitCode
from megatron_dapo.storage.run_dir import RunDirError


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
