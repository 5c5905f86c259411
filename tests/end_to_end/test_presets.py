"""Every preset trains with the real parts: two rollout steps of the quickstart's base."""

import json
import math

import pytest

from megatron_dapo.cli.exit_codes import ExitCode
from megatron_dapo.config.load import PRESETS
from megatron_dapo.storage.ledger import read_ledger
from tests.ledger_check import check_ledger
from tests.processes import ROOT, Running

QUICKSTART = ROOT / "examples" / "quickstart"
SMALL = (
    f"model.path={QUICKSTART / 'base'}",
    f"data.path={QUICKSTART / 'data' / 'train.jsonl'}",
    f"evaluation.path={QUICKSTART / 'data' / 'heldout.jsonl'}",
    "evaluation.limit=12",
    "run.rollout_steps=2",
    "algorithm.prompts_per_step=6",
)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_trains(preset, tmp_path):
    run_dir = tmp_path / "run"
    arguments = [
        "train",
        str(ROOT / "examples" / "ablation" / "presets.yaml"),
        f"preset={preset}",
        f"run.dir={run_dir}",
    ]
    ended = Running(*arguments, *SMALL, log=tmp_path / "log.txt").finish(500)
    assert ended.code == ExitCode.FINISHED, ended.output
    assert ended.left_behind == ()
    steps = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [step["rollout_step"] for step in steps] == [1, 2]
    assert all(math.isfinite(value) for step in steps for value in step.values() if isinstance(value, float))
    assert all(step["grad_norm"] > 0 for step in steps)
    check_ledger(read_ledger(run_dir / "ledger.jsonl"))
