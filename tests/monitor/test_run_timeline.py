"""Which steps are recorded, and what of them."""

from types import SimpleNamespace

from megatron_dapo.monitor.timeline import FOLDER, Timeline, read_spans
from rollout.generation import FinishReason, ServedPart

PART = ServedPart(
    request_id="p3-v0-s1.",
    url="http://a:1",
    start=10.0,
    end=12.5,
    prompt_tokens=7,
    tokens=30,
    weight_version=2,
    finish_reason=FinishReason.STOP,
)


def test_every_so_many_steps_are_recorded_here_and_on_the_ranks(tmp_path):
    trainer = SimpleNamespace(recorded_step=None)
    timeline = Timeline(tmp_path, every=2)
    timeline.follow(trainer)
    told = []
    for step in range(1, 6):
        phases = timeline.begin(step)
        told.append(trainer.recorded_step)
        with phases.measure("rollout"):
            timeline.served(PART)
    timeline.close()
    assert told == [None, 2, None, 4, None]
    found = read_spans(tmp_path)
    assert list(found) == [2, 4]
    request, phase = found[4][0].spans
    assert (request.track, request.name, request.seconds) == ("server http://a:1", "p3-v0-s1.", 2.5)
    assert request.about == {"prompt": 7, "tokens": 30, "version": 2, "reason": "stop"}
    assert (phase.track, phase.name) == ("phases", "rollout")


def test_off_writes_nothing(tmp_path):
    timeline = Timeline(tmp_path, every=0)
    with timeline.begin(1).measure("rollout"):
        timeline.served(PART)
    timeline.close()
    assert not (tmp_path / FOLDER).exists()
