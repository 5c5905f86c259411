"""`megatron-dapo doctor`: can this machine run that config; one line a check, with the fix."""

import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
from rich.console import Console
from rich.text import Text

from megatron_dapo.cli.exit_codes import ExitCode
from megatron_dapo.config import Config, ConfigError, load_config
from megatron_dapo.doctor.gpu_node import examine_gpu_node, on_gpus
from megatron_dapo.doctor.hardware import check_collectives, check_gpus, needed_gpus, probe_gpus
from megatron_dapo.doctor.machine import (
    SHARED_MEMORY_BYTES,
    SHARED_MEMORY_GPU_BYTES,
    check_disk,
    check_open_files,
    check_ports,
    check_run_dir,
    check_shared_memory,
)
from megatron_dapo.doctor.network import check_port_range
from megatron_dapo.doctor.node import Node
from megatron_dapo.doctor.result import Finding, Status, failed
from megatron_dapo.doctor.run import (
    bytes_on_disk,
    check_data,
    check_host_memory,
    check_model,
    check_tokenizer,
    dry_run,
)
from megatron_dapo.doctor.software import software

_STYLES = {Status.PASS: "green", Status.WARNING: "yellow", Status.FAIL: "bold red"}
_WIDEST = 200
"""Columns where the output is no terminal."""


def doctor_command(path: Path | None, overrides: Sequence[str], *, with_dry_run: bool) -> ExitCode:
    """Print every check as it is made. FAILED if one of them says fail; the dry run is made only if none does."""
    console = Console(highlight=False) if sys.stdout.isatty() else Console(highlight=False, width=_WIDEST)
    if with_dry_run and path is None:
        print("doctor --dry-run: give the config that is to be run", file=sys.stderr)
        return ExitCode.CONFIG
    counts: Counter[Status] = Counter()
    config: Config | None = None
    if path is not None:
        try:
            config = load_config(path, overrides)
        except ConfigError as error:
            _print(console, counts, failed("config", str(error), "correct the config as the message says"))
    for finding in examine(config, Node()):
        _print(console, counts, finding)
    if with_dry_run and path is not None and config is not None and not counts[Status.FAIL]:
        console.print("dry run: starting trainer and servers")
        _print(console, counts, dry_run(path, overrides, config))
    console.print(", ".join(f"{counts[status]} {status}" for status in Status))
    return ExitCode.FAILED if counts[Status.FAIL] else ExitCode.FINISHED


def examine(config: Config | None, node: Node) -> Iterator[Finding]:
    """All checks but the dry run; without a config, those of the machine alone."""
    yield from software()
    gpus, trouble = probe_gpus(node)
    on_cluster = "RAY_ADDRESS" in node.environment
    if config is not None and config.actor.device == "cpu":
        trouble = None
    if trouble:
        yield trouble
    if trouble is None or trouble.status is not Status.FAIL:
        yield from check_gpus(gpus, config, on_cluster=on_cluster, cores=len(os.sched_getaffinity(0)))
    gpu_node = on_gpus(config, gpus)
    if gpu_node:
        yield from examine_gpu_node(config, gpus, node)
    else:
        yield check_collectives()
    yield from check_ports(config)
    yield from check_port_range(node)
    wanted = SHARED_MEMORY_GPU_BYTES if gpu_node else SHARED_MEMORY_BYTES
    yield check_shared_memory(node.root / "dev/shm", wanted)
    yield check_open_files()
    if config is None:
        yield from check_disk(Path.cwd(), 0.0, 0.0)
        return
    yield check_run_dir(Path(config.run.dir), resume=config.run.resume)
    hf, findings = check_model(config)
    yield from check_disk(Path(config.run.dir), *((0.0, 0.0) if hf is None else bytes_on_disk(config, hf)))
    yield from findings
    if hf is not None:
        available = float(psutil.virtual_memory().available)
        processes = min(needed_gpus(config), len(gpus)) if gpus else needed_gpus(config)
        yield check_host_memory(config, hf, available, processes=processes, on_gpu=bool(gpus))
    yield check_tokenizer(config)
    yield check_data(config)


def _print(console: Console, counts: Counter[Status], finding: Finding) -> None:
    counts[finding.status] += 1
    line = Text.assemble(
        (f"{finding.status:<8}", _STYLES[finding.status]), (f"{finding.check}: ", "bold"), finding.found
    )
    console.print(line)
    if finding.fix:
        console.print(Text(f"        fix: {finding.fix}"))
