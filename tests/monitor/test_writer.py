"""metrics.jsonl survives what happens to runs: NaN, kills in the middle of a line, resumes."""

import json
import math
import re
import resource
import threading

import numpy as np
import pytest

from megatron_dapo.monitor.writer import MetricsError, MetricsWriter, read_metrics, sample_text


def line(step: int, **values) -> dict:
    return {"rollout_step": step, "optimizer_step": 4 * step, **values}


def write(folder, *lines, tensorboard=False):
    writer = MetricsWriter(folder, tensorboard=tensorboard)
    returned = [writer.write(values) for values in lines]
    writer.close()
    return returned


def test_what_is_written_is_read(tmp_path):
    lines = [line(1, entropy=0.3, **{"accuracy/mean": 0.5}), line(2, entropy=0.2)]
    write(tmp_path, *lines)
    assert read_metrics(tmp_path) == lines


def test_a_line_is_on_disk_before_write_returns(tmp_path):
    writer = MetricsWriter(tmp_path, tensorboard=False)
    writer.write(line(1))
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["rollout_step"] == 1
    writer.close()


def test_values_that_are_not_finite_are_null_and_flagged(tmp_path):
    (returned,) = write(tmp_path, line(1, loss=math.nan, grad_norm=math.inf, entropy=0.1, clip_high_prob=None))
    assert [returned] == read_metrics(tmp_path)
    text = (tmp_path / "metrics.jsonl").read_text()
    stored = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert (stored["loss"], stored["grad_norm"], stored["clip_high_prob"]) == (None, None, None)
    assert stored["non_finite"] == ["loss", "grad_norm"]
    write(tmp_path, line(2, loss=0.1))
    assert "non_finite" not in read_metrics(tmp_path)[1]


def test_numpy_numbers_are_accepted(tmp_path):
    write(tmp_path, {"rollout_step": np.int64(1), "optimizer_step": np.int32(4), "entropy": np.float32(0.5), "loss": 1})
    assert read_metrics(tmp_path) == [{"rollout_step": 1, "optimizer_step": 4, "entropy": 0.5, "loss": 1}]


def test_a_refused_line_leaves_no_trace(tmp_path):
    with pytest.raises(TypeError):
        write(tmp_path, line(1, entropy=object()))
    assert read_metrics(tmp_path) == []


def test_a_resumed_run_supersedes_the_steps_beyond_its_checkpoint(tmp_path):
    write(tmp_path, *(line(step, entropy=1.0) for step in (1, 2, 3, 4, 5)))
    write(tmp_path, line(3, entropy=2.0))  # resumed from step 2, killed again after step 3
    assert [(one["rollout_step"], one["entropy"]) for one in read_metrics(tmp_path)] == [(1, 1.0), (2, 1.0), (3, 2.0)]
    write(tmp_path, line(2, entropy=3.0), line(3, entropy=3.0))
    assert [one["entropy"] for one in read_metrics(tmp_path)] == [1.0, 3.0, 3.0]


@pytest.mark.parametrize("cut", [1, 5, 20])
def test_a_kill_in_the_middle_of_a_line_loses_that_line_only(tmp_path, cut):
    write(tmp_path, line(1), line(2))
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(file.read_bytes()[:-cut])
    assert [one["rollout_step"] for one in read_metrics(tmp_path)] == [1]
    write(tmp_path, line(2), line(3))
    assert [one["rollout_step"] for one in read_metrics(tmp_path)] == [1, 2, 3]


@pytest.mark.parametrize("text", ["{]", "[1]", '{"entropy": 1}', '{"rollout_step": "one"}'])
def test_a_broken_line_is_named(tmp_path, text):
    (tmp_path / "metrics.jsonl").write_text('{"rollout_step": 1}\n' + text + '\n{"rollout_step": 3}\n')
    with pytest.raises(MetricsError, match=r"metrics\.jsonl:2: "):
        read_metrics(tmp_path)


@pytest.mark.parametrize("value", ["NaN", "-Infinity", '"0.5"', "[1]"])
def test_a_value_that_is_no_number_is_named(tmp_path, value):
    """A run writes null for NaN; what another program put there would end `status` or a chart in a traceback."""
    (tmp_path / "metrics.jsonl").write_text('{"rollout_step": 1}\n{"rollout_step": 2, "entropy": ' + value + "}\n")
    with pytest.raises(MetricsError, match=r"metrics\.jsonl:2: entropy = "):
        read_metrics(tmp_path)


def test_a_run_without_metrics_has_none(tmp_path):
    assert read_metrics(tmp_path) == []


SAMPLE = {
    "accuracy": False, "reward_shaped": -1.0, "extracted": None, "answer": "7", "prompt_text": "2 + 5 ?",
    "response": "**8**\n\n<b>"
}  # fmt: skip


def test_a_full_disk_under_tensorboard_is_named(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    writer = MetricsWriter(tmp_path, tensorboard=True)
    writer.write(line(1))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError, match=r"File too large: '.*/tensorboard'"):  # noqa: PT012
            for step in range(2, 9):  # a thread writes: a later call has its error
                writer.show(line(step), {}, {}, [SAMPLE | {"response": "x" * 5000}])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_tensorboard_has_both_axes_and_forgets_what_a_resume_does_again(tmp_path):
    """Steps 2 and 3 are done again after a resume from step 1; the held-out accuracy before and after stands once."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    newer = pytest.importorskip("tensorboard.backend.event_processing.plugin_event_accumulator")
    for done, steps in ((0, (1, 2, 3)), (1, (2, 3))):
        writer = MetricsWriter(
            tmp_path, tensorboard=True, done=line(done), settings={"run.seed": 1, "data.path": "x", "a": None}
        )
        if not done:
            writer.show(line(0), {"evaluation/sampled": 0.1})
        for step in steps:
            writer.write(line(step, entropy=float(10 * done + step), loss=None))
            writer.show(
                line(step), {}, {"histograms/response_length": [step, 2 * step]}, [SAMPLE | {"accuracy": step > 1}]
            )
        writer.show(line(3), {"evaluation/sampled": 0.5})
        writer.close()
    for axis, factor in (("by_rollout_step", 1), ("by_optimizer_step", 4)):
        board = accumulator.EventAccumulator(
            str(tmp_path / "tensorboard" / axis), size_guidance={"histograms": 0, "tensors": 0}
        )
        board.Reload()
        curves = {
            name: [(at.step, pytest.approx(at.value)) for at in board.Scalars(name)] for name in board.Tags()["scalars"]
        }
        assert curves["entropy"] == [(1 * factor, 1.0), (2 * factor, 12.0), (3 * factor, 13.0)]
        assert curves["evaluation/sampled"] == [(0, 0.1), (3 * factor, 0.5)]
        assert "loss" not in curves
        if axis == "by_rollout_step":
            assert [each.step for each in board.Histograms("histograms/response_length")] == [1, 2, 3]
            board = newer.EventAccumulator(str(tmp_path / "tensorboard" / axis))  # the older one keeps texts done again
            board.Reload()
            texts = [each.tensor_proto.string_val[0].decode() for each in board.Tensors("responses/1/text_summary")]
            assert [text.split("**")[1] for text in texts] == ["wrong", "right", "right"]
            shown = board.Tensors("config/text_summary")[0]
            assert {b"run.seed", b"data.path"} <= set(re.findall(rb"[a-z]+\.[a-z]+", shown.tensor_proto.string_val[0]))


def test_a_response_stays_text_in_markdown():
    text = sample_text(SAMPLE)
    assert text.startswith("**wrong**\n\n    reward_shaped: -1.0\n")
    assert "    response: **8**\n\n    <b>" in text, "indented: a block of code"
    turns = [{"response": "I ask", "observation": "12 * 3", "role": "tool"}]
    shown = sample_text(SAMPLE | {"earlier": turns})
    assert "    response: I ask\n    tool: 12 * 3\n    response: **8**\n" in shown
    long = sample_text(SAMPLE | {"response": "x" * 100_000 + " the end"})
    assert len(long) < 9000
    assert long.endswith(" the end")
