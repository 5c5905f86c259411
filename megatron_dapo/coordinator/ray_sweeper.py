"""Ends what is left of a run's own Ray when the run is gone, however it went.

Ray's GCS and raylet die with a killed coordinator, by the kernel, and its workers within seconds after them. Its two
agents (Ray 2.60) first try for 60 s to tell the dead GCS that the raylet is dead. This program is a process of its own
that knows of its coordinator's end by the end of its standard input, and ends them at once.

`python -P ray_sweeper.py FOLDER`, started by `RaySweeper`.
"""

import os
import subprocess
import sys
import time

import psutil

ROUNDS, ROUND_S = 20, 0.25
"""What was being started as the raylet died is found in a later round."""
END_DEADLINE_S = 10.0


class RaySweeper:
    """From before Ray's start until `close`, or until this process is gone."""

    def __init__(self, folder: str) -> None:
        """`folder`: `_temp_dir` of the Ray to come, which no other one uses."""
        command = [sys.executable, "-P", __file__, folder]
        # In a session of its own: a Ctrl-C or a kill of the run's process group must not end it first.
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
        )

    def close(self) -> None:
        """End what Ray's own shutdown has left."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(END_DEADLINE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def sweep(folder: str) -> int:
    """SIGKILL to each process of this user that runs our Python and works in `folder`; returns how many there were.

    Neither to this one nor to its parent, a coordinator that closes its Ray: it holds the folder's lock.
    """
    found = 0
    python, spared = os.path.realpath(sys.executable), (os.getpid(), os.getppid())
    for process in psutil.process_iter():
        try:
            if process.pid not in spared and process.exe() == python and _works_in(process, folder):
                process.kill()
                found += 1
        except psutil.Error:  # gone meanwhile, or another user's
            continue
    return found


def _works_in(process: psutil.Process, folder: str) -> bool:
    """By its arguments or its open logs: Ray's titles overwrite the arguments."""
    inside = f"{folder}/"
    return inside in " ".join(process.cmdline()) or any(file.path.startswith(inside) for file in process.open_files())


def main() -> None:
    folder = sys.argv[1].rstrip("/")
    sys.stdin.buffer.read()
    for _ in range(ROUNDS):
        if not sweep(folder):
            break
        time.sleep(ROUND_S)


if __name__ == "__main__":
    main()
