"""The whole loop on one GPU: trainer and server share it. `make test-gpu` runs it; the default tests leave it out."""

import json
from pathlib import Path

import pytest

from megatron_dapo.cli.exit_codes import ExitCode
from tests.processes import ROOT, Running

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_quickstart_trains_on_one_gpu(dtype: str, tmp_path: Path) -> None:
    overrides = (
        f"run.dir={tmp_path / 'run'}",
        "run.rollout_steps=3",
        f"model.dtype={dtype}",
        "actor.device=cuda",
        "actor.layout.tensor=1",
        "rollout.deterministic=false",
        "rollout.memory_fraction=0.3",
        # Kernels that SGLang has for both types and this small head size, without FlashInfer or FlashAttention 3.
        'rollout.extra_args=["--attention-backend", "triton", "--sampling-backend", "pytorch"]',
        "evaluation.limit=50",
    )
    config = str(ROOT / "examples" / "quickstart" / "dapo.yaml")
    finished = Running("train", config, *overrides, log=tmp_path / "out.txt").finish(800)
    assert finished.code == ExitCode.FINISHED, finished.output
    assert finished.left_behind == ()
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(steps) == 3
    for step in steps:
        assert step["grad_norm"] > 0
        assert step["mismatch/mean_abs"] < (0.05 if dtype == "bfloat16" else 0.01)  # Triton takes TF32
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert manifest["trainer"]["collectives"] == "nccl"
