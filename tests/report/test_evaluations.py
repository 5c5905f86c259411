"""Evaluations of a run in its report: curves with intervals inside and beside it, a table, broken files named."""

import json
import re

import pytest

from megatron_dapo.report.page import report_page
from megatron_dapo.report.sections import Group, draw_evaluations
from megatron_dapo.report.source import BESIDE, INSIDE, Run, read_evaluations
from tests.report.folders import write_run


def write(run, name, value, samples=8):
    names = ("avg", "pass", "cons") if samples > 1 else ("avg",)
    figures = {f"{each}@{samples}": {"value": value, "low": value - 0.1, "high": value + 0.1} for each in names}
    folder = run / "evaluations" / name
    folder.mkdir(parents=True)
    way = {"problems": 30, "samples": samples, "figures": figures}
    (folder / "result.json").write_text(json.dumps({"ways": {"sampled": way}}))


def test_names_say_which_step_and_where(tmp_path):
    for name in ("after", "v4", "before", "step2", "baseline", "model"):
        write(tmp_path, name, 0.5)
    found = read_evaluations(tmp_path, 7, [])
    assert [(each.name, each.step, each.where) for each in found] == [
        ("before", 0, INSIDE),
        ("step2", 2, INSIDE),
        ("v4", 4, BESIDE),
        ("after", 7, INSIDE),
        ("baseline", None, INSIDE),
        ("model", None, BESIDE),
    ]


def test_they_are_drawn_over_steps_with_intervals_and_listed(tmp_path):
    run = write_run(tmp_path / "run")
    write(run, "before", 0.2, samples=1)
    write(run, "v0", 0.2)
    write(run, "v4", 0.4)
    page = report_page([Run(run)])
    (chart,) = re.findall(r"Evaluations beside it; pale.*?</svg>", page, re.DOTALL)
    assert all(f"var(--c{colour})" in chart for colour in range(3)), "avg, pass, cons"
    assert "opacity: 0.16" in chart
    assert page.count("inside the run; pale") == 1, "on the first screen; one point is no curve"
    assert "avg@8 40.0% [30.0, 50.0]; pass@8 40.0% [30.0, 50.0]; cons@8 40.0% [30.0, 50.0]" in page
    assert "avg@1 20.0% [10.0, 30.0]" in page


def test_one_that_cannot_be_read_is_named(tmp_path):
    run = write_run(tmp_path / "run")
    write(run, "v1", 0.3)
    for name, content in (
        ("v2", "rubbish"),
        ("v3", '{"ways": {"sampled": {"samples": 2, "figures": {}}}}'),
        ("v5", "[]"),
    ):
        (run / "evaluations" / name).mkdir()
        (run / "evaluations" / name / "result.json").write_text(content)
    found = Run(run)
    assert [each.name for each in found.evaluations] == ["v1"]
    assert sum("evaluations/v" in note for note in found.notes) == 3


def test_held_out_accuracy_of_several_runs_lies_on_one_axis(tmp_path):
    runs = [write_run(tmp_path / name, steps=steps) for name, steps in (("long", 12), ("short", 7))]
    for run, after in zip(runs, (0.8, 0.6), strict=True):
        for name, value in (("before", 0.2), ("step4", 0.4), ("after", after)):
            write(run, name, value)
    groups = [Group(name=run.name, runs=[run], colour=at) for at, run in enumerate(map(Run, runs))]
    [drawn] = draw_evaluations(groups, INSIDE, ["sampled"])
    assert [(curve.label, curve.steps, curve.values) for curve in drawn.curves] == [
        ("long", [0, 4, 12], (0.2, 0.4, 0.8)),
        ("short", [0, 4, 7], (0.2, 0.4, 0.6)),
    ]
    assert drawn.curves[0].low == pytest.approx([0.1, 0.3, 0.7])
    page = report_page([Run(run) for run in runs])
    assert "20.0% → 80.0%" in page
    assert "20.0% → 60.0%" in page
