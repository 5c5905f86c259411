"""Every metric is declared once, and nothing else can be written."""

from pathlib import Path

import pytest

from tests.monitor.declared import check_declared
from tools.docs_pages import metrics_page
from tools.metric_catalog import CATALOG, GROUPS

WATCHED = {
    "rollout_step",
    "optimizer_step",
    "accuracy/mean",
    "reward/mean",
    "reward_shaped/mean",
    "response_length/mean",
    "response_length/p95",
    "response_length/max",
    "truncated_fraction",
    "entropy",
    "mean_prob",
    "clip_fraction/low",
    "clip_fraction/high",
    "clip_high_prob",
    "sampling/generated",
    "sampling/kept",
    "sampling/all_correct",
    "sampling/all_wrong",
    "sampling/carried",
    "sampling/expired",
    "sampling/pass_rate",
    "sampling/oversampling_predicted",
    "sampling/oversampling_actual",
    "bias/accepted_length",
    "bias/generated_length",
    "bias/accepted_accuracy",
    "bias/generated_accuracy",
    "mismatch/kl",
    "mismatch/max_abs",
    "mismatch/mean_abs",
    "grad_norm",
    "lr",
    "loss",
    "weight_version",
    "timing/rollout",
    "timing/reward",
    "timing/logprob",
    "timing/update",
    "timing/weight_sync",
    "timing/evaluation",
    "timing/checkpoint",
    "timing/step",
    "tokens_per_second/rollout",
    "tokens_per_second/train",
    "tokens/generated",
    "tokens/trained",
    "reflection_rate",
    "evaluation/greedy",
    "evaluation/sampled",
}


def test_all_that_must_be_watched_is_declared():
    assert set(CATALOG) >= WATCHED


def test_no_name_is_declared_twice():
    names = [metric.name for group in GROUPS.values() for metric in group]
    assert len(names) == len(set(names)) == len(CATALOG)


def test_seconds_are_seconds():
    assert {metric.unit for name, metric in CATALOG.items() if name.startswith("timing/")} == {"s"}


def test_every_metric_says_how_the_values_inside_a_step_become_one():
    assert {metric.reduce for metric in CATALOG.values()} == {"mean", "sum", "max", "95th percentile", "ratio", "last"}
    assert all(metric.help.endswith(".") and metric.unit for metric in CATALOG.values())


def test_an_undeclared_name_is_refused():
    check_declared(["entropy", "objective/mine"])
    with pytest.raises(AssertionError, match="declare them"):
        check_declared(["entropy", "acuracy/mean"])


def test_the_page_has_an_entry_for_every_metric():
    entries = [line for line in metrics_page().splitlines() if line.startswith("- `")]
    assert [entry.split("`")[1] for entry in entries] == list(CATALOG)


def test_the_page_on_disk_is_this_page():
    page = Path(__file__).parents[2] / "docs" / "metrics.md"
    assert page.read_text() == metrics_page(), "run `make docs`"
