"""`megatron-dapo train` before there is a run."""

import os
import signal

import pytest

from megatron_dapo.cli import train
from megatron_dapo.cli.exit_codes import ExitCode


@pytest.fixture(autouse=True)
def heeded():
    """Under `nohup` SIGHUP is ignored, and a run leaves it so."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


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
