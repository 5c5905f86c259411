"""Evaluations of a run in its report: curves with intervals inside and beside it, a table, broken files named."""

import json
import re

from megatron_dapo.report.page import report_page
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
    assert "inside the run; pale" not in page, "one point is no curve"
    assert "avg@8 40.0% [30.0, 50.0]; pass@8 40.0% [30.0, 50.0]; cons@8 40.0% [30.0, 50.0]" in page
    assert "avg@1 20.0% [10.0, 30.0]" in page
    assert "for the same answers they differ a little" in page, "the bars' interval is another one"


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
