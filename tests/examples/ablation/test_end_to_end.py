"""The ladder with the real system: a base, two rungs, one seed, one rollout step; then again, for nothing."""

import json

import pytest

from tests.processes import Running

SMALL = (
    "--seeds=1",
    "--rungs=naive,full",
    "--steps=1",
    "--base-steps=30",
    "evaluation.limit=20",
    "algorithm.prompts_per_step=4",
)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_rungs_are_run_and_reported_and_a_second_call_runs_nothing(tmp_path) -> None:
    out = tmp_path / "ladder"

    def call(log: str) -> str:
        ended = Running(f"--out={out}", *SMALL, log=tmp_path / log, module="examples.ablation").finish(800)
        assert ended.code == 0, ended.output
        assert ended.left_behind == ()
        return ended.output

    first = call("first.txt")
    assert "seed 0: 2 new" in first
    assert "1 of 2: seed 0, naive: naive GRPO" in first
    for rung in ("naive", "full"):
        summary = json.loads((out / "seed_0" / rung / "summary.json").read_text())
        assert summary["rollout_steps"] == 1
        assert (summary["heldout"]["baseline"] is not None) == (rung == "naive")
    assert {"report.html", "results.md", "curves.png"} <= {file.name for file in out.iterdir()}
    report = (out / "results.md").read_text()
    assert "one seed: no interval" in report
    began = (out / "seed_0" / "naive" / "summary.json").stat().st_mtime

    again = call("again.txt")
    assert "seed 0: 2 finished" in again
    assert "0 runs left" in again
    assert (out / "seed_0" / "naive" / "summary.json").stat().st_mtime == began
