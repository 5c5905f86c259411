"""Which steps are recorded, and what of them; what is written is read, and of a step done twice the second time."""

from types import SimpleNamespace

import pytest

from megatron_dapo.monitor.timeline import FOLDER, SpanFile, Timeline
from rollout.generation import FinishReason, ServedPart
from tools.recorded_spans import SpanError, read_spans

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


def write(folder, process, *steps, about=None):
    file = SpanFile(folder, process, about)
    for step, name in steps:
        file.begin(step)
        file.add("calls", name, step + 0.25, step + 0.75, tokens=7)
    file.write()


def test_what_is_written_is_read(tmp_path):
    write(tmp_path, "rank0", (1, "update"), (1, "export_hf"), (3, "update"), about={"rank": 0})
    write(tmp_path, "coordinator", (1, "rollout"))
    found = read_spans(tmp_path)
    assert list(found) == [1, 3]
    assert [each.process for each in found[1]] == ["coordinator", "rank0"]
    rank = found[1][1]
    assert rank.about == {"rank": 0}
    assert [span.name for span in rank.spans] == ["update", "export_hf"]
    assert (rank.spans[0].track, rank.spans[0].seconds, rank.spans[0].about) == ("calls", 0.5, {"tokens": 7})


def test_a_step_that_is_done_again_replaces_itself_and_what_came_after(tmp_path):
    write(tmp_path, "rank0", (1, "old"), (2, "old"), (3, "old"))
    write(tmp_path, "rank0", (2, "new"))
    found = read_spans(tmp_path)
    assert {step: found[step][0].spans[0].name for step in found} == {1: "old", 2: "new"}


def test_a_torn_last_line_is_left_out_and_a_broken_one_named(tmp_path):
    write(tmp_path, "rank0", (1, "update"))
    file = tmp_path / FOLDER / "rank0.jsonl"
    file.write_bytes(file.read_bytes()[:-9])
    assert read_spans(tmp_path)[1][0].spans == ()
    file.write_text('{"step": 1, "about": {}}\nrubbish\n{}\n')
    with pytest.raises(SpanError, match=r"rank0\.jsonl:2"):
        read_spans(tmp_path)


def test_a_resumed_run_does_not_write_behind_a_torn_line(tmp_path):
    write(tmp_path, "rank0", (1, "old"), (2, "old"))
    file = tmp_path / FOLDER / "rank0.jsonl"
    file.write_bytes(file.read_bytes()[:-9])
    write(tmp_path, "rank0", (2, "new"))
    found = read_spans(tmp_path)
    assert {step: found[step][0].spans[0].name for step in found} == {1: "old", 2: "new"}


def test_nothing_recorded_is_nothing(tmp_path):
    assert read_spans(tmp_path) == {}
    SpanFile(tmp_path, "rank0").write()
    assert not (tmp_path / FOLDER).exists()


def test_every_so_many_steps_are_recorded_here_and_on_the_ranks(tmp_path):
    trainer = SimpleNamespace(recorded_step=None)
    timeline = Timeline(tmp_path, trainer, every=2)
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
    timeline = Timeline(tmp_path, SimpleNamespace(), every=0)
    with timeline.begin(1).measure("rollout"):
        timeline.served(PART)
    timeline.close()
    assert not (tmp_path / FOLDER).exists()
