"""`run.mode: colocated` on one GPU: each side has most of its memory while the other is away."""

import json
import re
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_dapo.cli.exit_codes import ExitCode
from tests.gpu.place import ON_CPU, kernel_arguments
from tests.processes import ROOT, Running

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(280)]


def used_gib() -> float:
    """Of the first GPU, by all processes."""
    asked = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    return int(subprocess.run(asked, capture_output=True, text=True, check=True, timeout=30).stdout) / 1024


class Watch:
    """The memory in use, twice a second, from a thread."""

    def __init__(self) -> None:
        self.seen = [used_gib()]
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._end.wait(0.5):
            self.seen.append(used_gib())

    def finish(self) -> dict[str, float]:
        """Before, highest, the lowest after the first time the highest was nearly reached, and at the end."""
        self._end.set()
        self._thread.join(60)
        top = max(self.seen)
        first = next(at for at, value in enumerate(self.seen) if value > 0.9 * top)
        values = {"before": self.seen[0], "highest": top, "lowest between turns": min(self.seen[first:-2] or [top])}
        return values | {"after": used_gib()}


@pytest.mark.skipif(ON_CPU, reason="a CPU's memory is not taken in turns")
@pytest.mark.parametrize("sync", ["disk", "tensor"])
def test_trainer_and_server_take_turns_in_one_gpus_memory(
    record: Callable[[str, Any], None], tmp_path: Path, sync: str
) -> None:
    """`tensor` by CUDA IPC. The run itself stops with exit code 2 where the measured free memory is not what either
    side was to leave."""
    pytest.importorskip("torch_memory_saver", reason="SGLang leaves a GPU's memory by this package")
    overrides = (
        f"run.dir={tmp_path / 'run'}",
        "run.mode=colocated",
        f"rollout.weight_sync={sync}",
        "run.rollout_steps=2",
        "run.checkpoint_every=2",
        "model.dtype=bfloat16",
        "actor.device=cuda",
        "actor.layout.data=1",
        "rollout.servers=1",
        "actor.offload.between_phases=all",
        "rollout.deterministic=false",
        "rollout.kv_cache_tokens=null",
        "rollout.memory_fraction=0.8",
        f"rollout.extra_args={json.dumps(kernel_arguments())}",
        "evaluation.limit=16",
    )
    watch = Watch()
    config = str(ROOT / "examples" / "quickstart" / "dapo.yaml")
    finished = Running("train", config, *overrides, log=tmp_path / "out.txt").finish(260)
    memory = watch.finish()
    record(f"GiB in use with {sync}, by nvidia-smi", memory)
    assert finished.code == ExitCode.FINISHED, finished.output[-3000:]
    assert finished.left_behind == ()
    found = re.search(
        r"servers leave ([\d.]+) GiB of each GPU to the trainer, rank 0: ([\d.]+) of ([\d.]+) GiB", finished.output
    )
    assert found, finished.output[-3000:]
    left, free, total = map(float, found.groups())
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    turns = {f"hand-over of step {at}, s": step["timing/handover"] for at, step in enumerate(steps, 1)}
    record("turns", {"servers leave, GiB": left, "free then, GiB": free, "of GiB": total, **turns})
    assert left > 0.6 * total, "a server with 0.8 of the memory gave most of it back"
    assert free > 0.8 * total
    assert memory["after"] < memory["before"] + 0.5
    assert len(steps) == 2
    for step in steps:
        assert step["timing/handover"] > 0.002
        assert step["mismatch/mean_abs"] < 0.05
