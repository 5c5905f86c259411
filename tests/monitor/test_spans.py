"""The timeline's files: what is written is read; of a step that was lived twice only the second life counts."""

import pytest

from megatron_dapo.monitor.timeline import FOLDER, SpanError, SpanFile, read_spans


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


def test_a_step_that_is_lived_again_replaces_itself_and_what_came_after(tmp_path):
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
