"""What a check found."""

from dataclasses import dataclass
from enum import StrEnum


class Status(StrEnum):
    PASS = "pass"
    WARNING = "warning"
    FAIL = "fail"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One line: Finding(status=Status.FAIL, check="ports", found="30000 is taken", fix="set rollout.port=0")."""

    status: Status
    check: str
    found: str
    fix: str = ""
    """What to do; empty where nothing is wrong."""


def passed(check: str, found: str) -> Finding:
    return Finding(status=Status.PASS, check=check, found=found)


def warning(check: str, found: str, fix: str) -> Finding:
    return Finding(status=Status.WARNING, check=check, found=found, fix=fix)


def failed(check: str, found: str, fix: str) -> Finding:
    return Finding(status=Status.FAIL, check=check, found=found, fix=fix)
