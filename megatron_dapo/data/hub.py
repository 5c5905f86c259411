"""Models and datasets by their name on the Hugging Face hub: `hf://OWNER/NAME`, `hf://datasets/OWNER/NAME/FILE`."""

import json
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
    own = {"HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_UPDATE_CHECK": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "0"}
    print(f"{setting} = {path}: taken from Hugging Face's cache, or the hub", file=sys.stderr, flush=True)
    command.append(address["name"])
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=os.environ | own, timeout=DOWNLOAD_S)
    if done.returncode or not done.stdout.strip():
        folder = f"{kind}s/{Path(address['name']).name}"
        by_hand = f"hf download {address['name']} --repo-type {kind} --local-dir {folder}"
        remedy = f"without a network here, run `{by_hand}` elsewhere, copy that folder and set {setting}={folder}"
        raise ConfigError(f"{setting} = {path}: not in the cache, and not from the hub (why: above); {remedy}")
    return str(Path(done.stdout.strip(), address["file"] or ""))


def read_json(file: Path) -> dict[str, Any]:
    """The object in a file of a model's folder. Raises ConfigError: there is none."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        wanted = f"give the folder of a model in Hugging Face format{begins(file.parent)}"
        raise ConfigError(f"{file}: {error.strerror}; {wanted}, or hf://OWNER/NAME of the Hugging Face hub") from None
    except ValueError as error:
        raise ConfigError(f"{file}: no JSON ({error}); get the file anew") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{file}: no JSON object; get the file anew")
    return content


def begins(path: Path) -> str:
    """Of a relative path, where it begins."""
    return "" if path.is_absolute() else f" (relative paths begin at {Path.cwd()})"
