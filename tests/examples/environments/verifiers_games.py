"""Environments of the verifiers package for `test_adapters.py`."""

import sys

import verifiers.v1 as vf

from examples.environments.from_verifiers import adapter

play = adapter({"taskset": {"id": "textarena", "game": "Hangman-v0"}})


class SumData(vf.TaskData):
    wanted: str


class SumTask(vf.Task[SumData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def equal(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.wanted)

    @vf.reward(weight=0.5)
    async def short(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply) < 5)


class SumTaskset(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self) -> list[SumTask]:
        return [SumTask(SumData(prompt="2+2?", wanted="4"))]


__all__ = ["SumTaskset"]

sys.modules.setdefault("sums_of_two", sys.modules[__name__])  # a taskset is named by an importable module
sums = adapter({"taskset": {"id": "sums-of-two"}})
