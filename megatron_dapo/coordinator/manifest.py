"""What a run was started with: versions, host, model, data. Written once, beside the config."""

import json
import platform
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from megatron_dapo.config import Config
from megatron_dapo.coordinator.inputs import Inputs


def manifest(config: Config, inputs: Inputs, trainer: dict[str, Any]) -> dict[str, Any]:
    """Content of `manifest.json`; `trainer` is rank 0's description of itself."""
    names = ("megatron-dapo", "megatron-core", "sglang", "ray", "torch", "transformers", "transformer-engine")
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "versions": {name: _version(name) for name in names} | {"python": platform.python_version()},
        "host": {"name": platform.node(), "system": platform.platform(), "processor": platform.processor()},
        "command": sys.argv,
        "trainer": trainer,
        "model": {
            "path": config.model.path,
            "config": json.loads((Path(config.model.path) / "config.json").read_text()),
        },
        "data": {
            "train": {
                "path": config.data.path or [source.path for source in config.data.mixture],
                "sha256": inputs.prompts.content_hash,
                "rows": inputs.prompts.summary(),
            },
            "heldout": {
                "path": config.evaluation.path,
                "sha256": inputs.heldout.content_hash,
                "rows": inputs.heldout.summary(),
            },
        },
        "stop_token_ids": list(inputs.text.stop_token_ids),
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def one_line(described: dict[str, Any]) -> str:
    """The trainer's description for the console."""
    return "trainer: " + ", ".join(f"{key} {value}" for key, value in described.items() if isinstance(value, str | int))
