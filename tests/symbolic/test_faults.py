"""Faults planted in the ranks of a small model: the trace finds each, and names it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_dapo.config import load_config
from megatron_dapo.plan.scenario import load_calibration, model_dimensions
from tests.symbolic.findings import Findings
from tests.symbolic.rank_processes import read_trace, stub_environment
from tests.symbolic.test_recipes import FOLDER

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.symbolic, pytest.mark.usefixtures("cuda_wheels"), pytest.mark.timeout(1200)]


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("cpu_tensor_in_a_collective", r"allreduce SUM of a CPU tensor float32\[3\] over NCCL"),
        ("rank_that_skips_a_collective", "call .* is allreduce SUM .* on rank 0 and .* on rank 1"),
        ("number_read_in_the_loop", "a number read from the device in the loop over micro-batches"),
        ("send_that_nobody_receives", "missing on rank 0|send .* on rank 1 and missing on rank 0"),
        ("gigabyte_that_nobody_planned", "update: peak"),
    ],
)
def test_a_planted_fault_is_found(fault: str, told: str, tiny: Path, tmp_path: Path) -> None:
    path = FOLDER / "qwen2.5_7b_8gpu.yaml"
    overrides = ["actor.layout.data=1", "actor.recompute=none", f"model.path={tiny}"]
    traces = []
    for rank in (0, 1):
        out = tmp_path / f"{rank}.json"
        job = {
            "config": str(path),
            "overrides": overrides,
            "rank": rank,
            "layers": "te",
            "out": str(out),
            "parent": os.getpid(),
        }
        command = [sys.executable, "-W", "ignore", "-m", "tests.symbolic.planted", fault, json.dumps(job)]
        environment = os.environ | stub_environment(tmp_path)
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
        assert out.is_file(), done.stderr[-3000:]
        traces.append(read_trace(out))
    config = load_config(path, overrides)
    findings = Findings(traces, config, model_dimensions(config.model.path)[0], load_calibration())
    assert any(re.search(told, line) for line in findings.faults), findings.faults
