"""Who has the GPUs' memory, and what is said when one side does not leave it."""

import asyncio
from dataclasses import replace

import pytest

from megatron_dapo.cluster.gpu_handover import GpuHandover, MemoryNotFree
from megatron_dapo.cluster.trainer_rank import GIB, GpuMemory
from megatron_dapo.cluster.waits import Stalled, Waits
from megatron_dapo.config.run_config import RunConfig

TOTAL = 80


class Gpus:
    """Two GPUs of 80 GiB, with a server and a trainer rank on each; amounts in GiB. `communicators`: NCCL's buffers of
    the trainer's that are not suspended."""

    def __init__(self, *, server=50, trainer=4, stays=0, weights=16):
        self.server, self.trainer, self.stays, self.weights = server, trainer, stays, weights
        self.communicators = 0
        self.held_by_servers = server
        self.calls: list[str] = []

    async def release_memory(self):
        self.calls.append("release")
        self.held_by_servers = self.stays
        return (float(self.server), float(self.server))

    async def resume_memory(self, *, weights_only):
        self.calls.append("resume weights" if weights_only else "resume")
        self.held_by_servers = self.weights if weights_only else self.server

    async def suspend_communicators(self):
        self.communicators = 0

    async def device_memory(self):
        free = (TOTAL - self.held_by_servers - self.trainer - self.communicators) * GIB
        return [GpuMemory(rank=rank, free=free, total=TOTAL * GIB, reserved=self.trainer * GIB) for rank in range(2)]


def with_handover(gpus, test, *, mode="colocated", deadline_s=5.0):
    async def run():
        lines = []
        config = RunConfig(dir="x", rollout_steps=1, mode=mode, step_deadline_s=deadline_s)
        await test(GpuHandover(config, gpus, gpus, Waits(), report=lines.append))
        return lines

    return asyncio.run(run())


def test_each_side_comes_once_the_other_has_left_and_only_then():
    gpus = Gpus()

    async def test(handover):
        await handover.to_servers()  # theirs already
        await handover.to_trainer()
        await handover.to_trainer()
        await handover.to_servers()
        await handover.to_trainer()

    lines = with_handover(gpus, test)
    assert gpus.calls == ["release", "resume", "release"]
    assert lines == [
        "colocated: servers leave 50.0 GiB of each GPU to the trainer, rank 0: 76.0 of 80.0 GiB free, 4.0 held by the "
        "trainer"
    ]


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_without_shared_memory_nobody_is_told_anything(mode):
    gpus = Gpus()

    async def test(handover):
        await handover.to_trainer()
        await handover.to_servers()

    with_handover(gpus, test, mode=mode)
    assert gpus.calls == []


def test_servers_that_keep_memory_are_named():
    async def test(handover):
        with pytest.raises(MemoryNotFree, match=r"less memory .*:\n  rank 0: 46\.0 of .*, 50\.0 claimed"):
            await handover.to_trainer()

    with_handover(Gpus(stays=30), test)


def test_a_server_that_is_down_at_the_handover_has_nothing_to_leave():
    class OneDown(Gpus):
        """Its second server has just died: its GPU was free before already."""

        async def release_memory(self):
            return (*(await super().release_memory())[:1], None)

        async def device_memory(self):
            first, second = await super().device_memory()
            return [first, replace(second, free=(TOTAL - self.trainer) * GIB)]

    async def test(handover):
        await handover.to_trainer()
        await handover.to_servers()

    lines = with_handover(OneDown(), test)
    assert lines[0].startswith("colocated: servers leave 50.0 GiB of each GPU")
    with pytest.raises(MemoryNotFree, match=r"rank 0: 46\.0 of"):
        with_handover(OneDown(stays=30), test)


def test_a_trainer_that_keeps_memory_is_named_before_the_servers_fail_for_it():
    gpus = Gpus()

    async def test(handover):
        await handover.to_trainer()
        gpus.trainer = 40
        with pytest.raises(MemoryNotFree, match=r"between_phases to all.*\n  rank 0: 40\.0 of 80\.0 GiB free, 40"):
            await handover.to_servers()
        assert gpus.calls == ["release"], "they were not told to come back"
        gpus.trainer = 4
        await handover.to_servers()

    with_handover(gpus, test)


def test_for_a_publish_the_servers_have_their_weights_memory_first():
    """It is the trainer's turn until they have all, and then only what is still to come must be free."""
    gpus = Gpus()

    async def test(handover):
        for _ in range(2):
            await handover.to_trainer()
            await handover.to_servers(weights_only=True)
            assert handover.trainer_has_it
            await handover.to_trainer()
            gpus.trainer = 44  # the rest of theirs, 34, finds 20
            with pytest.raises(MemoryNotFree, match=r"20\.0 of 80\.0 GiB free, 44\.0 .*, 34\.0 wanted back"):
                await handover.to_servers()
            gpus.trainer = 30
            await handover.to_servers()
            assert not handover.trainer_has_it
            gpus.trainer = 4
        await handover.to_servers(weights_only=True)  # theirs already

    with_handover(gpus, test)
    assert gpus.calls == ["release", "resume weights", "resume"] * 2


def test_a_handover_that_does_not_end_is_named():
    class Stuck(Gpus):
        async def release_memory(self):
            await asyncio.sleep(60)

    async def test(handover):
        with pytest.raises(Stalled, match=r"memory for the trainer: rollout servers gave no answer within 0\.1 s"):
            await handover.to_trainer()

    with_handover(Stuck(), test, deadline_s=0.1)


def test_on_a_cpu_servers_are_told_the_same_and_nothing_is_measured():
    gpus = Gpus(stays=50)

    async def nothing():
        return []

    gpus.device_memory = nothing

    async def test(handover):
        await handover.to_trainer()
        await handover.to_servers()

    with_handover(gpus, test)
    assert gpus.calls == ["release", "resume"]


def test_communicators_are_suspended_before_what_they_hold_would_lack():
    """The trainer's calls take their memory again: a step's work, and the new weights that it gathers and sends."""
    gpus = Gpus(server=70)

    async def test(handover):
        for _ in range(2):
            await handover.to_trainer()
            gpus.communicators = 8  # 68 GiB are free, and 70 wanted back
            await handover.to_servers(weights_only=True)
            assert gpus.communicators == 0
            gpus.communicators = 8
            gpus.trainer = 10
            await handover.to_servers()  # 54 are free, and wanted back
            assert gpus.communicators == 0
            gpus.trainer = 4

    with_handover(gpus, test)


def test_without_a_turn_of_the_trainers_its_communicators_are_left_alone():
    gpus = Gpus()

    async def never():
        raise AssertionError("the trainer has nothing to leave")

    gpus.suspend_communicators = never

    async def test(handover):
        await handover.to_servers()
        await handover.to_trainer()

    with_handover(gpus, test)
