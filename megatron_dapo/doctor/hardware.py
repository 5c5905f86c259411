"""GPUs, their links, and the library that ties them together."""

import importlib.util
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_dapo.config import Config
from megatron_dapo.doctor.probing import ASK_DEADLINE_S, Finding, Node, failed, passed, warning
from megatron_dapo.plan.scenario import share_gpus

_BUSY_SHARE = 0.1
_FIELDS = (
    "name,memory.total,memory.used,driver_version,compute_mode,mig.mode.current,ecc.errors.uncorrected.volatile.total"
)
_QUERY = ("nvidia-smi", f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits")


def needed_gpus(config: Config) -> int:
    """Of trainer and own servers together."""
    servers = 0 if config.rollout.urls else config.rollout.servers * config.rollout.tensor_parallel
    return config.actor.layout.world_size + (0 if share_gpus(config) else servers)


@dataclass(frozen=True, slots=True)
class Gpu:
    """One that nvidia-smi lists; memory in MiB."""

    name: str
    memory: float
    used: float
    driver: str
    compute_mode: str
    """Default, Exclusive_Process or Prohibited."""
    mig: bool
    uncorrected: float
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
    found = f"ends with {answer.code}: {last}" if answer.code else f"lists no GPU that can be read: {last}"
    if answer.code is None:
        found = answer.error.replace("no end", "gives no answer")
    fix = "drain the node; reload the driver (modprobe nvidia; dmesg | grep NVRM) or reboot; without: actor.device=cpu"
    return [], failed("GPUs", f"nvidia-smi is here but {found}", fix)


def gpus_of(text: str) -> list[Gpu]:
    """Those of nvidia-smi's rows that are whole."""
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    whole = [row for row in rows if len(row) == len(_FIELDS.split(","))]
    return [
        Gpu(name, _number(memory), _number(used), driver, mode, mig == "Enabled", _number(errors))
        for name, memory, used, driver, mode, mig, errors in whole
    ]


def _number(text: str) -> float:
    """0 for what a GPU does not report, "[N/A]"."""
    return float(text) if re.fullmatch(r"\d+(\.\d+)?", text) else 0.0


def check_gpus(gpus: Sequence[Gpu], config: Config | None, *, on_cluster: bool, cores: int) -> list[Finding]:
    """How many there are, whether they suffice, whether others use them.

    Args:
        on_cluster: several nodes may share the run (RAY_ADDRESS is set), so this one need not hold it.
        cores: of this machine's CPUs.
    """
    if not gpus:
        return [_without_gpus(config, on_cluster=on_cluster, cores=cores)]
    kinds = ", ".join(sorted({gpu.name for gpu in gpus}))
    shown = f"{len(gpus)} x {kinds}, {gpus[0].memory:.0f} MiB, driver {gpus[0].driver}"
    needed = 0 if config is None or on_cluster else needed_gpus(config)
    found = []
    if needed > len(gpus):
        fix = "lower actor.layout or rollout.servers, or join a Ray cluster (RAY_ADDRESS)"
        found.append(failed("GPUs", f"{shown}; trainer and servers need {needed}", fix))
    if "," in kinds:
        found.append(warning("GPUs", f"several kinds: {kinds}", "use equal ones: the slowest sets the pace"))
    if busy := _numbers([gpu.used > _BUSY_SHARE * gpu.memory for gpu in gpus]):
        fix = "end what uses it: nvidia-smi lists the processes"
        found.append(warning("GPUs", f"{shown}; memory of number {busy} is in use", fix))
    return [*found, *_states(gpus, config)] or [passed("GPUs", shown)]


def _states(gpus: Sequence[Gpu], config: Config | None) -> Iterator[Finding]:
    """What an administrator has set, or a broken memory, in the way of a run."""
    if away := _numbers([gpu.compute_mode == "Prohibited" for gpu in gpus]):
        yield failed("GPUs", f"compute mode of {away} is Prohibited", "nvidia-smi -c 0 (as root)")
    if alone := _numbers([gpu.compute_mode == "Exclusive_Process" for gpu in gpus]):
        found = f"compute mode of {alone} is Exclusive_Process: one process a GPU"
        make = failed if config is not None and share_gpus(config) else warning
        yield make("GPUs", found, "nvidia-smi -c 0 (as root); run.mode: colocated has two processes a GPU")
    if parted := _numbers([gpu.mig for gpu in gpus]):
        found = f"MIG is on for {parted}: NCCL joins no two of its instances"
        yield warning("GPUs", found, "nvidia-smi -mig 0 (as root), or ask for whole GPUs")
    if broken := _numbers([gpu.uncorrected > 0 for gpu in gpus]):
        fix = "take the node out of use, reset the GPU (nvidia-smi -q -d ECC)"
        yield warning("GPUs", f"uncorrected memory errors on {broken}", fix)


def _numbers(wrong: Sequence[bool]) -> str:
    return ", ".join(str(number) for number, one in enumerate(wrong) if one)


def _without_gpus(config: Config | None, *, on_cluster: bool, cores: int) -> Finding:
    if config is None or on_cluster:
        return passed("GPUs", "none on this machine")
    if config.actor.device == "cuda":
        return failed("GPUs", "none is visible", "set actor.device=auto for a run on the CPU, or install the driver")
    if (processes := needed_gpus(config)) > 2 * cores:
        found = f"none, and {processes} processes of trainer and servers are too many for {cores} cores"
        fix = "run it where the GPUs are: megatron-dapo slurm writes the job; or lower actor.layout and rollout.servers"
        return failed("GPUs", found, fix)
    return passed("GPUs", "none: the run takes the CPU")


def check_interconnect(topology: str) -> Iterator[Finding]:
    """NVLink between the GPUs of this node; `topology`: what `nvidia-smi topo -m` prints."""
    links = [re.split(r"\s+", line)[1:] for line in topology.splitlines() if re.match(r"GPU\d+\s", line)]
    count = len(links)
    between = {links[row][column] for row in range(count) for column in range(count) if row != column}
    slow = ", ".join(sorted(link for link in between if not re.fullmatch(r"NV\d+", link)))
    if slow:
        fix = "keep actor.layout.tensor within GPUs that NVLink joins (nvidia-smi topo -m)"
        yield warning("interconnect", f"{count} GPUs, some linked by {slow} only", fix)
    elif between:
        yield passed("interconnect", f"{count} GPUs, all joined by NVLink ({', '.join(sorted(between))})")


def check_collectives() -> Finding:
    """gloo, which a run on CPUs takes."""
    if importlib.util.find_spec("torch") is None:
        return failed("collectives", "torch is not installed", "make install")
    import torch

    if torch.distributed.is_available() and torch.distributed.is_gloo_available():
        return passed("collectives", "gloo")
    return failed("collectives", "this torch has no gloo", "install another build of torch")
