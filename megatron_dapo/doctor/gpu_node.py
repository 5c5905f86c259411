"""All that only a run on GPUs needs of a machine."""

from collections.abc import Iterator, Sequence

from megatron_dapo.config import Config
from megatron_dapo.doctor.hardware import Gpu, check_interconnect, needed_gpus
from megatron_dapo.doctor.kernels import (
    check_compilers,
    check_imports,
    check_pins,
    check_torch,
    parts_of,
    probe_packages,
    probe_torch,
)
from megatron_dapo.doctor.network import check_network
from megatron_dapo.doctor.node import Node
from megatron_dapo.doctor.result import Finding, passed


def on_gpus(config: Config | None, gpus: Sequence[Gpu]) -> bool:
    """Whether these checks apply: there are GPUs, which the config does not refuse, or it asks for them."""
    if config is not None and config.actor.device != "auto":
        return config.actor.device == "cuda"
    return bool(gpus)


def examine_gpu_node(config: Config | None, gpus: Sequence[Gpu], node: Node) -> Iterator[Finding]:
    """Without a GPU the kernels are not imported: they need the driver."""
    yield from check_interconnect(node.ask)
    installed, required_by_sglang = probe_packages(node)
    torch = probe_torch(node)
    yield from check_torch(torch, gpus, installed)
    parts, needed = parts_of(config)
    servers = config is None or not config.rollout.urls
    if gpus:
        yield from check_imports(node, parts, needed)
    else:
        yield passed("imports", "not looked at: kernels need a driver, and no GPU is visible")
    if servers:
        yield from check_pins(required_by_sglang, installed)
    yield from check_compilers(node, torch, servers=servers)
    short = config is not None and bool(gpus) and needed_gpus(config) > len(gpus)
    alone = node.environment.get("SLURM_NNODES", "") in ("", "1")
    several = "RAY_ADDRESS" in node.environment or not alone or short
    yield from check_network(node, config, several=several)
