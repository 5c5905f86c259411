"""The table of checks, in the order in which they are printed."""

from collections.abc import Iterator

from megatron_dapo.doctor import config_checks, gpu_checks, machine_checks
from megatron_dapo.doctor.probing import Facts, Finding, Status, failed
from megatron_dapo.storage.run_dir import RunDirError
from rollout.errors import ServerStartError

_SAID = (ValueError, RunDirError, ServerStartError, OSError, ImportError)
"""Errors whose message says what is wrong and what to do: those of config, model and data are ValueErrors."""

ANYWHERE = {
    "versions": machine_checks.check_versions,
    "GPUs": gpu_checks.check_gpus,
    "limits": machine_checks.check_limits,
}
ON_GPUS = {
    "torch": gpu_checks.check_torch,
    "imports": gpu_checks.check_imports,
    "compilers": gpu_checks.check_compilers,
    "network": machine_checks.check_network,
    "InfiniBand": machine_checks.check_infiniband,
}
OF_A_CONFIG = {
    "ports": machine_checks.check_ports,
    "run directory": config_checks.check_run_dir,
    "model": config_checks.check_model,
    "disk": config_checks.check_disk,
    "host memory": config_checks.check_host_memory,
    "layout, tokenizer and data": config_checks.check_inputs,
}


def examine(facts: Facts) -> Iterator[tuple[str, Finding]]:
    """(name of the check, what it found) of all checks but the dry run; without a config, those of the machine. What
    stops two checks is told once."""
    told: set[Finding] = set()
    for name, check in (ANYWHERE | (ON_GPUS if facts.on_gpus else {}) | (OF_A_CONFIG if facts.config else {})).items():
        for finding in findings_of(check(facts)):
            if finding not in told:
                told.add(finding)
                yield name, finding


def findings_of(check: Iterator[Finding]) -> list[Finding]:
    """What is wrong, or, where nothing is, what passes."""
    found = []
    try:
        for finding in check:
            found.append(finding)
    except _SAID as error:
        found.append(failed(str(error), "correct it as the message says"))
    return [finding for finding in found if finding.status is not Status.PASS] or found
