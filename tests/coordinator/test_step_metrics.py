"""Metrics of what dynamic sampling saw, and the alarms that a step's metrics raise."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from megatron_dapo.config.run_config import MonitorConfig
from megatron_dapo.coordinator import step_metrics
from megatron_dapo.coordinator.step_metrics import _response_metrics, _sampling_metrics, expert_metrics, repeated_share
from megatron_dapo.experience.groups import Admission
from megatron_dapo.monitor.health import HealthMonitor
from megatron_dapo.monitor.writer import MetricsWriter
from tests.coordinator.test_sampler import GROUP, group


def admission(kept, filtered=()):
    return Admission(
        kept=tuple(kept),
        filtered=tuple(filtered),
        carried=0,
        carried_tokens=0,
        in_flight=0,
        expired=0,
        expired_tokens=0,
        discarded=0,
        discarded_tokens=0,
        passed_over=(),
        generated=(*kept, *filtered),
        predicted_groups=4,
        limit_reached=False,
    )


def test_useless_groups_are_counted_whether_they_are_filtered_or_trained_on():
    useful, right, wrong = group(0, 2, 5), group(1, GROUP, 5), group(2, 0, 5)
    names = ("sampling/kept", "sampling/all_correct", "sampling/all_wrong", "sampling/pass_rate")
    for seen in (admission([useful], [right, wrong]), admission([useful, right, wrong])):
        metrics = _sampling_metrics(seen, wanted=3)
        assert [metrics[name] for name in names] == [1, 1, 1, 1 / 3]


def test_the_bias_ledger_sets_what_is_trained_on_against_all_that_was_written():
    """By hand: a long and a short useful group, a short one that is all right, a long one that is all wrong."""
    kept, filtered = [group(0, 2, 30), group(1, 1, 10)], [group(2, GROUP, 4), group(3, 0, 100)]
    metrics = _sampling_metrics(admission(kept, filtered), wanted=2)
    assert metrics["bias/accepted_length"] == (30 + 10) / 2
    assert metrics["bias/generated_length"] == (30 + 10 + 4 + 100) / 4
    assert metrics["bias/accepted_accuracy"] == (2 + 1) / (2 * GROUP)
    assert metrics["bias/generated_accuracy"] == (2 + 1 + GROUP + 0) / (4 * GROUP)


def test_where_groups_were_given_up_the_decided_ones_stand_for_the_policy():
    """Of those given up the short ones were finished: with them, responses would look shorter than they are."""
    kept, filtered, surplus = group(1, 2, 30), group(0, 0, 100), group(2, 2, 1)
    seen = replace(admission([kept], [filtered]), generated=(filtered, kept, surplus))
    assert seen.judged == (filtered, kept, surplus)
    seen = replace(seen, discarded=2)
    assert seen.judged == (filtered, kept)
    assert _response_metrics(seen.judged)["response_length/mean"] == 65
    assert _sampling_metrics(seen, wanted=4)["sampling/batch_share"] == 1 / 4


def test_tokens_are_told_by_what_became_of_them():
    metrics = _sampling_metrics(admission([group(0, 2, 30)], [group(1, GROUP, 4), group(2, 0, 100)]), wanted=1)
    assert (metrics["tokens/all_correct"], metrics["tokens/all_wrong"]) == (GROUP * 4, GROUP * 100)


@pytest.mark.parametrize(("gap", "alarms"), [(0.2, []), (0.4, ["mismatch"]), (2.0, ["mismatch"])])
def test_an_alarm_is_noted_at_the_step_that_raises_it(monkeypatch, tmp_path, gap, alarms):
    noted: list[str] = []
    metrics = {"rollout_step": 1, "optimizer_step": 4, "mismatch/mean_abs": gap}
    monkeypatch.setattr(step_metrics, "write_samples", lambda *_: None)
    writer = MetricsWriter(tmp_path, tensorboard=False)
    context = SimpleNamespace(
        config=SimpleNamespace(monitor=MonitorConfig()),
        writer=writer,
        health=HealthMonitor(mismatch_warn=0.3),
        run_dir=SimpleNamespace(path=tmp_path),
        console=SimpleNamespace(note=noted.append),
        inputs=SimpleNamespace(prompts=SimpleNamespace(prompts=[])),
    )
    batch = SimpleNamespace(admission=admission([group(0, 2, 5)]), old=SimpleNamespace(expert_counts=None))
    step_metrics.write_records(context, metrics, batch)
    writer.close()
    assert [line.split()[1].rstrip(":") for line in noted] == alarms


def test_repeated_runs_are_counted_as_loops_count_them():
    rng = np.random.default_rng(0)
    once, twice = rng.integers(0, 9, 40), np.tile(rng.integers(0, 1000, 30), 3)
    for ids in (once, twice, rng.integers(0, 2, 200), np.zeros(50, int), np.arange(15), np.arange(16)):
        runs = [tuple(ids[at : at + 16]) for at in range(len(ids) - 15)]
        wanted = 1 - len(set(runs)) / len(runs) if runs else 0.0
        assert repeated_share(ids.astype(np.int32)) == pytest.approx(wanted)
    assert repeated_share(twice.astype(np.int32)) > 0.5


def test_repetition_is_looked_for_in_so_many_tokens(monkeypatch):
    groups = [group(0, 2, 40), group(1, 2, 40), group(2, 2, 15)]  # of equal tokens; the last is too short to repeat any
    assert _response_metrics(groups)["repetition"] == pytest.approx(2 / 3 * 24 / 25)
    monkeypatch.setattr(step_metrics, "REPETITION_TOKENS", 80)
    assert _response_metrics(groups)["repetition"] == pytest.approx(24 / 25)


def test_useful_groups_are_counted_by_their_share_of_right_responses():
    seen = admission([group(0, 1, 5), group(1, 2, 5), group(2, 2, 5), group(3, 3, 5)], [group(4, 0, 5)])
    metrics = _sampling_metrics(seen, wanted=4)
    counts = [metrics[f"sampling/useful_{name}"] for name in ("0_25", "25_50", "50_75", "75_100")]
    assert counts == [0, 1, 2, 1]


def test_expert_metrics_are_those_counted_by_hand():
    """Two layers of four experts, two of them a token. Layer 1: 8 tokens evenly; layer 2: 8 tokens on two experts."""
    counts = np.array([[4, 4, 4, 4, 8, 8 * math.log(4), 2], [8, 8, 0, 0, 8, 0.0, 0]], dtype=np.float64)
    metrics = expert_metrics(counts, replayed=True)
    assert metrics == pytest.approx(
        {
            "experts/imbalance": 1.5,  # 1 and 2
            "experts/imbalance_max": 2.0,
            "experts/dead": 2 / 8,
            "experts/entropy": 0.5,  # 1 and 0 of ln 4
            "experts/rerouted": 2 / 16,
        }
    )
    assert "experts/rerouted" not in expert_metrics(counts, replayed=False)
