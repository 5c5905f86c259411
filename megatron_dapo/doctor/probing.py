"""Where the checks look (files, commands, names and limits of this machine, or of one that a test makes up) and what
they report."""

import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

ASK_DEADLINE_S = 30.0
_REAP_S = 2.0


class Status(StrEnum):
    PASS = "pass"
    WARNING = "warning"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line: Finding(Status.FAIL, "ports", "30000 is taken", "set rollout.port=0")."""

    status: Status
    check: str
    found: str
    fix: str = ""
    """What to do; empty where nothing is wrong."""


def passed(check: str, found: str) -> Finding:
    return Finding(Status.PASS, check, found)


def warning(check: str, found: str, fix: str) -> Finding:
    return Finding(Status.WARNING, check, found, fix)


def failed(check: str, found: str, fix: str) -> Finding:
    return Finding(Status.FAIL, check, found, fix)


def warning_if(wrong: bool, check: str, found: str, fix: str) -> Finding:
    return warning(check, found, fix) if wrong else passed(check, found)


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What became of a command: Answer(code=1, output="", error="nvcc fatal: ...")"""

    code: int | None
    """None: it could not be started, or did not end in time; `error` says which."""
    output: str = ""
    error: str


def _outgoing_address() -> str:
    """That of the interface with the default route, as Ray takes it for this node; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("8.8.8.8", 53))
        return str(probe.getsockname()[0])


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """This machine by default."""

    root: Path = Path("/")
    """Of /sys, /proc, /dev and /usr/local."""
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    """Also of the commands: PATH says which are there."""
    python: tuple[str, ...] = (sys.executable,)
    headers: Path = Path(sysconfig.get_paths()["include"])
    """Python's, where Python.h belongs."""
    site: Path = Path(sysconfig.get_paths()["purelib"])
    """Where pip installs packages."""
    packages: Sequence[str] = field(default_factory=lambda: list(sys.path))
    """Folders of all installed packages."""
    host: str = field(default_factory=socket.gethostname)
    resolve: Callable[[str], str] = lambda name: str(socket.getaddrinfo(name, None)[0][4][0])
    """Name -> address; OSError without one."""
    outgoing: Callable[[], str] = _outgoing_address
    """This node's address towards others; OSError without a route."""
    locked_memory: int = field(default_factory=lambda: resource.getrlimit(resource.RLIMIT_MEMLOCK)[0])
    """Bytes; RLIM_INFINITY: no limit."""

    def run(self, command: Sequence[str], deadline_s: float = ASK_DEADLINE_S) -> Answer:
        """Returns at the deadline also where a hung driver keeps the command from being killed."""
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                env=dict(self.environment),
                start_new_session=True,
            )
        except OSError as error:
            return Answer(code=None, error=f"{command[0]}: {error.strerror}")
        try:
            output, said = process.communicate(timeout=deadline_s)
            return Answer(code=process.returncode, output=output, error=said)
        except subprocess.TimeoutExpired:
            return Answer(code=None, error=f"no end within {deadline_s:g} s")
        finally:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                with suppress(subprocess.TimeoutExpired):
                    process.communicate(timeout=_REAP_S)

    def text(self, path: str) -> str:
        """Of a file below `root`; empty without one."""
        try:
            return (self.root / path).read_text().strip()
        except OSError:
            return ""

    def names(self, folder: str) -> list[str]:
        """What a folder below `root` holds."""
        return sorted(path.name for path in (self.root / folder).glob("*"))

    def which(self, program: str) -> str | None:
        return shutil.which(program, path=self.environment.get("PATH", ""))
