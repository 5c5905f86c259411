"""The mini-batches of an update are counted while rank 0 makes it, and the counting cannot hurt it."""

import asyncio
import threading
import time
from types import SimpleNamespace

import pytest

from megatron_dapo.actor.device.communicators import Communicators
from megatron_dapo.cluster import trainer as trainer_module
from megatron_dapo.cluster.trainer import Trainer
from megatron_dapo.cluster.trainer_rank import TrainerRank, read_count, write_count
from megatron_dapo.cluster.waits import Waits
from megatron_dapo.monitor.console import Count


class Rank:
    """A rank of its own thread, whose actor takes a mini-batch when it is allowed to."""

    def __init__(self, run_dir, number):
        self.allowed, self.taken = threading.Semaphore(0), []
        self.communicators = Communicators(used=False)
        self.rank = TrainerRank(run_dir, threads=1)
        self.rank._rank, self.rank.actor = number, self
        self.perform = SimpleNamespace(remote=lambda *call: asyncio.to_thread(self.rank.perform, *call))

    def update(self, mini_batches, objective, temperature):
        for mini_batch in mini_batches:
            assert self.allowed.acquire(timeout=30)
            self.taken.append(mini_batch)
        return self.taken


@pytest.mark.parametrize("written", [True, False])
def test_an_update_under_way(tmp_path, monkeypatch, written):
    """`written`: whether the folder of the logs is there; a lost mount takes it away."""
    if written:
        (tmp_path / "logs").mkdir()
    write_count(tmp_path, 16, 16)  # of the update before
    config = SimpleNamespace(run=SimpleNamespace(step_deadline_s=30.0), rollout=SimpleNamespace(temperature=1.0))
    monkeypatch.setattr(trainer_module.ray, "put", lambda value: value)

    async def test():
        waits = Waits()
        trainer = Trainer(config, None, tmp_path, waits, use_gpu=False)
        trainer._ranks = ranks = [Rank(tmp_path, 0), Rank(tmp_path, 1)]
        updating = asyncio.ensure_future(trainer.update(["a", "b", "c"], None, 1.0))
        await asyncio.sleep(0.05)
        ranks[1].allowed.release(3)  # the faster one: rank 0 alone is counted
        for done in range(3):
            wanted, until = Count(*((done, 3) if written else (0, 0)), "mini-batches"), time.monotonic() + 10
            while (seen := waits.counts()["trainer update"]) != wanted and time.monotonic() < until:
                await asyncio.sleep(0.02)  # a count that is being written is read as none
            assert seen == wanted
            ranks[0].allowed.release()
        assert await updating == ["a", "b", "c"]
        assert read_count(tmp_path)[0] == (2 if written else 0), "the last one's end is the answer"

    asyncio.run(test())


@pytest.mark.parametrize("content", ["", "x", "1", "1 of 2"])
def test_what_cannot_be_read_is_nothing_done(tmp_path, content):
    write_count(tmp_path, 3, 4)
    assert read_count(tmp_path) == (0, 0)
    (tmp_path / "logs").mkdir()
    write_count(tmp_path, 3, 4)
    assert read_count(tmp_path) == (3, 4)
    (tmp_path / "logs" / ".mini-batches").write_text(content)
    assert read_count(tmp_path) == (0, 0)
