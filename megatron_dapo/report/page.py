"""The page: the template, what it may call, and every text escaped."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape
from markupsafe import Markup

from megatron_dapo.cluster.heartbeat import read_heartbeat
from megatron_dapo.config.config_diff import departures, differences, shown
from megatron_dapo.config.load import flatten
from megatron_dapo.monitor.console import duration
from megatron_dapo.monitor.statistics import STAGES, difference, percent
from megatron_dapo.report import learning, sections, tables
from megatron_dapo.report.chart import value_text
from megatron_dapo.report.outcomes import count_outcomes
from megatron_dapo.report.source import Run, look_up

TEMPLATES = Path(__file__).parent / "templates"


@cache
def page_environment(templates: Path = TEMPLATES) -> Environment:
    """For a page that needs no network and runs no script: its templates, and the report's macros and style."""
    environment = Environment(
        loader=FileSystemLoader([templates, TEMPLATES]),
        autoescape=select_autoescape(disabled_extensions=["md.j2"], default=True),  # responses are hostile text
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals["style"] = Markup((TEMPLATES / "report.css").read_text(encoding="utf-8"))
    called = (look_up, percent, difference, differences, departures, flatten)
    environment.globals |= {each.__name__: each for each in called} | {"stages": STAGES}
    environment.filters |= {each.__name__: each for each in (value_text, duration, shown)}
    environment.filters |= {"share": tables.share, "amount": tables.count}
    return environment


def report_page(runs: Sequence[Run]) -> str:
    """HTML of one run, or of two on the same axes. No script, no request: the page's own policy forbids both."""
    if len({run.name for run in runs}) < len(runs):  # folders of one name, as two clones of a repository have them
        for run in runs:
            run.name = str(run.path)
    notes = [[*run.notes] for run in runs]
    return (
        page_environment()
        .get_template("report.html.j2")
        .render(
            runs=runs,
            outcomes=[count_outcomes(run.path / "ledger.jsonl", noted) for run, noted in zip(runs, notes, strict=True)],
            notes=notes,
            heartbeats=[read_heartbeat(run.path) for run in runs],
            alarms=[tables.alarm_periods(run) for run in runs],
            baseline=any("baseline" in stages for run in runs for stages in run.held_out.values()),
            tables=tables,
            learning=learning,
            sections=sections,
        )
    )
