"""Models and datasets by their name on the Hugging Face hub: `hf://OWNER/NAME`, `hf://datasets/OWNER/NAME/FILE`."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_dapo.config import Config, ConfigError

_ADDRESS = re.compile(
    r"hf://(?P<datasets>datasets/)?(?P<name>(?!datasets/)[\w.-]+/[\w.-]+)(?:@(?P<revision>[^/]+))?(?:/(?P<file>.+))?"
)
_MODEL_FILES = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt")


def with_local_paths(config: Config) -> Config:
    """`config` with local paths in place of `hf://` ones; what the cache lacks is downloaded first.

    Raises:
        ConfigError: the hub does not answer or has no such files.
    """
    mixture = tuple(_local(each, f"data.mixture.{number}") for number, each in enumerate(config.data.mixture))
    data, model = replace(_local(config.data, "data"), mixture=mixture), _local(config.model, "model")
    return replace(config, model=model, data=data, evaluation=_local(config.evaluation, "evaluation"))


def _local(section: Any, name: str) -> Any:
    return replace(section, path=section.path and local_path(section.path, f"{name}.path"))


def local_path(path: str, setting: str) -> str:
    """The path itself, or for an `hf://` address where its files lie in Hugging Face's cache, in a folder named by the
    commit. Downloads them, with progress on stderr, in a process of its own: a run itself never speaks to a hub.

    Raises:
        ConfigError: no such address, the hub does not answer, or it has no such files.
    """
    if not path.startswith("hf://"):
        return path
    address = _ADDRESS.fullmatch(path)
    if address is None or (address["file"] and not address["datasets"]):
        raise ConfigError(f"{setting} = {path}: write hf://OWNER/NAME, or hf://datasets/OWNER/NAME/FILE for prompts")
    kind, wanted = ("dataset", [address["file"] or "*"]) if address["datasets"] else ("model", _MODEL_FILES)
    command = [sys.executable, "-m", "huggingface_hub.cli.hf", "download", "--quiet", f"--repo-type={kind}"]
    command += [f"--revision={address['revision'] or 'main'}", *(f"--include={pattern}" for pattern in wanted)]
    environment = os.environ | {"HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_UPDATE_CHECK": "1"}
    print(f"{setting} = {path}: taken from Hugging Face's cache, or the hub", file=sys.stderr, flush=True)
    done = subprocess.run([*command, address["name"]], stdout=subprocess.PIPE, text=True, env=environment)
    if done.returncode or not done.stdout.strip():
        by_hand = _by_hand(address["name"], kind, setting)
        raise ConfigError(f"{setting} = {path}: not in the cache, and the hub did not give it (why: above){by_hand}")
    return str(Path(done.stdout.strip(), address["file"] or ""))


def download_hint(path: str | Path, kind: str, setting: str) -> str:
    """The end of a message that `path` is not there: how to get what has this name on the hub. Empty if none can."""
    if not re.fullmatch(r"\w[\w.-]*/[\w.-]+(?<!\.jsonl)(?<!\.json)(?<!\.csv)(?<!\.parquet)", str(path)):
        return ""
    address = f"hf://{'datasets/' if kind == 'dataset' else ''}{path}"
    return f"; for a {kind} of the Hugging Face hub set {setting}={address}{_by_hand(str(path), kind, setting)}"


def model_hint(folder: Path) -> str:
    """What to do where `folder` holds no model."""
    return f"give the folder of a model in Hugging Face format{download_hint(folder, 'model', 'model.path')}"


def _by_hand(name: str, kind: str, setting: str) -> str:
    target, option = f"{kind}s/{Path(name).name}", "--repo-type dataset " if kind == "dataset" else ""
    command = f"hf download {name} {option}--local-dir {target}"
    return f"; without a network here, run `{command}` elsewhere, copy that folder and set {setting}={target}"
