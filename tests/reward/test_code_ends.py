"""Verifier `code`: no process outlives the verdict."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from reward.code.sandbox import Sandbox
from tests.processes import ROOT
from tests.reward.test_code import CASES, judge


@pytest.mark.parametrize("truth", [{"tests": "assert f() == 1"}, {"cases": [{"input": "", "output": "1"}]}])
def test_the_sandbox_dies_with_its_judge(truth):
    """With it: the process of the tests, or the one that runs a case and that one's starter."""
    program = (
        "import json, sys, threading\n"
        "from reward.verdict import VerificationRequest\n"
        "from reward.verifiers import code\n"
        f"truth = json.dumps({truth | {'cpu_s': 60}})\n"
        "response = '```python\\nimport time\\ntime.sleep(1000)\\n```'\n"
        "print('go', flush=True)\n"
        "code.judge(VerificationRequest(response=response, ground_truth=truth))\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    judging = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=environment)
    assert judging.stdout is not None
    judging.stdout.readline()
    deadline = time.monotonic() + 30
    while len(below := _below(judging.pid)) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(below) == 2
    judging.send_signal(signal.SIGKILL)
    judging.wait()
    judging.stdout.close()
    while any(_runs(pid) for pid in below) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [pid for pid in below if _runs(pid)]


@pytest.fixture
def adopting():
    """What loses its parent becomes a child of this process, which waits for none, as process 1 of many containers."""
    libc, set_child_subreaper = ctypes.CDLL(None), 36
    assert libc.prctl(set_child_subreaper, 1) == 0
    yield
    libc.prctl(set_child_subreaper, 0)


@pytest.mark.usefixtures("adopting")
def test_a_case_that_runs_out_of_time_is_waited_for(monkeypatch):
    """By its starter: a zombie would stay."""
    seen = list[psutil.Process]()

    def look(sandbox, deadline):
        starter = psutil.Process(sandbox._process.pid)  # not all children: an earlier test may have left some
        seen.extend([starter, *starter.children(recursive=True)])
        return exit_code(sandbox, deadline)

    exit_code = Sandbox.exit_code
    monkeypatch.setattr(Sandbox, "exit_code", look)
    assert judge("import time\ntime.sleep(100)", cases=CASES, cpu_s=1).rule == "code-timeout"
    assert len(seen) == 2
    assert not [process for process in seen if process.is_running()]


def _below(pid: int) -> list[str]:
    return [str(child.pid) for child in psutil.Process(pid).children(recursive=True)]


def _runs(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
