"""Models and datasets by their name on the Hugging Face hub: `hf://OWNER/NAME`, `hf://datasets/OWNER/NAME/FILE`."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

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
    data, evaluation = config.data, config.evaluation
    mixture = tuple(
        replace(each, path=local_path(each.path, f"data.mixture.{number}.path"))
        for number, each in enumerate(data.mixture)
    )
    return replace(
        config,
        model=replace(config.model, path=local_path(config.model.path, "model.path")),
        data=replace(data, path=data.path and local_path(data.path, "data.path"), mixture=mixture),
        evaluation=replace(evaluation, path=local_path(evaluation.path, "evaluation.path")),
    )


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
    command += [f"--include={pattern}" for pattern in wanted]
    command += [f"--revision={address['revision']}"] if address["revision"] else []
    environment = os.environ | {"HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_UPDATE_CHECK": "1"}
    print(f"{setting} = {path}: taken from Hugging Face's cache, or the hub", file=sys.stderr, flush=True)
    done = subprocess.run([*command, address["name"]], stdout=subprocess.PIPE, text=True, env=environment)
    folder = done.stdout.strip()
    if done.returncode or not folder:
        by_hand = _by_hand(address["name"], kind, setting)
        raise ConfigError(f"{setting} = {path}: not in the cache, and the hub did not give it (why: above){by_hand}")
    return str(Path(folder, address["file"] or ""))


def download_hint(path: str | Path, kind: str, setting: str) -> str:
    """The end of a message that `path` is not there: how to get what has this name on the hub. Empty if none can."""
    if not re.fullmatch(r"\w[\w.-]*/[\w.-]+", str(path)) or Path(path).suffix in (
        ".jsonl",
        ".json",
        ".csv",
        ".parquet",
    ):
        return ""
    address = f"hf://{'datasets/' if kind == 'dataset' else ''}{path}"
    return f"; a {kind} of the hub is {setting}={address}{_by_hand(str(path), kind, setting)}"


def _by_hand(name: str, kind: str, setting: str) -> str:
    target, option = f"{kind}s/{Path(name).name}", "--repo-type dataset " if kind == "dataset" else ""
    return (
        f"; without a network here, fetch it elsewhere with `hf download {name} {option}--local-dir {target}`, copy "
        f"that folder and set {setting}={target}"
    )
