"""The measurement runs and prints a ratio that can be one."""

import re
import subprocess
import sys

from tests.processes import ROOT


def test_it_prints_the_ratio_and_how_much_was_recorded():
    call = [sys.executable, "-c", "from tools.benchmarks.measure_timeline import main; main(2)"]
    printed = subprocess.run(call, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert printed.returncode == 0, printed.stderr
    ratio, passes = re.search(r"recorded / plain, with quartiles: ([\d.]+) .*, (\d+) passes", printed.stdout).groups()
    assert 0.2 < float(ratio) < 5
    assert int(passes) > 10
