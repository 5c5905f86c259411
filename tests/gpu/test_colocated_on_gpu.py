"""`run.mode: colocated` on one GPU: each side has most of its memory while the other is away."""

import json
import re
from pathlib import Path

import pytest

from megatron_dapo.cli.exit_codes import ExitCode
from tests.processes import ROOT, Running

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]


def test_trainer_and_server_take_turns_in_one_gpus_memory(tmp_path: Path) -> None:
    """The run itself stops with exit code 2 where the measured free memory is not what either side was to leave."""
    pytest.importorskip("torch_memory_saver", reason="SGLang leaves a GPU's memory by this package")
    overrides = (
        f"run.dir={tmp_path / 'run'}",
        "run.mode=colocated",
        "run.rollout_steps=3",
        "run.checkpoint_every=2",
        "model.dtype=bfloat16",
        "actor.device=cuda",
        "actor.layout.tensor=1",
        "actor.offload.between_phases=all",
        "rollout.deterministic=false",
        "rollout.kv_cache_tokens=null",
        "rollout.memory_fraction=0.8",
        "evaluation.limit=50",
        "evaluation.every=1",
    )
    config = str(ROOT / "examples" / "quickstart" / "dapo.yaml")
    finished = Running("train", config, *overrides, log=tmp_path / "out.txt").finish(800)
    assert finished.code == ExitCode.FINISHED, finished.output
    assert finished.left_behind == ()
    found = re.search(
        r"servers leave ([\d.]+) GiB of each GPU to the trainer, rank 0: ([\d.]+) of ([\d.]+) GiB", finished.output
    )
    assert found, finished.output
    left, free, total = map(float, found.groups())
    assert left > 0.6 * total, "a server with 0.8 of the memory gave most of it back"
    assert free > 0.8 * total
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(steps) == 3
    for step in steps:
        assert step["timing/handover"] > 0.002
        assert step["mismatch/mean_abs"] < 0.05
