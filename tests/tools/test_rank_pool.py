"""Rank processes: results in order, errors with their traceback, an end to every wait, nothing left behind."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import psutil
import pytest

from tests.actor.gloo import ROOT, ForkedRanks
from tools.rank_pool import RankError, RankPlace, RankPool, RankTimeout


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """Not the one that other files share: most calls here end its processes, and forks start in no time."""
    with ForkedRanks() as pool:
        yield pool


def place_and_sum(place: RankPlace, *numbers: int) -> tuple[int, int, int]:
    return place.rank, place.world_size, sum(numbers)


def fail_on_rank_one(place: RankPlace) -> None:
    if place.rank == 1:
        raise KeyError("the reason")
    time.sleep(60)


def exit_on_rank_zero(place: RankPlace) -> None:
    if place.rank == 0:
        os._exit(7)
    time.sleep(60)


def sleep(place: RankPlace) -> None:
    time.sleep(60)


def test_results_come_in_rank_order(pool):
    assert pool.run(2, place_and_sum, 1, 2) == [(0, 2, 3), (1, 2, 3)]


def test_an_error_of_a_rank_is_raised_here_and_the_others_end(pool):
    began = time.monotonic()
    with pytest.raises(RankError, match=r"rank 1 raised:[\s\S]*fail_on_rank_one[\s\S]*the reason"):
        pool.run(2, fail_on_rank_one)
    with pytest.raises(RankError, match="rank 0 died, exit code 7"):
        pool.run(2, exit_on_rank_zero)
    assert time.monotonic() - began < 55


def test_a_late_rank_is_named_with_the_place_where_it_stands(pool):
    pool.run(2, place_and_sum)  # workers that have started, so that the deadline falls into the function
    with pytest.raises(
        RankTimeout, match=r"ranks \[0, 1\] gave no result within 1 s[\s\S]*rank 1 stands at[\s\S]*in sleep"
    ):
        pool.run(2, sleep, timeout_s=1)


PARENT = """
from tools.rank_pool import RankPool
from tests.tools.test_rank_pool import sleep
if __name__ == "__main__":
    RankPool().run(2, sleep)
"""


def test_workers_end_with_a_killed_parent(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}  # a killed process leaves files
    with subprocess.Popen([sys.executable, str(script)], env=environment) as parent:
        deadline = time.monotonic() + 60
        while len(workers := psutil.Process(parent.pid).children()) < 2 + 1:  # and Python's resource tracker
            assert time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(1)
        parent.send_signal(signal.SIGKILL)
    assert psutil.wait_procs(workers, timeout=30)[1] == []


def test_workers_outlive_the_thread_that_started_them():
    """The kernel's death signal comes when a thread ends, not its process."""
    with RankPool() as pool:
        thread = threading.Thread(target=pool.run, args=(1, place_and_sum))
        thread.start()
        thread.join()
        time.sleep(0.5)
        assert pool.run(1, place_and_sum, 1) == [(0, 1, 1)]
