"""A resumed run must be the same run: whatever decides which prompt stands where may not have changed."""

import json
from operator import attrgetter

from megatron_dapo.config import Config, load_config
from megatron_dapo.coordinator.inputs import Inputs
from megatron_dapo.coordinator.run_dir import RunDir, RunDirError

KEPT = ("run.seed", "algorithm.group_size", "model.path", "rollout.max_new_tokens")
"""Keys that the ledger and the carried groups rest on."""


def check_resume(config: Config, inputs: Inputs, run_dir: RunDir) -> None:
    """Compare with the config and the prompts that the run was begun with.

    Raises:
        RunDirError: one of them differs; names it with both values.
    """
    stored = run_dir.path / "config.yaml"
    manifest = run_dir.path / "manifest.json"
    if not (stored.exists() and manifest.exists()):
        return  # it ended before anything was trained
    before = load_config(stored)
    for key in KEPT:
        old, new = attrgetter(key)(before), attrgetter(key)(config)
        if old != new:
            raise RunDirError(
                f"{key} = {new}: the run in {run_dir.path} was begun with {old}, which a resume must keep"
            )
    if json.loads(manifest.read_text())["data"]["train"]["sha256"] != inputs.prompts.content_hash:
        raise RunDirError(
            f"data.path, data.mixture: the prompts are not those that the run in {run_dir.path} was begun with; "
            "their order would differ, and prompts be trained twice or never"
        )
