"""Prompts over their groups, and the fit of accuracy to compute: what it finds, how sure it is, when it refuses."""

import json

import numpy as np
import pytest

from megatron_dapo.report.page import report_page
from megatron_dapo.report.source import Run
from megatron_dapo.report.tables import fit_scaling, groups_by_prompt, hardest, prompt_kinds
from tests.monitor.runs import metrics
from tests.report.folders import write_lines, write_run

GROUPS = {0: [0, 0, 0], 1: [0, 4], 2: [4, 0], 3: [8, 8], 4: [0], 5: [0, 3, 0]}


def curve(hours, *, end=0.7, exponent=1.5, middle=2.0, start=0.2):
    return start + (end - start) / (1 + (middle / hours) ** exponent)


def test_prompts_are_counted_by_what_became_of_them():
    assert list(prompt_kinds(GROUPS).values()) == [6, 2, 5, 1, 2]


def test_the_ledger_gives_each_prompts_groups_and_the_page_names_the_hardest(tmp_path):
    folder = write_run(tmp_path / "run")
    events, position = [], 0
    for row, rights in GROUPS.items():
        for right in rights:
            about = {
                "prompt": position,
                "rollout_step": 1,
                "weight_version": 0,
                "tokens": 9,
                "correct": right,
                "row": row,
            }
            fate = "trained" if 0 < right < 8 else "filtered"
            events += [{"event": event, **about} for event in ("dispatched", "finished", fate)]
            position += 1
    write_lines(folder / "ledger.jsonl", events)
    with (folder / "samples.jsonl").open("a") as file:
        file.write(json.dumps({"rollout_step": 12, "row": 0, "place": "train.jsonl:1"}) + "\n")
    assert groups_by_prompt(Run(folder)) == GROUPS
    assert hardest(GROUPS, Run(folder))[:2] == [["train.jsonl:1", "0, 0, 0"], ["prompt 4 of the set", "0"]]
    page = report_page([Run(folder)])
    assert "train.jsonl:1" in page
    assert "forgotten: some right before, none at last" in page
    assert "No fit of accuracy to compute: 0 measurements" in page


def test_the_fit_finds_the_curve_and_its_intervals_hold_it():
    hours = np.linspace(0.5, 10, 20)
    held, forecast = 0, []
    for seed in range(20):
        noise = np.random.default_rng(seed).normal(0, 0.01, len(hours))
        fit = fit_scaling(hours, curve(hours) + noise, 0.2)
        assert not isinstance(fit, str)
        held += fit["A"].low <= 0.7 <= fit["A"].high
        for times in (2, 4, 8, 16):
            if later := fit.get(f"at {times} x the hours"):
                forecast.append(later.low <= curve(times * hours[-1]) <= later.high)
                assert later.high - later.low <= 0.1
    assert held >= 16
    assert len(forecast) >= 40
    assert np.mean(forecast) >= 0.8
    exact = fit_scaling(hours, curve(hours), 0.2)
    assert not isinstance(exact, str)
    assert exact["A"].value == pytest.approx(0.7, abs=0.01)
    assert exact["C_mid"].value == pytest.approx(2.0, rel=0.05)
    assert exact["B"].value == pytest.approx(1.5, rel=0.05)


@pytest.mark.parametrize(
    ("hours", "accuracy", "why"),
    [
        (np.arange(1.0, 8.0), curve(np.arange(1.0, 8.0)), "7 measurements of held-out accuracy"),
        (np.arange(1.0, 21.0), np.linspace(0.21, 0.4, 20), "does not show yet where it will end"),
        (np.arange(1.0, 21.0), curve(np.arange(1.0, 21.0), middle=60.0), "does not show yet"),
        (np.arange(1.0, 21.0), np.full(20, 0.2), "does not show yet"),
        (np.arange(1.0, 21.0), np.linspace(0.2, 0.1, 20), "does not show yet"),
    ],
    ids=["few points", "a straight line", "before its middle", "nothing learnt", "worse"],
)
def test_it_refuses_where_the_curve_has_not_bent(hours, accuracy, why):
    fit = fit_scaling(hours, accuracy, 0.2)
    assert isinstance(fit, str)
    assert why in fit


def test_a_run_with_evaluations_shows_its_fit(tmp_path):
    folder = write_run(tmp_path / "run", steps=20)
    lines = metrics(20)
    for line in lines:
        accuracy = float(curve(line["rollout_step"] / 2, start=0.3))
        line |= {"timing/step": 2000.0, "timing/evaluation": 200.0, "evaluation/sampled": accuracy}
    write_lines(folder / "metrics.jsonl", lines)
    page = report_page([Run(folder)])
    assert "Sampled answers, 20 measurements in 10 hours" in page
    assert "C_mid, hours" in page
    assert "at 2 x the hours" in page
