"""The entry point of `megatron-dapo`."""

import signal
import subprocess
import sys

from tests.processes import ROOT

INTERRUPTED = """
import sys
class Interrupted:
    def find_spec(self, name, *_):
        if name == "typer":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupted())
from megatron_dapo.cli.entry import run
run()
"""


def test_ctrl_c_in_the_imports_is_no_traceback():
    command = [sys.executable, "-c", INTERRUPTED]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (128 + signal.SIGINT, "")


def test_the_script_is_the_entry_point():
    run = "import sys; sys.argv = ['megatron-dapo', '--version']; from megatron_dapo.cli.entry import run; run()"
    ended = subprocess.run(
        [sys.executable, "-c", run], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert ended.stdout.startswith("megatron-dapo ")
