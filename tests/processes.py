"""Runs the command line as a user does, and finds what it left behind."""

import ctypes
import os
import subprocess
import sys
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[1]
MARK = "DAPO_TEST_MARK"
GRACE_S = 30.0
"""For what ends by itself: Ray's workers look every second whether their raylet lives."""
_PR_SET_CHILD_SUBREAPER = 36
ADOPTED = ("raylet", "gcs_server")
"""Ray's processes that its others look for: one that has ended counts as alive until somebody has waited for it."""
_running: set[int] = set()
"""Commands that were started and not finished: so long this process adopts what is orphaned."""


@dataclass(frozen=True, kw_only=True)
class Finished:
    """One ended command."""

    code: int
    output: str
    seconds: float
    left_behind: tuple[str, ...]
    """Number, state and command line of each process that still ran `GRACE_S` after the command had ended."""


class Running:
    """A started command; every process below it carries a mark in its environment, however it was spawned."""

    def __init__(self, *arguments: str, log: Path, cwd: Path = ROOT, module: str = "megatron_dapo.cli.main") -> None:
        """`module` is run as a program with `arguments`; `log` gets its output."""
        self._mark = uuid.uuid4().hex
        self._log = log
        self._began = time.monotonic()
        self._began_at = time.time()
        # After our own: packages may lie outside the environment, as on a machine that nothing can be installed on.
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        _adopt(True)
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                cwd=cwd,
                env={**os.environ, MARK: self._mark, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        _running.add(self.process.pid)

    def wait_for(self, text: str, timeout_s: float) -> None:
        """Returns when the output holds `text`."""
        deadline = time.monotonic() + timeout_s
        while text not in self._log.read_text():
            assert self.process.poll() is None, f"ended before {text!r}:\n{self._log.read_text()}"
            assert time.monotonic() < deadline, f"no {text!r} within {timeout_s} s:\n{self._log.read_text()}"
            time.sleep(0.1)

    def signal(self, number: int, *, group: bool = False) -> None:
        """To the command; with `group` to every process of its group, as a terminal's Ctrl-C."""
        if group:
            os.killpg(self.process.pid, number)
        else:
            self.process.send_signal(number)

    def named(self, name: str) -> list[psutil.Process]:
        """Those whose title or command line begins with `name`."""
        return [process for process in self.marked() if " ".join(_command(process)).startswith(name)]

    def kill_one(self, name: str) -> None:
        """SIGKILL to one of them."""
        found = self.named(name)
        assert found, f"no process {name!r}"
        found[0].kill()

    def finish(self, timeout_s: float, *, passing: tuple[str, ...] = ()) -> Finished:
        """Wait for the end; on a time-out everything is killed and the test fails.

        Args:
            passing: titles of processes that end by themselves later, which are not waited for.
        """
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill_all()
            _running.discard(self.process.pid)
            _adopt(bool(_running))
            raise AssertionError(f"still running after {timeout_s} s:\n{self._log.read_text()}") from None
        _running.discard(self.process.pid)
        seconds = time.monotonic() - self._began
        deadline = time.monotonic() + GRACE_S
        while (left := self._left(passing)) and time.monotonic() < deadline:
            time.sleep(0.2)
        lines = tuple(f"{process.pid} {_status(process)} {' '.join(_command(process))[:200]}" for process in left)
        self.kill_all()
        _adopt(bool(_running))
        return Finished(code=code, output=self._log.read_text(), seconds=seconds, left_behind=lines)

    def _left(self, passing: tuple[str, ...]) -> list[psutil.Process]:
        return [process for process in self.marked() if not " ".join(_command(process)).startswith(passing)]

    def marked(self) -> list[psutil.Process]:
        """All living processes that descend from the command."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.status() == psutil.STATUS_ZOMBIE:
                    _bury(process)
                elif self._ours(process):
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    def _ours(self, process: psutil.Process) -> bool:
        """By the mark. Servers and Ray's processes overwrite theirs: then as a descendant, or as an orphan of Ray not
        older than the command."""
        if (mark := process.environ().get(MARK)) is not None:
            return mark == self._mark
        if self.process.pid in {parent.pid for parent in process.parents()}:
            return True
        orphan = process.ppid() == os.getpid() and process.create_time() >= self._began_at - 1
        return orphan and " ".join(_command(process)).startswith("ray::")

    def kill_all(self) -> None:
        """SIGKILL to all that descends from the command."""
        deadline = time.monotonic() + 5
        while (left := self.marked()) and time.monotonic() < deadline:  # some are known only once others are gone
            for process in left:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            time.sleep(0.05)


def _adopt(wanted: bool) -> None:
    """Whether what is orphaned below this process becomes its child."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(wanted), 0, 0, 0)


def _bury(process: psutil.Process) -> None:
    """An orphan that has ended."""
    if process.ppid() == os.getpid() and process.name() in ADOPTED:
        with suppress(ChildProcessError):
            os.waitpid(process.pid, os.WNOHANG)


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return ["gone"]


def _status(process: psutil.Process) -> str:
    """Which of them ran, slept, or waited for the disk."""
    try:
        return str(process.status())
    except psutil.NoSuchProcess:
        return "gone"
