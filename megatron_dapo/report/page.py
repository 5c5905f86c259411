"""The page: the template, what it may call, and every text escaped."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup

from megatron_dapo.cluster.heartbeat import read_heartbeat
from megatron_dapo.report import tables
from megatron_dapo.report.chart import Curve, Frame, Unit, draw_curves
from megatron_dapo.report.evaluations import BESIDE, INSIDE, over_steps
from megatron_dapo.report.sections import Drawn, Key, draw_sections, has_paper_ranges
from megatron_dapo.report.source import Run

TEMPLATES = Path(__file__).parent / "templates"
SAMPLES = 4
"""Right and wrong responses shown of each run: the newest."""


def page_environment(templates: Path = TEMPLATES) -> Environment:
    """For a page that needs no network and runs no script: its templates, and the report's macros and style."""
    environment = Environment(
        loader=FileSystemLoader([templates, TEMPLATES]),
        autoescape=True,  # responses are hostile text
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals["style"] = Markup((TEMPLATES / "report.css").read_text(encoding="utf-8"))
    environment.filters |= {"as_count": tables.count, "as_share": tables.share, "shortened": tables.shortened}
    return environment


def report_page(runs: Sequence[Run]) -> str:
    """HTML of one run, or of two on the same axes. No script, no request: the page's own policy forbids both."""
    if len({run.name for run in runs}) < len(runs):  # folders of one name, as two clones of a repository have them
        runs = [replace(run, name=str(run.path)) for run in runs]
    return _template().render(
        runs=runs,
        two=len(runs) > 1,
        tiles=[tables.tiles(run) for run in runs],
        measured=any(tables.held_out(run) for run in runs),
        baseline=any(run.before.get("baseline") for run in runs),
        sections=draw_sections(runs),
        has_steps=any(run.lines for run in runs),
        paper_ranges=all(has_paper_ranges(run) for run in runs),
    )


@cache
def _template() -> Template:
    environment = page_environment()
    environment.globals |= {"tables": tables, "evaluated": _evaluated, "samples": _samples, "last_error": _last_error}
    return environment.get_template("report.html.j2")


def _last_error(run: Run) -> str | None:
    """Why an unfinished run ended, if it said so."""
    beat = read_heartbeat(run.path)
    return beat.error if beat and not run.finished else None


def _evaluated(run: Run, salt: str) -> list[Drawn]:
    """A chart of the evaluations inside the run, and of those beside it, where there are two steps or more."""
    last = max([run.steps, *(each.step or 0 for each in run.evaluations)])
    frame = Frame(unit=Unit.SHARE, x_label="rollout step", first=0, last=last, to_one=True)
    drawn = []
    for where in (BESIDE, INSIDE):
        series = over_steps(run.evaluations, where)
        if not any(len(points) > 1 for points in series.values()):
            continue
        curves, legend = [], []
        for colour, (label, points) in enumerate(series.items()):
            steps, estimates = zip(*points, strict=True)
            low, high = [each.low for each in estimates], [each.high for each in estimates]
            values = [each.value for each in estimates]
            curves.append(Curve(steps=steps, values=values, colour=colour, low=low, high=high))
            legend.append(Key(label=label, colour=colour, latest=tables.share(values[-1])))
        svg = Markup(draw_curves(curves, frame, salt=f"{salt}{where[:2]}"))
        note = f"Evaluations {where}; pale: 95% intervals over problems."
        drawn.append(Drawn(title="Over the training", note=note, svg=svg, legend=legend))
    return drawn


def _samples(run: Run, *, right: bool) -> list[dict[str, Any]]:
    """The newest responses that were right, or wrong."""
    return [line for line in run.samples if bool(line.get("accuracy")) is right][: -SAMPLES - 1 : -1]
