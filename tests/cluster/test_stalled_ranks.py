"""Which of several ranks is stopped or hangs, and which only waits for it."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray

from megatron_dapo.cluster import trainer as trainer_module
from megatron_dapo.cluster.trainer import Trainer
from megatron_dapo.cluster.trainer_rank import state_of

RANK = """
import sys, threading, time
from pathlib import Path
import torch.distributed as dist
from megatron_dapo.cluster.trainer_rank import TrainerRank
rank, port = int(sys.argv[1]), sys.argv[2]
TrainerRank(Path(), 1)
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=3)
threading.Thread(target=time.sleep, args=(100,), daemon=True).start()
print("up", flush=True)

def hang():
    time.sleep(100)

hang() if rank == 1 else dist.barrier()
"""


@pytest.fixture
def ranks(tmp_path) -> Iterator[dict[int, int]]:
    """Process ids of three ranks: 0 waits for the others, 1 hangs, 2 is stopped."""
    from rollout.server.engine import free_port

    (tmp_path / "logs").mkdir()
    port, started = str(free_port("127.0.0.1")), []
    for rank in range(3):
        with (tmp_path / "logs" / f"trainer-rank{rank}.log").open("wb") as log:
            command = [sys.executable, "-c", RANK, str(rank), port]
            started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log))
    try:
        for process in started:
            assert process.stdout is not None
            assert process.stdout.readline() == b"up\n"
        os.kill(started[2].pid, signal.SIGSTOP)
        yield {rank: process.pid for rank, process in enumerate(started)}
    finally:
        for process in started:
            process.kill()
            process.wait()


def test_the_rank_that_is_stopped_and_the_one_that_hangs_are_told_from_the_one_that_waits(ranks, tmp_path: Path):
    deadline = time.monotonic() + 30  # for rank 0 to reach the barrier, and rank 1 to hang
    while "barrier" not in state_of(tmp_path, 0, ranks[0]) or "hang" not in state_of(tmp_path, 1, ranks[1]):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    states = [state_of(tmp_path, rank, pid) for rank, pid in ranks.items()]
    assert states[0].startswith("waits for other ranks in barrier (distributed_c10d.py:")
    assert states[1].startswith("stands in hang (<string>:")
    assert states[2].startswith(f"stopped (process {ranks[2]} on ")


def test_ranks_in_one_state_share_a_line_and_who_waits_comes_last(monkeypatch, tmp_path):
    class Look:
        def options(self, **_):
            return self

        async def remote(self, _, rank, pid):
            if pid == 0:
                raise TimeoutError
            return "stands in hang" if rank == 11 else "waits for other ranks in barrier"

    async def states(homes: list[tuple[dict[str, object], int]]) -> str:
        trainer = Trainer(None, None, tmp_path, None, use_gpu=False)
        trainer._homes = homes
        return await trainer._states()

    monkeypatch.setattr(trainer_module.ray, "remote", lambda _: Look())
    assert asyncio.run(states([({}, 1)] * 12 + [({}, 0)])) == (
        "\n  rank 11: stands in hang\n  rank 12: its node gives no answer"
        "\n  rank 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10: waits for other ranks in barrier"
    )
    assert asyncio.run(states([])) == ""


def test_a_lost_ranks_reason_ends_where_ray_begins_to_guess():
    text = "The actor died unexpectedly.\n\tpid: 7\nSome common causes include: (1) out of memory"
    assert trainer_module.in_words(ray.exceptions.RayActorError(error_msg=text)) == (
        "its process ended: The actor died unexpectedly. pid: 7"
    )


def test_what_a_rank_said_before_it_died_is_told():
    """Its peers' collectives fail it a moment later; the cause would be lost."""
    place, gone = SimpleNamespace(_run_dir=Path("run")), ray.exceptions.RayActorError(error_msg="it died")
    said = Trainer._error(place, "trainer log_probs", {1: RuntimeError("cuDNN: not supported")}, {0: gone, 1: gone})
    assert type(said) is trainer_module.TrainerLost  # as before: the run may start again
    assert "rank 1: RuntimeError: cuDNN: not supported" in str(said)
    assert "rank 0: its process ended: it died" in str(said)
    assert type(Trainer._error(place, "trainer update", {1: RuntimeError("x")}, {})) is trainer_module.TrainerError
