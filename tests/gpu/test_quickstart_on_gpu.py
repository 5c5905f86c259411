"""The whole loop on one GPU, which trainer and server share: one step of the quickstart."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_dapo.cli.exit_codes import ExitCode
from tests.gpu.place import ON_CPU, kernel_arguments
from tests.processes import ROOT, Running

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(280)]
SHOWN = ("accuracy/mean", "grad_norm", "mismatch/mean_abs", "timing/")
"""Beginnings of the metrics that go to the page."""


@pytest.mark.skipif(ON_CPU, reason="tests/end_to_end trains it on a CPU")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_quickstart_trains_on_one_gpu(dtype: str, record: Callable[[str, Any], None], tmp_path: Path) -> None:
    overrides = [
        f"run.dir={tmp_path / 'run'}",
        "run.rollout_steps=1",
        f"model.dtype={dtype}",
        "actor.device=cuda",
        "actor.layout.data=1",
        "rollout.servers=1",
        "rollout.memory_fraction=0.3",
        "evaluation.limit=16",
    ]
    if dtype == "bfloat16":
        overrides += ["rollout.deterministic=false", f"rollout.extra_args={json.dumps(kernel_arguments())}"]
    config = str(ROOT / "examples" / "quickstart" / "dapo.yaml")
    finished = Running("train", config, *overrides, log=tmp_path / "out.txt").finish(260)
    assert finished.code == ExitCode.FINISHED, finished.output[-3000:]
    assert finished.left_behind == ()
    (step,) = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    shown = {name: value for name, value in step.items() if name.startswith(SHOWN)}
    record(f"quickstart, {dtype}", shown | {"whole run, s": finished.seconds, **manifest["trainer"]["kernels"]})
    assert step["grad_norm"] > 0
    assert step["mismatch/mean_abs"] < (0.05 if dtype == "bfloat16" else 0.01)  # Triton takes TF32
    assert manifest["trainer"]["collectives"] == "nccl"
