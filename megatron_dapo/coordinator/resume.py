"""What a run was begun with, and whether a resume is the same run.

Whatever decides which prompt stands where may not have changed, nor what its held-out accuracy is compared with. And
its records must be readable, which is better known before it starts.
"""

import json
import platform
import sys
import time
from importlib.metadata import distributions
from operator import attrgetter
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from megatron_dapo.config import Config, load_config
from megatron_dapo.config.load import differences, flatten_config, shown
from megatron_dapo.coordinator.inputs import Inputs
from megatron_dapo.data.hub import snapshot_of
from megatron_dapo.monitor.writer import read_metrics
from megatron_dapo.storage.ledger import Event, LedgerError, read_ledger
from megatron_dapo.storage.run_dir import RunDir, RunDirError
from rollout.config import StageConfig

KEPT = (
    *("run.seed", "data.order", "algorithm.group_size", "model.path", "model.dtype"),
    *("rollout.max_new_tokens", "rollout.temperature", "rollout.top_p"),
    *("actor.routing_replay", "actor.lora.rank", "actor.lora.alpha", "actor.lora.modules"),
    *("rollout.thinking_budget", "rollout.thinking_end", "rollout.thinking_mark"),
    *("data.environment", "data.observation_template"),
    *("rollout.max_turns", "rollout.max_observation_tokens", "rollout.turn_end"),
)
"""Keys that the ledger, the carried groups and a checkpoint's numbers rest on."""

MEASURED = tuple(f"evaluation.{key}" for key in ("limit", "samples", "temperature", "top_p", "greedy"))
"""Keys that the accuracy before training was measured with: another "after" would be no gain over it."""

BEFORE = "heldout_before.json"
"""File of the accuracy before training."""


def check_resume(config: Config, inputs: Inputs, run_dir: RunDir) -> list[str]:
    """Compare with the config and the prompts that the run was begun with. Returns, for each other key of `algorithm`
    that changes and for `rollout.stages`, a line with both values: a file that leaves it out may mean the default of
    an older version.

    Raises:
        RunDirError: one of them differs, and is named with both values; or a file of the run is damaged.
        MetricsError, LedgerError: its metrics or its ledger hold a line that is none; or the ledger lost some.
    """
    stored, trained = run_dir.path / "config.yaml", run_dir.latest_checkpoint() is not None
    if not trained and not (stored.exists() and (run_dir.path / "manifest.json").exists()):
        return []  # it ended before anything was trained
    data = run_dir.read_json("manifest.json", "data")["data"]
    before = load_config(stored)
    for key in (*KEPT, *(MEASURED if trained else ())):
        old, new = attrgetter(key)(before), attrgetter(key)(config)
        if old != new and snapshot_of(str(old)) != snapshot_of(str(new)):
            why = f"the run in {run_dir.path} was begun with {old}, which a resume must keep"
            raise RunDirError(f"{key} = {new}: {why}", f"{key}={old if isinstance(old, str) else json.dumps(old)}")
    latest, chosen = run_dir.latest_checkpoint(), config.run.resume_step
    reached = (latest.step if chosen is None else chosen) + 1 if latest else 0
    begun = [[stage for stage in each.rollout.stages if stage.from_step <= reached] for each in (before, config)]
    if begun[0] != begun[1]:
        kept = begun[0] + [stage for stage in config.rollout.stages if stage.from_step > reached]
        stages = json.dumps(TypeAdapter(list[StageConfig]).dump_python(kept, exclude_none=True))
        why = f"{run_dir.path} had others up to step {reached}; a resume may change later ones"
        raise RunDirError(f"rollout.stages: {why}", f"rollout.stages={stages}")
    anew = "run.resume=false", f"run.dir={run_dir.path}.new"
    order = "their order would differ, and prompts be trained twice or never"
    read = [("train", inputs.prompts, "data.path, data.mixture: the prompts", order)]
    if trained:
        gain = "accuracy before and after could not be compared"
        read.append(("heldout", inputs.heldout, "evaluation.path: the held-out problems", gain))
    for name, now, what, why in read:
        if data[name]["sha256"] != now.content_hash:
            raise RunDirError(f"{what} are not those that the run in {run_dir.path} was begun with; {why}", *anew)
    if trained:
        # What the run goes on writing, or reads at its end, must be readable.
        run_dir.read_json(BEFORE, "before", "baseline")
        read_metrics(run_dir.path)
        saved = read_ledger(run_dir.ledger, {Event.CHECKPOINT}) if run_dir.ledger.exists() else []
        there, known = {each.step for each in run_dir.checkpoints()}, {event["rollout_step"] for event in saved}
        if reached - 1 in there - known:
            lost = f"it does not hold the checkpoint of step {reached - 1}"
            raise LedgerError(f"{run_dir.ledger}: {lost}: lines are lost; restore the file from a copy")
    return [
        f"{key} = {shown(now)} from here on; the run in {run_dir.path} had {shown(then)}"
        for key, (then, now) in differences(flatten_config(before), flatten_config(config)).items()
        if not key.startswith(("run.", "monitor."))
    ]


def manifest(config: Config, inputs: Inputs, trainer: dict[str, Any]) -> dict[str, Any]:
    """Content of `manifest.json`; `trainer` is rank 0's description of itself."""
    names = ("megatron-dapo", "megatron-core", "sglang", "ray", "torch", "transformers", "transformer-engine")
    training = config.data.path or [source.path for source in config.data.mixture]
    read = {"train": (training, inputs.prompts), "heldout": (config.evaluation.path, inputs.heldout)}
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "versions": {name: next((found.version for found in distributions(name=name)), None) for name in names}
        | {"python": platform.python_version()},
        "host": {"name": platform.node(), "system": platform.platform(), "processor": platform.processor()},
        "command": sys.argv,
        "folder": str(Path.cwd()),
        "trainer": trainer,
        "model": {"path": config.model.path, "config": json.loads(Path(config.model.path, "config.json").read_text())},
        "data": {
            name: {"path": path, "sha256": problems.content_hash, "rows": problems.summary()}
            for name, (path, problems) in read.items()
        },
        "stop_token_ids": list(inputs.text.stop_token_ids),
    }
