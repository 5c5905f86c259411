"""`python -m tests.killer VICTIM EVENT COUNT ARGUMENTS ...`: megatron-dapo with a murder in it.

When the ledger records its COUNT-th EVENT, one process of the run is killed by SIGKILL: `coordinator` (this process)
or one of MARKS, or `both`, it and a sweeper. EVENT `after` counts seconds since the first event instead, `born` those
since there is a process of that kind.
"""

import os
import signal
import sys
import threading
import time
from collections import Counter
from typing import Any

import psutil

from megatron_dapo.storage.ledger import Ledger

MARKS = {
    "trainer": "ray::TrainerRank",
    "server": "rollout.server.launch_server",
    "scheduler": "sglang::scheduler",
    "detokenizer": "sglang::detokenizer",
    "client": "ray::ClientProcess",
    "reward": "reward.pool.worker",
    "gcs": "ray/gcs/gcs_server",
    "raylet": "ray/raylet/raylet",
    "agent": "ray::DashboardAgent",
    "environment": "ray::RuntimeEnvAgent",
    "monitor": "autoscaler/_private/monitor.py",
    "sweeper": "ray_sweeper.py",
}
"""What the command line of each kind of process holds."""

COORDINATOR = ("coordinator", "both")


def kill(victim: str) -> None:
    """One process of that kind; none if there is none at this moment."""
    if victim == "both":
        kill("sweeper")
    if victim in COORDINATOR:
        os.kill(os.getpid(), signal.SIGKILL)
    process = find(victim)
    if process is None:
        running = "\n".join(f"  {process}" for process in psutil.Process().children(recursive=True))
        print(f"found no {victim} to kill among\n{running}", flush=True)
    else:
        process.kill()
        print(f"killed {victim} {process.pid}", flush=True)


def find(victim: str) -> psutil.Process | None:
    """One process of that kind."""
    if victim in COORDINATOR:
        return psutil.Process()
    for process in psutil.Process().children(recursive=True):
        try:
            if MARKS[victim] in " ".join(process.cmdline()):
                return process
        except psutil.NoSuchProcess:
            continue
    return None


def kill_young(victim: str, age_s: float) -> None:
    """The first process of that kind, so many seconds after it was seen."""
    while find(victim) is None:
        time.sleep(0.1)
    time.sleep(age_s)
    kill(victim)


def arm(victim: str, event: str, count: float) -> None:
    """Watch the ledger of this process."""
    if event == "born":
        threading.Thread(target=kill_young, args=(victim, count), daemon=True).start()
        return
    seen: Counter[str] = Counter()
    record = Ledger.record

    def watched(self: Ledger, kind: Any, **details: Any) -> None:
        record(self, kind, **details)
        if not seen and event == "after":
            timer = threading.Timer(count, kill, [victim])
            timer.daemon = True
            timer.start()
        seen[str(kind)] += 1
        if str(kind) == event and seen[event] == count:
            kill(victim)

    Ledger.record = watched  # type: ignore[method-assign]


def main() -> None:
    from megatron_dapo.cli.main import main as run

    victim, event, count = sys.argv[1:4]
    sys.argv[1:4] = []
    arm(victim, event, float(count))
    run()


if __name__ == "__main__":
    main()
