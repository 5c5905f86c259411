"""Ends what is left of a run's own Ray when the run is gone, however it went, and removes its folder.

Ray's GCS and raylet die with a killed coordinator, by the kernel, and its workers within seconds after them. Its two
agents (Ray 2.60) first try for 60 s to tell the dead GCS that the raylet is dead. This program is a process of its own
that knows of its coordinator's end by the end of its standard input, and ends them at once. There are two of it.

`python -P ray_sweeper.py FOLDER PACKAGE`, started by `RaySweeper`; PACKAGE is where Ray's programs are.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time

import psutil

ROUNDS, ROUND_S = 20, 0.25
EMPTY_ROUNDS = 3
"""So many without a find end the sweep after a kill: the raylet may have been starting something as it died."""
END_DEADLINE_S = 10.0

PREFIX = "dapo-ray_"
RAYS = "r"
"""Ray's own folder, below that of PREFIX: Ray lets every user write into its folders, so one above them is closed."""
LONGEST_PARENT = 24
"""Characters; 84 are added to it at most, and a Unix socket's path may have 107."""


def new_temp_dir() -> str:
    """A folder for the sockets and logs of a run's own Ray."""
    usual = tempfile.gettempdir()
    return tempfile.mkdtemp(prefix=PREFIX, dir=usual if len(usual) < LONGEST_PARENT else "/tmp")


class RaySweeper:
    """From before Ray's start until `close`, or until this process is gone."""

    def __init__(self, folder: str) -> None:
        """`folder`: of `new_temp_dir`; the Ray to come works in `rays` below it."""
        self.rays = os.path.join(folder, RAYS)
        import ray  # not by the program itself: it takes a second

        self._command = [sys.executable, "-P", __file__, folder, os.path.dirname(ray.__file__)]
        # Two: one may be killed with the coordinator.
        self._processes = [self._start(), self._start()]

    def _start(self) -> subprocess.Popen[bytes]:
        # In a session of its own: a Ctrl-C or a kill of the run's process group must not end it first.
        return subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True)

    def close(self) -> None:
        """End what Ray's own shutdown has left, and remove the folder."""
        if all(process.poll() for process in self._processes):  # somebody killed them
            self._processes = [self._start()]
        for process in self._processes:
            try:
                process.communicate(timeout=END_DEADLINE_S)  # ends its standard input
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def sweep(folder: str, package: str) -> int:
    """SIGKILL to each of this user's processes of the Ray in `folder`; returns how many there were."""
    found = 0
    for process in psutil.process_iter():
        try:
            if process.uids().real == os.getuid() and _belongs(process, folder, package):
                process.kill()
                found += 1
        except psutil.Error:  # gone meanwhile, or another user's
            continue
    return found


def _belongs(process: psutil.Process, folder: str, package: str) -> bool:
    """Whether it is Ray's own, by title, program or script, and works in `folder`, by its arguments or the logs that it
    writes. Who only reads there does not belong."""
    words = process.cmdline()
    titled = bool(words) and words[0].startswith("ray::")
    if not titled and not any(word.startswith(f"{package}/") for word in words[:4]):
        return False
    if any(f"{folder}/" in word for word in words):
        return True
    session = os.path.join(os.path.realpath(folder), RAYS, "session_")
    return any(file.path.startswith(session) and file.mode != "r" for file in process.open_files())


def main() -> None:
    folder, package, parent = *sys.argv[1:], os.getppid()
    sys.stdin.buffer.read()
    empty = 0
    for _ in range(ROUNDS):
        empty = 0 if sweep(folder, package) else empty + 1
        if empty == EMPTY_ROUNDS or (empty and os.getppid() == parent):  # it lives: an orderly end, nothing starts
            break
        time.sleep(ROUND_S)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
