"""The table of checks, in the order in which they are printed."""

from collections.abc import Callable, Iterator

from megatron_dapo.doctor import config_checks as config
from megatron_dapo.doctor import machine_checks as machine
from megatron_dapo.doctor.probing import Facts, Finding, Status, failed
from megatron_dapo.storage.run_dir import RunDirError
from rollout.errors import ServerStartError

_SAID = (ValueError, RunDirError, ServerStartError, OSError, ImportError)
"""Errors whose message says what is wrong and what to do: those of config, model and data are ValueErrors."""


def _named(*checks: Callable[[Facts], Iterator[Finding]]) -> dict[str, Callable[[Facts], Iterator[Finding]]]:
    return {check.__name__.removeprefix("check_").replace("_", " "): check for check in checks}


ANYWHERE = _named(machine.check_versions, machine.check_gpus, machine.check_limits)
ON_GPUS = _named(
    machine.check_torch, machine.check_imports, machine.check_compilers, machine.check_network, machine.check_infiniband
)
OF_A_CONFIG = _named(machine.check_ports, config.check_run_dir, config.check_model)
OF_A_CONFIG |= _named(config.check_disk, config.check_host_memory, config.check_inputs)


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
