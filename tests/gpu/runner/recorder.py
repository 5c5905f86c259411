"""pytest plugin of a stage: each test's start and result, and each figure, as a line of JSON, written at once.

What a crash or a kill leaves is then still known. The file is named by GPU_STAGE_RECORD; without it nothing is written.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

RECORD = "GPU_STAGE_RECORD"
LONGEST = 1200
"""Characters of a reason."""


def write(**line: Any) -> None:
    """One line of the record."""
    if target := os.environ.get(RECORD):
        with Path(target).open("a") as file:
            file.write(json.dumps(line, default=str) + "\n")


def pytest_runtest_logstart(nodeid: str) -> None:
    write(started=_short(nodeid))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    # Set-up and tear-down count only where they fail or skip.
    if report.when == "call" or report.outcome != "passed":
        write(test=_short(report.nodeid), outcome=report.outcome, seconds=report.duration, reason=_reason(report))


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        errors = [line[1:].strip() for line in str(report.longrepr).splitlines() if line.startswith("E ")]
        reason = "; ".join(errors) or str(report.longrepr)
        write(test=_short(report.nodeid), outcome="failed", seconds=0.0, reason=reason[:600])


def _short(nodeid: str) -> str:
    return nodeid.rpartition("/")[2]


def _reason(report: pytest.TestReport) -> str:
    if report.skipped and isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    return "" if report.passed else shortened(str(crash.message if crash else report.longrepr))


def shortened(text: str) -> str:
    """Beginning and end: the last line of a rank's traceback is its error."""
    return text if len(text) <= LONGEST else f"{text[: LONGEST // 3]} ... {text[-2 * LONGEST // 3 :]}"


@pytest.fixture(scope="session")
def record() -> Callable[[str, Any], None]:
    """`record(name, value)`: prints a figure and keeps it for the page; `value` is a number, a text or a dict."""

    def keep(name: str, value: Any) -> None:
        print(f"{name}: {json.dumps(value, default=str)}")
        write(figure=name, value=value)

    return keep
