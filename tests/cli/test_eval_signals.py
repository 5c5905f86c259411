"""One signal stops `eval` with what is judged saved; a second one does not wait for the servers' end."""

import signal
import subprocess
import sys

import pytest

from megatron_dapo.cli.exit_codes import ExitCode
from tests.processes import ROOT

PROGRAM = """
import asyncio, signal, sys, threading, time
threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED)  # the system hands them to the other thread: nothing wakes this one
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it
from megatron_dapo.cli import main
from megatron_dapo.diagnostics import evaluation_session
async def slow_to_end(*_):
    print("asked", flush=True)
    try:
        await asyncio.sleep(100)
    finally:
        print("ending", flush=True)
        await asyncio.sleep(ENDING_S)
evaluation_session.evaluate = slow_to_end
sys.argv[1:] = ["eval", "examples/quickstart/dapo.yaml"]
main.main()
"""


ONE, TWO = (0.1, ExitCode.CONTINUE), (100, ExitCode.INTERRUPTED)
HERE, ELSEWHERE = set(), {2, 15}


@pytest.mark.parametrize(
    ("word", "signals", "blocked"),
    [
        pytest.param(signal.SIGINT, ONE, HERE, id="SIGINT", marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, TWO, ELSEWHERE, id="SIGTERM twice in another thread"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (signal.SIGINT, ONE, ELSEWHERE),
                (signal.SIGINT, TWO, HERE),
                (signal.SIGINT, TWO, ELSEWHERE),
                (signal.SIGTERM, ONE, HERE),
                (signal.SIGTERM, ONE, ELSEWHERE),
                (signal.SIGTERM, TWO, HERE),
            )
        ),
    ],
)
def test_the_first_signal_ends_it_in_order_and_the_second_at_once(word, signals, blocked):
    ending_s, code = signals
    program = PROGRAM.replace("ENDING_S", str(ending_s)).replace("BLOCKED", str(blocked))
    process = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in ("asked", "ending"):
        assert any(said.strip() == line for said in process.stdout)
        process.send_signal(word)
        if code == ExitCode.CONTINUE:
            break
    assert process.wait(60) == code
