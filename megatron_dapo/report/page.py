"""The page: the template, what it may call, and every text escaped."""

import os.path
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, select_autoescape
from markupsafe import Markup

from megatron_dapo.cluster.heartbeat import read_heartbeat
from megatron_dapo.config.config_diff import departures
from megatron_dapo.config.load import ABSENT, differences, flatten, shown
from megatron_dapo.monitor.console import READING, duration
from megatron_dapo.monitor.statistics import STAGES, difference, percent
from megatron_dapo.report import sections, tables
from megatron_dapo.report.chart import value_text
from megatron_dapo.report.source import Run, look_up

TEMPLATES = Path(__file__).parent / "templates"


@cache
def page_environment(templates: Path = TEMPLATES) -> Environment:
    """For a page that needs no network and runs no script: its templates, and the report's macros and style."""
    escaped = select_autoescape(disabled_extensions=["md.j2"], default=True)  # responses are hostile text
    environment = Environment(loader=FileSystemLoader([templates, TEMPLATES]), autoescape=escaped, **READING)
    environment.globals["style"] = Markup((TEMPLATES / "report.css").read_text(encoding="utf-8"))
    called = (look_up, percent, difference, departures, flatten, read_heartbeat)
    known = {"stages": STAGES, "absent": ABSENT, "tables": tables, "sections": sections}
    environment.globals |= {each.__name__: each for each in called} | known
    environment.filters |= {each.__name__: each for each in (value_text, duration, shown)}
    environment.filters |= {"share": partial(value_text, unit="share"), "amount": partial(value_text, unit="count")}
    return environment


def report_page(runs: Sequence[Run], smooth: int | None = None) -> str:
    """HTML of one run, or of several on the same axes. No script, no request: the page's own policy forbids both.

    Args:
        smooth: rollout steps over which a curve is the mean; None: a fiftieth of the longest run.
    """
    if len({run.name for run in runs}) < len(runs):  # folders of one name, as two clones of a repository have them
        above = os.path.commonpath([run.path.resolve().parent for run in runs])
        for run in runs:
            run.name = os.path.relpath(run.path.resolve(), above)
    groups = sections.group_by_seed(runs)
    runs = [run for group in groups for run in group.runs]
    configs = [flatten(group.runs[0].config) for group in groups]
    changed = dict.fromkeys(key for config in configs[1:] for key in differences(configs[0], config))
    template = page_environment().get_template("report.html.j2")
    return template.render(
        runs=runs,
        groups=groups,
        smooth=smooth or max(run.steps for run in runs) // 50 or 1,
        colours=[group.colour for group in groups for _ in group.runs],
        changed=[(key, [config.get(key, ABSENT) for config in configs]) for key in changed],
        prompt_groups=[tables.groups_by_prompt(run) for run in runs],
        alarms=[tables.alarm_periods(run) for run in runs],
        baseline=any("baseline" in stages for run in runs for stages in run.held_out.values()),
    )
