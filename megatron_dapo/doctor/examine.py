"""All checks of a machine, and with a config of what it names, in the order in which they are printed."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from megatron_dapo.config import Config
from megatron_dapo.doctor import hardware, kernels, machine, network
from megatron_dapo.doctor.config_checks import check_config
from megatron_dapo.doctor.hardware import Gpu, needed_gpus
from megatron_dapo.doctor.probing import Finding, Node, Status, passed
from megatron_dapo.doctor.software import check_software, installed_versions


def examine(config: Config | None, node: Node) -> Iterator[Finding]:
    """All checks but the dry run; without a config, those of the machine alone."""
    yield from check_software(node)
    gpus, trouble = hardware.probe_gpus(node)
    if trouble and (config is None or config.actor.device != "cpu"):
        yield trouble
    else:
        trouble = None
    if trouble is None or trouble.status is not Status.FAIL:
        cores = len(os.sched_getaffinity(0))
        yield from hardware.check_gpus(gpus, config, on_cluster="RAY_ADDRESS" in node.environment, cores=cores)
    gpu_node = on_gpus(config, gpus)
    if gpu_node:
        yield from examine_gpu_node(config, gpus, node)
    else:
        yield hardware.check_collectives()
    yield machine.check_ports(config)
    yield from network.check_port_range(node)
    wanted = machine.SHARED_MEMORY_GPU_BYTES if gpu_node else machine.SHARED_MEMORY_BYTES
    yield machine.check_shared_memory(node.root / "dev/shm", wanted)
    yield machine.check_open_files()
    if config is None:
        yield from machine.check_disk(Path.cwd(), 0.0, 0.0)
        return
    available = float(psutil.virtual_memory().available)
    processes = min(needed_gpus(config), len(gpus)) if gpus else needed_gpus(config)
    yield from check_config(config, available, processes=processes, on_gpu=bool(gpus))


def on_gpus(config: Config | None, gpus: Sequence[Gpu]) -> bool:
    """Whether the checks of a GPU node apply: there are GPUs, which the config does not refuse, or it asks for them."""
    return bool(gpus) if config is None or config.actor.device == "auto" else config.actor.device == "cuda"


def examine_gpu_node(config: Config | None, gpus: Sequence[Gpu], node: Node) -> Iterator[Finding]:
    """All that only a run on GPUs needs. Without a GPU the kernels are not imported: they need the driver."""
    yield from hardware.check_interconnect(node.run(("nvidia-smi", "topo", "-m")).output)
    installed, torch = installed_versions(node), kernels.probe_torch(node)
    yield from kernels.check_torch(torch, gpus, installed)
    servers = config is None or not config.rollout.urls
    if gpus:
        yield from kernels.check_imports(node, *kernels.parts_of(config))
    else:
        yield passed("imports", "not looked at: kernels need a driver, and no GPU is visible")
    if servers:
        yield from kernels.check_pins(node, installed)
    yield from kernels.check_compilers(node, torch, servers=servers)
    short = config is not None and bool(gpus) and needed_gpus(config) > len(gpus)
    alone = node.environment.get("SLURM_NNODES", "") in ("", "1")
    several = "RAY_ADDRESS" in node.environment or not alone or short
    yield from network.check_network(node, config, several=several)
