"""Bubble, communication, imbalance, tail and memory of a made-up step, by hand; and its trace."""

import json
from dataclasses import replace

import pytest

from tests.tools.timelines import write_timeline
from tools.profile_throughput import chrome_trace, tracks_without_overlap
from tools.recorded_spans import Span, read_spans
from tools.timeline_figures import rank_rows, recorded_steps, timeline_figures


def steps_of(tmp_path, *, skip=0, **layout):
    write_timeline(tmp_path, 2, **layout)
    return recorded_steps(read_spans(tmp_path), skip=skip)


def figures(steps, tail=0.5, layers=2, servers=2):
    return timeline_figures(steps, layers=layers, servers=servers, tail_share=tail)


def test_a_server_that_was_started_again_is_one_server(tmp_path):
    (one,) = steps_of(tmp_path)  # 100 tokens, all of http://a:1
    again = replace(one, requests={"http://a:2": one.requests["http://a:1"]})
    assert figures([one, again], servers=1)["server_imbalance"] is None
    assert figures([one, again], servers=2)["server_imbalance"] == pytest.approx(1.0), "the other wrote nothing"
    spans = one.requests["http://a:1"]
    both = replace(one, requests={"http://a:2": spans[:3], "http://b:1": spans[3:]})
    assert figures([one, both])["server_imbalance"] == pytest.approx((100 + 60) / 100 - 1)


def test_shares_of_the_update(tmp_path):
    found = figures(steps_of(tmp_path))
    assert found["compute"] == pytest.approx(24 / 40)
    assert found["gradient_sync"] == found["communication"] == pytest.approx(2 / 40)
    assert found["optimizer"] == pytest.approx(6 / 40)
    assert found["tensor_parallel"] is found["bubble"] is found["dp_imbalance"] is None


def test_the_bubble_is_what_a_stage_does_not_use_of_its_schedule(tmp_path):
    assert figures(steps_of(tmp_path, pipeline=2))["bubble"] == pytest.approx((30 - 24) / 30)


def test_tensor_parallel_is_the_measured_all_reduce_times_how_often_it_is_made(tmp_path):
    found = figures(steps_of(tmp_path, tensor=2))
    reduced = 4 * 300 / 300 * 4 * 2 * 0.01  # four micro-batches, four reductions in each of two layers
    assert found["tensor_parallel"] == pytest.approx(reduced / 40)
    assert found["communication"] == pytest.approx((2 + reduced) / 40)


def test_without_the_models_layers_tensor_parallel_is_not_known(tmp_path):
    """0 would say that it cost nothing."""
    assert figures(steps_of(tmp_path, tensor=2), layers=None)["tensor_parallel"] is None


def test_imbalance_is_the_slowest_data_parallel_rank_over_the_mean(tmp_path):
    assert figures(steps_of(tmp_path, data=2, slow=1.2))["dp_imbalance"] == pytest.approx(1.2 / 1.1 - 1)


def test_the_tail_is_when_few_responses_run(tmp_path):
    steps = steps_of(tmp_path)  # four until 10 s, three until 20, two until 30, one until 40
    assert figures(steps, tail=0.5)["rollout_tail"] == pytest.approx(10 / 40)
    assert figures(steps, tail=0.6)["rollout_tail"] == pytest.approx(20 / 40)


def test_memory_is_the_most_of_any_rank_and_call(tmp_path):
    steps = steps_of(tmp_path, data=2)
    assert figures(steps)["peak_memory"] == 5_000_001
    assert rank_rows(steps)[1]["peak"] == {"log_probs": 2e6, "update": 5_000_001, "write": 1e6}


def test_steps_that_do_not_count_or_are_not_whole_are_left_out(tmp_path):
    assert steps_of(tmp_path, skip=2) == []
    assert figures([])["bubble"] is None
    (tmp_path / "timeline" / "coordinator.jsonl").unlink()
    assert recorded_steps(read_spans(tmp_path), skip=0) == []


def test_the_trace_has_every_span_of_every_process_once(tmp_path):
    (step,) = steps_of(tmp_path, data=2)
    events = json.loads(json.dumps(chrome_trace(step)))["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert list(names.values()) == [
        "coordinator, rollout step 2",
        "server http://a:1",
        "rank0 (tensor 0, pipeline 0, context 0, data 0)",
        "rank1 (tensor 0, pipeline 0, context 0, data 1)",
    ]
    spans = [event for event in events if event["ph"] == "X"]
    whole = 4 + 4 + sum(len(rank.spans) for rank in step.ranks)
    assert len(spans) == whole
    update = next(event for event in spans if event["name"] == "update")
    assert (update["ts"], update["dur"]) == (50e6, 40e6)
    by_thread: dict = {}
    for event in spans:
        by_thread.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    server = [sorted(times) for (pid, _), times in by_thread.items() if names[pid].startswith("server")]
    assert len(server) == 4, "four requests ran at once"


def test_tracks_are_as_few_as_can_be():
    spans = [Span(track="", name=str(s), start=s, end=e, about={}) for s, e in ((0, 2), (1, 3), (2, 4), (3, 5))]
    assert [[span.name for span in track] for track in tracks_without_overlap(spans)] == [["0", "2"], ["1", "3"]]
