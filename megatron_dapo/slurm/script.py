"""The batch script of a run, from its config and a few facts about the cluster."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path

from megatron_dapo.config import Config, ConfigError
from megatron_dapo.monitor.console import text_page
from megatron_dapo.plan.scenario import share_gpus

_OWN = " --time --signal --nodes --ntasks --ntasks-per-node --tasks-per-node --cpus-per-task -t -N -n -c"
"""Options of sbatch that the script sets and goes by, each after a blank."""


@dataclass(frozen=True, kw_only=True)
class SlurmOptions:
    """What the config cannot know."""

    gpus_per_node: int
    """0: a run on CPUs."""
    cpus_per_node: int
    time: str
    """Time limit of one job, as Slurm writes it."""
    nodes: int | None = None
    """None: as few as trainer and servers fit on."""
    sbatch: tuple[str, ...] = ()
    """More options of sbatch: "--partition=h100"."""
    container: str | None = None
    """Image for enroot/pyxis, or a .sif file for Apptainer; None: the environment of this Python, seen by all nodes."""
    mounts: str | None = None
    """None: what the config names, the run directory and the current folder."""
    setup: tuple[str, ...] = ()
    """Shell lines before the run starts: "module load cuda". One that fails ends the job."""
    python_path: tuple[str, ...] = ()
    """Folders of PYTHONPATH, for a verifier of one's own."""


def limit_s(time: str) -> int | None:
    """Seconds of a time limit as Slurm writes it ("90", "30:00", "24:00:00", "2-12", "2-12:30"); None: without limit,
    as 0 asks for too.

    Raises:
        ConfigError: it is none.
    """
    if time.upper() in ("UNLIMITED", "INFINITE"):
        return None
    if not re.fullmatch(r"(\d+-)?\d+(:\d+){0,2}", time):
        raise ConfigError(f"--time {time!r}: no time limit of Slurm's; write it as 24:00:00 or 2-12:00:00")
    days, dash, clock = time.rpartition("-")
    numbers = [int(number) for number in clock.split(":")]
    units = (3600, 60, 1) if dash or len(numbers) == 3 else (60, 1)
    return int(days or 0) * 86400 + sum(n * unit for n, unit in zip(numbers, units, strict=False)) or None


def used_of_nodes(config: Config, options: SlurmOptions) -> list[int]:
    """GPUs, or CPUs of a run on CPUs, that are used on each of the fewest nodes that hold the trainer's tensor-parallel
    groups, none of which spans two nodes, and the servers. Servers may be on the trainer's GPUs (`share_gpus`).

    Raises:
        ConfigError: a group is larger than a node, or such a server has no equal parts.
    """
    layout, rollout = config.actor.layout, config.rollout
    shared = share_gpus(config) and (options.gpus_per_node > 0 or config.run.mode == "colocated")
    size, kind = options.gpus_per_node or options.cpus_per_node, "GPUs" if options.gpus_per_node else "CPUs"
    if config.run.mode == "colocated" and options.gpus_per_node:
        config.check_shared_gpus()
    whole = max(layout.tensor, rollout.tensor_parallel) if shared and options.gpus_per_node else layout.tensor
    pieces = [whole] * (layout.world_size // whole)
    if layout.tensor > size:
        one = f"actor.layout.tensor = {layout.tensor}: such a group stands on one node"
        raise ConfigError(f"{one}, and a node has {size} {kind}; lower it")
    parts = 1 if rollout.urls else config.nodes_of_server(size)
    pieces += [rollout.tensor_parallel // parts] * (0 if shared or rollout.urls else rollout.servers * parts)
    room = [size] * len(pieces)  # of a node for each, more than are needed
    for piece in sorted(pieces, reverse=True):
        room[next(at for at, free in enumerate(room) if free >= piece)] -= piece
    return [size - free for free in room if free < size]


def named_paths(config: Config) -> list[str]:
    """Model, data and key files, as the config names them."""
    data, reward = config.data, config.reward
    keys = (config.rollout.api_key_file, reward.remote.key_file, reward.remote_environment.key_file)
    given = (config.model.path, config.rollout.speculative.draft_model, data.path, config.evaluation.path, *keys)
    return [text for text in (*given, *(part.path for part in data.mixture)) if text]


def not_seen(config: Config) -> list[str]:
    """Notes on what the config names and this machine does not see; the nodes may."""
    paths = [Path(text).absolute() for text in named_paths(config) if not text.startswith("hf://")]
    paths.append(Path("/", *Path(config.run.dir).absolute().parts[1:2]))  # its disk: what is below is made here
    away = [path for path in paths if not os.path.exists(path) and not any(path.parent.glob(path.name))]
    return [f"{path}: not seen from this machine; every node must see it" for path in dict.fromkeys(away)]


def mounted(config: Config, *others: Path) -> str:
    """`FROM:TO,...` of `others`, model and data, seen here or not, each under its own name. What a link leads to is
    mounted too: a model's folder may hold nothing but links."""
    model, texts = Path(config.model.path), named_paths(config)
    paths = [Path(text) for text in texts if not text.startswith("hf://")]
    named = {path.parent if not os.path.exists(path) and set(path.name) & set("*?[") else path for path in paths}
    if len(paths) < len(texts):
        home = os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface")
        cache = Path(os.environ.get("HF_HUB_CACHE", home))
        cache.mkdir(parents=True, exist_ok=True)
        named.add(cache)
    named |= {file.resolve().parent for file in (model.iterdir() if model.is_dir() else ())}
    places = {place for path in {*others, *named} for place in (path.absolute(), path.resolve())}
    return ",".join(f"{place}:{place}" for place in sorted(places) if places.isdisjoint(place.parents))


def batch_script(file: Path, overrides: Sequence[str], config: Config, options: SlurmOptions, warn_s: int) -> str:
    """The script's text. The run always resumes: a fresh run directory starts at its beginning.

    Args:
        warn_s: seconds before the time limit at which the run is told to save.

    Raises:
        ConfigError: the run does not fit on `options.nodes` nodes, would save at once or go back at every start, or a
            name or a line of `options.setup` would be read as lines of the script.
    """
    if (limit := limit_s(options.time)) and warn_s >= limit:
        short = f"the time limit --time {options.time} is no longer than that; raise it, or lower the other"
        raise ConfigError(f"--warn {warn_s}: {short} (--warn={ceil(limit / 3)})")
    if config.run.resume_step is not None:
        remedy = "every start of the job would go back to it; go back once by `megatron-dapo train`, without it here"
        raise ConfigError(f"run.resume_step = {config.run.resume_step}: {remedy}")
    used = used_of_nodes(config, options)
    if (nodes := options.nodes or len(used)) < len(used):
        raise ConfigError(f"--nodes {nodes}: trainer and servers need at least {len(used)} nodes of this size")
    kept = [override for override in overrides if not override.startswith(("run.resume", "run.dir="))]
    run_dir, cwd = Path(config.run.dir).resolve(), Path.cwd()
    for text in (str(run_dir), str(file), str(cwd), *options.sbatch):
        if not text.isprintable():  # no quotes protect these lines of the script: the rest of one would be run
            raise ConfigError(f"{text!r}: holds a line break or another control character; choose another name")
    if "\\" in str(run_dir):  # in --output sbatch and slurmd each read them in their own way
        raise ConfigError(f"run.dir = {run_dir}: Slurm takes no backslash in the path of its log; choose another name")
    for text in options.sbatch:
        # sbatch takes the beginning of a name for the name.
        if any(f" {name}" in _OWN for name in re.findall(r"(?<!\S)(?:--[\w-]+|-[tNnc])", text)):
            raise ConfigError(f"--sbatch={text}: would replace the script's own; see --time, --nodes, --cpus-per-node")
    for line in options.setup:
        # The brace stays open after an open quote, a here-document, and a line that the next one continues.
        read = subprocess.run(["bash", "-nO", "extglob"], input=f"{{ :; {line}\n}}", text=True, capture_output=True)
        if read.returncode:
            raise ConfigError(f"--setup {line}: bash cannot read it by itself; give whole commands, with quotes closed")
    # Of a run on one node only its GPUs, with their part of the cores; else whole nodes.
    gpus = used[0] if nodes == 1 and options.gpus_per_node else options.gpus_per_node
    cpus = max(1, options.cpus_per_node * gpus // options.gpus_per_node) if gpus else options.cpus_per_node
    others = (cwd, run_dir, file, *map(Path, options.python_path))
    mounts = options.mounts or (mounted(config, *others) if options.container else "")
    train = ["train", str(file.resolve()), *kept, f"run.dir={run_dir}", "run.resume=true"]
    named = {"options": options, "nodes": nodes, "gpus": gpus, "cpus": cpus, "mounts": mounts, "warn_s": warn_s}
    return text_page(
        "megatron_dapo.slurm",
        "run.sbatch.j2",
        **named,
        quote=shlex.quote,
        # `--NAME=VALUE` is one word, also where the value has blanks; quotes of the user's own stay.
        more=[shlex.quote(s) if re.fullmatch(r"""--[\w-]+=((?! -\S)[^"'])*""", s) else s for s in options.sbatch],
        whole=nodes > 1 or used[0] == (options.gpus_per_node or options.cpus_per_node),
        asks_memory=any(line.startswith("--mem") for line in options.sbatch),
        asks_gpus=any(re.match(r"--gpus|-G|--gres[= ](.*,)?(gres/)?gpu\b", line) for line in options.sbatch),
        config=file.name,
        job_name=re.sub(r"[^\w.+-]", "_", run_dir.name) or "run",
        run_dir=str(run_dir),
        cwd=str(cwd),
        python="python" if options.container else sys.executable,
        start_deadline_s=ceil(config.run.start_deadline_s),
        train=shlex.join(train),
    )
