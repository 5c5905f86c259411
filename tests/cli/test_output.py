"""What becomes of a command whose output cannot be written."""

import subprocess
import sys
from pathlib import Path

import pytest

QUICKSTART = "examples/quickstart/dapo.yaml"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_output_to_a_full_disk_is_one_line():
    command = [sys.executable, "-m", "megatron_dapo.cli.main", "check", QUICKSTART]
    with open("/dev/full", "w") as full:
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert ended.returncode == 1
    assert "No space left on device" in ended.stderr
    assert ended.stderr.count("\n") == 1
