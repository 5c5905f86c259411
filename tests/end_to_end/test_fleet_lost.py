"""The only server dies for good: the run waits as long as it may, says for what, and stops with what it has saved."""

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from megatron_dapo.cli.exit_codes import ExitCode
from megatron_dapo.config import load_config
from megatron_dapo.storage.ledger import read_ledger
from rollout.server import PARENT
from rollout.server.server_command import ServerSpec, server_arguments
from tests.end_to_end.test_quickstart import SMALL
from tests.ledger_check import check_ledger
from tests.processes import ROOT, Running

DEADLINE_S = 15.0
CONFIG = ROOT / "examples" / "quickstart" / "dapo.yaml"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def start_server(folder: Path) -> tuple[subprocess.Popen[bytes], str]:
    """Somebody else's server: not of the run, which cannot start it anew."""
    config = load_config(CONFIG)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    spec = ServerSpec(
        model_path=ROOT / config.model.path,
        device="cpu",
        dtype="float32",
        context_length=config.model.context_length,
        seed=0,
        log_path=folder / "log",
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "rollout.server.launch_server", *server_arguments(config.rollout, spec, port)],
        env=os.environ | {PARENT: str(os.getpid())},
        stdout=(folder / "server.log").open("wb"),
        stderr=subprocess.STDOUT,
    )
    return process, f"http://127.0.0.1:{port}"


def wait_until_it_serves(process: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.monotonic() + 240
    while True:
        assert process.poll() is None, "the server ended while it started"
        assert time.monotonic() < deadline, "the server does not answer"
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)


def test_a_run_whose_only_server_is_gone_for_good_stops_in_time(tmp_path):
    server, url = start_server(tmp_path)
    try:
        wait_until_it_serves(server, url)
        more = (f"rollout.urls=[{url}]", f"rollout.fleet_deadline_s={DEADLINE_S}", "run.rollout_steps=1000")
        arguments = ["train", str(CONFIG), f"run.dir={tmp_path / 'run'}", *SMALL, *more]
        running = Running(*arguments, log=tmp_path / "out.txt")
        running.wait_for(" 2/1000  accuracy", 400)
    finally:
        server.kill()
        server.wait(30)
    killed = time.monotonic()
    finished = running.finish(240)
    assert finished.code == ExitCode.FLEET, finished.output
    assert "all servers are down" in finished.output
    assert time.monotonic() - killed > DEADLINE_S, "it did not wait for the server's return"
    assert finished.left_behind == ()
    assert (tmp_path / "run" / "checkpoints" / "latest").exists()
    check_ledger(read_ledger(tmp_path / "run" / "ledger.jsonl"))
