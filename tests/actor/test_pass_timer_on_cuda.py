"""Spans of passes on a GPU, with a faked CUDA: its events tell the times."""

import contextlib
from types import SimpleNamespace

import torch

from megatron_dapo.actor.pass_timer import PassClock
from megatron_dapo.cluster.trainer_rank import RankTimeline


class Event:
    clock = 0.0

    def __init__(self, *, enable_timing):
        assert enable_timing

    def record(self):
        Event.clock += 250.0
        self.at = Event.clock

    def elapsed_time(self, later):
        return later.at - self.at


def test_events_tell_the_times_of_a_pass(monkeypatch, tmp_path):
    waits = []
    for name, value in {
        "Event": Event,
        "synchronize": lambda *_: waits.append(1),
        "reset_peak_memory_stats": lambda: None,
        "max_memory_allocated": lambda: 7,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    device = torch.device("cuda", 0)
    clock = PassClock(device)
    with clock.measure("forward"):
        pass
    [(name, start, end, _)] = clock.times()
    assert (name, round(end - start, 3), round(start - clock._epoch, 3), len(waits)) == ("forward", 0.25, 0.25, 2)
    actor = SimpleNamespace(
        optimizer=SimpleNamespace(chunks=[1]),
        rank=0,
        config=SimpleNamespace(layout=SimpleNamespace(pipeline=1)),
        place=dict,
        device=SimpleNamespace(device=device),
        timed=lambda: contextlib.nullcontext(clock),
    )
    with RankTimeline(tmp_path, actor).call(1, "log_probs"):
        pass
    assert '"peak_bytes": 7' in (tmp_path / "timeline/rank0.jsonl").read_text()
