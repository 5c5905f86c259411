"""GPUs, their links, and the library that ties them together."""

import importlib.util
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_dapo.config import Config
from megatron_dapo.doctor.node import ASK_DEADLINE_S, Ask, Node
from megatron_dapo.doctor.result import Finding, failed, passed, warning
from megatron_dapo.plan.plan import share_gpus

_BUSY_SHARE = 0.1
_FIELDS = (
    "name",
    "memory.total",
    "memory.used",
    "driver_version",
    "compute_mode",
    "mig.mode.current",
    "ecc.errors.uncorrected.volatile.total",
)
_QUERY = ("nvidia-smi", f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits")


def needed_gpus(config: Config) -> int:
    """Of trainer and own servers together."""
    servers = 0 if config.rollout.urls else config.rollout.servers * config.rollout.tensor_parallel
    return config.actor.layout.world_size + (0 if share_gpus(config) else servers)


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One that nvidia-smi lists; memory in MiB."""

    name: str
    memory: float
    used: float
    driver: str
    compute_mode: str
    """Default, Exclusive_Process or Prohibited."""
    mig: bool
    uncorrected: int
    """Memory errors since the driver was loaded that ECC could not correct."""


def probe_gpus(node: Node) -> tuple[list[Gpu], Finding | None]:
    """Those that nvidia-smi lists, or why an nvidia-smi that is here lists none; neither without nvidia-smi."""
    if node.which(_QUERY[0]) is None:
        return [], None
    answer = node.run(_QUERY, ASK_DEADLINE_S)
    said = f"{answer.output}\n{answer.error}"
    gpus = gpus_of(answer.output) if answer.code == 0 else []
    if gpus:
        return gpus, None
    if "No devices were found" in said:  # as on a login node
        return [], warning("GPUs", "nvidia-smi is here but finds no device", "run this on the node that has the GPUs")
    last = (said.strip().splitlines() or ["no output"])[-1]
    if answer.code is None:
        found = answer.error.replace("no end", "gives no answer")
    elif answer.code:
        found = f"ends with {answer.code}: {last}"
    else:
        found = f"lists no GPU that can be read: {last}"
    fix = "drain the node; reload the driver (modprobe nvidia; dmesg | grep NVRM) or reboot; without: actor.device=cpu"
    return [], failed("GPUs", f"nvidia-smi is here but {found}", fix)


def gpus_of(text: str) -> list[Gpu]:
    """Those of nvidia-smi's rows that are whole."""
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    return [
        Gpu(
            name=row[0],
            memory=_number(row[1]),
            used=_number(row[2]),
            driver=row[3],
            compute_mode=row[4],
            mig=row[5] == "Enabled",
            uncorrected=int(_number(row[6])),
        )
        for row in rows
        if len(row) == len(_FIELDS)
    ]


def _number(text: str) -> float:
    """0 for what a GPU does not report, "[N/A]"."""
    return float(text) if re.fullmatch(r"\d+(\.\d+)?", text) else 0.0


def check_gpus(gpus: Sequence[Gpu], config: Config | None, *, on_cluster: bool, cores: int) -> Iterator[Finding]:
    """How many there are, whether they suffice, whether others use them.

    Args:
        on_cluster: several nodes may share the run (RAY_ADDRESS is set), so this one need not hold it.
        cores: of this machine's CPUs.
    """
    if not gpus:
        yield _without_gpus(config, on_cluster=on_cluster, cores=cores)
        return
    kinds = sorted({gpu.name for gpu in gpus})
    shown = f"{len(gpus)} x {', '.join(kinds)}, {gpus[0].memory:.0f} MiB, driver {gpus[0].driver}"
    busy = [str(at) for at, gpu in enumerate(gpus) if gpu.used > _BUSY_SHARE * gpu.memory]
    short = config is not None and not on_cluster and needed_gpus(config) > len(gpus)
    if config is not None and short:
        fix = "lower actor.layout or rollout.servers, or join a Ray cluster (RAY_ADDRESS)"
        yield failed("GPUs", f"{shown}; trainer and servers need {needed_gpus(config)}", fix)
    if len(kinds) > 1:
        yield warning("GPUs", f"several kinds: {', '.join(kinds)}", "use equal ones: the slowest sets the pace")
    if busy:
        yield warning(
            "GPUs",
            f"{shown}; memory of number {', '.join(busy)} is in use",
            "end what uses it: nvidia-smi lists the processes",
        )
    states = list(_states(gpus, config))
    yield from states
    if not (short or busy or states or len(kinds) > 1):
        yield passed("GPUs", shown)


def _states(gpus: Sequence[Gpu], config: Config | None) -> Iterator[Finding]:
    """What an administrator has set, or a broken memory, in the way of a run."""
    shared = config is not None and share_gpus(config)
    numbered = [(str(at), gpu) for at, gpu in enumerate(gpus)]
    if away := [at for at, gpu in numbered if gpu.compute_mode == "Prohibited"]:
        yield failed("GPUs", f"compute mode of {', '.join(away)} is Prohibited", "nvidia-smi -c 0 (as root)")
    if alone := [at for at, gpu in numbered if gpu.compute_mode == "Exclusive_Process"]:
        found = f"compute mode of {', '.join(alone)} is Exclusive_Process: one process a GPU"
        make = failed if shared else warning
        yield make("GPUs", found, "nvidia-smi -c 0 (as root); run.mode: colocated has two processes a GPU")
    if parted := [at for at, gpu in numbered if gpu.mig]:
        found = f"MIG is on for {', '.join(parted)}: NCCL joins no two of its instances"
        yield warning("GPUs", found, "nvidia-smi -mig 0 (as root), or ask for whole GPUs")
    if broken := [at for at, gpu in numbered if gpu.uncorrected]:
        found = f"uncorrected memory errors on {', '.join(broken)}"
        yield warning("GPUs", found, "take the node out of use, reset the GPU (nvidia-smi -q -d ECC)")


def _without_gpus(config: Config | None, *, on_cluster: bool, cores: int) -> Finding:
    if config is None or on_cluster:
        return passed("GPUs", "none on this machine")
    if config.actor.device == "cuda":
        return failed("GPUs", "none is visible", "set actor.device=auto for a run on the CPU, or install the driver")
    processes = needed_gpus(config)
    if processes > 2 * cores:
        return failed(
            "GPUs",
            f"none, and {processes} processes of trainer and servers are too many for {cores} cores",
            "run it where the GPUs are: megatron-dapo slurm writes the job; or lower actor.layout and rollout.servers",
        )
    return passed("GPUs", "none: the run takes the CPU")


def check_interconnect(ask: Ask) -> Iterator[Finding]:
    """NVLink between the GPUs of this node."""
    topology = ask(("nvidia-smi", "topo", "-m"))
    links = [re.split(r"\s+", line)[1:] for line in (topology or "").splitlines() if re.match(r"GPU\d+\s", line)]
    count = len(links)
    if count < 2:
        return
    between = {links[row][column] for row in range(count) for column in range(count) if row != column}
    slow = sorted(link for link in between if not re.fullmatch(r"NV\d+", link))
    if slow:
        yield warning(
            "interconnect",
            f"{count} GPUs, some linked by {', '.join(slow)} only",
            "keep actor.layout.tensor within GPUs that NVLink joins (nvidia-smi topo -m)",
        )
    else:
        yield passed("interconnect", f"{count} GPUs, all joined by NVLink ({', '.join(sorted(between))})")


def check_collectives() -> Finding:
    """gloo, which a run on CPUs takes."""
    if importlib.util.find_spec("torch") is None:
        return failed("collectives", "torch is not installed", "make install")
    import torch

    if torch.distributed.is_available() and torch.distributed.is_gloo_available():
        return passed("collectives", "gloo")
    return failed("collectives", "this torch has no gloo", "install another build of torch")
