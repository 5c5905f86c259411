"""The quickstart's mixture of experts learns, with expert parallelism, with and without routing replay."""

import json
from itertools import product
from pathlib import Path

import pytest

from megatron_dapo.cli.exit_codes import ExitCode
from megatron_dapo.monitor.writer import read_metrics
from tests.monitor.declared import check_declared
from tests.processes import ROOT, Running

CONFIG = ROOT / "examples" / "quickstart" / "experts.yaml"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.parametrize(("seed", "replay"), list(product(range(3), ("true", "false"))))
def test_it_learns_on_every_seed(tmp_path: Path, seed: int, replay: str) -> None:
    run_dir = tmp_path / "run"
    keys = f"run.dir={run_dir}", f"run.seed={seed}", f"actor.routing_replay={replay}"
    ended = Running("train", str(CONFIG), *keys, log=tmp_path / "log.txt").finish(500)
    assert ended.code == ExitCode.FINISHED, ended.output
    assert ended.left_behind == ()
    heldout = json.loads((run_dir / "summary.json").read_text())["heldout"]
    for how in ("greedy", "sampled"):
        before, unguessed, after = (heldout[when][how] for when in ("before", "baseline", "after"))
        assert after["accuracy"] > before["accuracy"] + 0.3
        assert after["low"] > unguessed["high"], "beyond the choice to work the answer out"
    steps = read_metrics(run_dir)
    check_declared(name for step in steps for name in step)
    assert max(step["experts/dead"] for step in steps) == 0
    assert max(step["mismatch/mean_abs"] for step in steps) < 1e-5
    assert ("experts/rerouted" in steps[-1]) == (replay == "true")
