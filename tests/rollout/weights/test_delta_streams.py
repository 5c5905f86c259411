"""The order of CUDA streams while changes of weights are sent, with streams that only write down who waits for whom."""

import asyncio
import contextlib
from types import SimpleNamespace

import torch

from rollout.weights import delta
from rollout.weights.delta import DeltaTransport


class Stream:
    def __init__(self, name, log):
        self.name, self.log = name, log

    def wait_stream(self, other):
        self.log.append(f"{self.name} waits for {other.name}")

    def synchronize(self):
        self.log.append(f"host waits for {self.name}")


def test_changes_are_kept_behind_what_fills_the_bucket_and_before_it_is_used_again(monkeypatch):
    log = []
    main = Stream("main", log)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: main)

    @contextlib.contextmanager
    def within(stream):
        log.append(f"on {stream.name}")
        yield

    monkeypatch.setattr(torch.cuda, "stream", within)
    sent = DeltaTransport.__new__(DeltaTransport)
    sent._up, sent._down, sent._device = Stream("up", log), Stream("down", log), torch.device("cpu")
    sent._base, sent._before, sent._whole, sent.more = SimpleNamespace(buckets={}, label=None), {}, True, False

    async def whole(*_):
        log.append("send")
        return {}

    monkeypatch.setattr(delta.GroupTransport, "send", whole)
    bucket = SimpleNamespace(shapes={"a": (4,)}, dtype=torch.float32)
    asyncio.run(sent.send(torch.zeros(16, dtype=torch.uint8), bucket, {}, "3"))
    sent.settle()
    assert log == ["main waits for up", "down waits for main", "on down", "on up", "send", "host waits for down"]
