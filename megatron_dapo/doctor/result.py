"""What a check found."""

import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum


class Status(StrEnum):
    PASS = "pass"
    WARNING = "warning"
    FAIL = "fail"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One line: Finding(status=Status.FAIL, check="ports", found="30000 is taken", mend="set rollout.port=0")."""

    status: Status
    check: str
    found: str
    mend: str = ""
    """What to do; empty where nothing is wrong."""


def passed(check: str, found: str) -> Finding:
    return Finding(status=Status.PASS, check=check, found=found)


def warning(check: str, found: str, mend: str) -> Finding:
    return Finding(status=Status.WARNING, check=check, found=found, mend=mend)


def failed(check: str, found: str, mend: str) -> Finding:
    return Finding(status=Status.FAIL, check=check, found=found, mend=mend)


Ask = Callable[[Sequence[str]], str | None]
"""A command line -> what it prints; None if the program is not there, fails, or takes too long."""

ASK_DEADLINE_S = 30.0


def ask(command: Sequence[str]) -> str | None:
    """`Ask` of this machine."""
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=ASK_DEADLINE_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout if answer.returncode == 0 else None
