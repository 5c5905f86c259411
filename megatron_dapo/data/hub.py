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


DOWNLOAD_S = 12 * 3600
"""Seconds that one download may take."""


def with_local_paths(config: Config, stored: Path | None = None) -> Config:
    """`config` with local paths in place of `hf://` ones; what the cache lacks is downloaded first.

    Args:
        stored: config.yaml of a run that is resumed: an address without a revision keeps the commit of that run.

    Raises:
        ConfigError: the hub does not answer or has no such files.
    """
    before = stored.read_text(encoding="utf-8") if stored and stored.is_file() else ""

    def local(section: Any, name: str) -> Any:
        return replace(section, path=section.path and local_path(pinned(section.path, before), f"{name}.path"))

    mixture = tuple(local(each, f"data.mixture.{number}") for number, each in enumerate(config.data.mixture))
    data, model = replace(local(config.data, "data"), mixture=mixture), local(config.model, "model")
    return replace(config, model=model, data=data, evaluation=local(config.evaluation, "evaluation"))


def pinned(path: str, before: str) -> str:
    """`path`; of an `hf://` address without a revision, with the commit that the text `before` has of it."""
    address = _ADDRESS.fullmatch(path)
    if address is None or address["revision"]:
        return path
    kind, name = "datasets" if address["datasets"] else "models", address["name"]
    found = re.search(rf"/{kind}--{re.escape(name.replace('/', '--'))}/snapshots/(\w+)", before)
    rest = f"/{address['file']}" if address["file"] else ""
    return f"hf://{address['datasets'] or ''}{name}@{found[1]}{rest}" if found else path


def snapshot_of(path: str) -> str:
    """What names a model, wherever Hugging Face's cache is: its repository and commit; of another folder its path."""
    found = re.search(r"/(models--[^/]+/snapshots/\w+)/?$", path)
    return found[1] if found else path


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
    environment = os.environ | {
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_UPDATE_CHECK": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "0",
    }
    print(f"{setting} = {path}: taken from Hugging Face's cache, or the hub", file=sys.stderr, flush=True)
    try:
        command.append(address["name"])
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, timeout=DOWNLOAD_S)
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{setting} = {path}: the download took over {DOWNLOAD_S} s; start again to go on") from None
    if done.returncode or not done.stdout.strip():
        by_hand = _by_hand(address["name"], kind, setting)
        raise ConfigError(f"{setting} = {path}: not in the cache, and the hub did not give it (why: above){by_hand}")
    return str(Path(done.stdout.strip(), address["file"] or ""))


def download_hint(path: Path, kind: str, setting: str) -> str:
    """The end of a message that `path` is not there: where a relative one begins, and how to get what has this name on
    the hub, if anything can."""
    begins = "" if path.is_absolute() else f" (relative paths begin at {Path.cwd()})"
    name = r"(?!(?:models|datasets|data|runs)/)\w[\w.-]*/[\w.-]+(?<!\.jsonl)(?<!\.json)(?<!\.csv)(?<!\.parquet)"
    if not re.fullmatch(name, str(path)):
        return begins
    address = f"hf://{'datasets/' if kind == 'dataset' else ''}{path}"
    return f"{begins}; for a {kind} of the Hugging Face hub set {setting}={address}{_by_hand(str(path), kind, setting)}"


def model_hint(folder: Path) -> str:
    """What to do where `folder` holds no model."""
    return f"give the folder of a model in Hugging Face format{download_hint(folder, 'model', 'model.path')}"


def _by_hand(name: str, kind: str, setting: str) -> str:
    target, option = f"{kind}s/{Path(name).name}", "--repo-type dataset " if kind == "dataset" else ""
    command = f"hf download {name} {option}--local-dir {target}"
    return f"; without a network here, run `{command}` elsewhere, copy that folder and set {setting}={target}"
