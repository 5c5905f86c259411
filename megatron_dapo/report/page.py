"""The page: the template, what it may call, and every text escaped."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape
from markupsafe import Markup

from megatron_dapo.cluster.heartbeat import read_heartbeat
from megatron_dapo.monitor.catalog import GROUPS
from megatron_dapo.report import sections, tables
from megatron_dapo.report.chart import value_text
from megatron_dapo.report.source import Run

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
    environment.filters |= {"value_text": value_text, "shortened": tables.shortened}
    return environment


def report_page(runs: Sequence[Run]) -> str:
    """HTML of one run, or of two on the same axes. No script, no request: the page's own policy forbids both."""
    if len({run.name for run in runs}) < len(runs):  # folders of one name, as two clones of a repository have them
        runs = [replace(run, name=str(run.path)) for run in runs]
    environment = page_environment()
    environment.globals |= {"tables": tables, "sections": sections, "read_heartbeat": read_heartbeat}
    return environment.get_template("report.html.j2").render(
        runs=runs,
        tiles=[tables.tiles(run) for run in runs],
        measured=any(tables.held_out(run) for run in runs),
        baseline=any(run.before.get("baseline") for run in runs),
    )


def metrics_page() -> str:
    """The metrics reference as Markdown, made from the catalog, so that it cannot drift."""
    return page_environment().get_template("metrics.md.j2").render(groups=GROUPS)
