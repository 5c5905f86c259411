"""The whole loop by each way to the servers: the same run, number for number, and no file where none is needed."""

import json
from pathlib import Path

import pytest

from megatron_dapo.cli.exit_codes import ExitCode
from tests.processes import ROOT, Running

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
SMALL = (
    "run.rollout_steps=2",
    "algorithm.prompts_per_step=6",
    "algorithm.mini_batch_responses=16",
    "evaluation.limit=8",
    "run.export_at_end=false",
    "rollout.sync_bucket_mb=1",
)
TIMES = ("timing/", "tokens_per_second/", "weight_sync/gb_per_s", "servers/")


def finished_run(folder: Path, transport: str) -> list[dict]:
    """Its metrics, without those that are times."""
    config = str(ROOT / "examples" / "quickstart" / "dapo.yaml")
    arguments = ("train", config, f"run.dir={folder}", f"rollout.weight_sync={transport}", *SMALL)
    finished = Running(*arguments, log=folder.with_suffix(".txt")).finish(400)
    assert finished.code == ExitCode.FINISHED, finished.output
    assert finished.left_behind == ()
    assert "read it from disk" not in finished.output
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert all(line["weight_sync/gb_per_s"] > 0 for line in lines)
    return [{name: value for name, value in line.items() if not name.startswith(TIMES)} for line in lines]


def test_every_way_gives_the_same_run(tmp_path: Path) -> None:
    by_disk = finished_run(tmp_path / "disk", "disk")
    assert [line["weight_version"] for line in by_disk] == [1, 2]
    assert (tmp_path / "disk" / "weights" / "v2").is_dir()
    for transport in ("tensor", "distributed"):
        assert finished_run(tmp_path / transport, transport) == by_disk
        assert not (tmp_path / transport / "weights").exists()
        log = (tmp_path / transport / "logs" / "server0.log").read_text()
        assert log.count("init custom process group") == (transport == "distributed"), "one group for all publishes"
