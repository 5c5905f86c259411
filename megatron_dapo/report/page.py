"""The page: everything computed elsewhere, put into the template with every text escaped."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from megatron_dapo.config.config_diff import Departure, flatten, shown
from megatron_dapo.monitor.console import duration
from megatron_dapo.monitor.run_status import read_heartbeat
from megatron_dapo.report import tables
from megatron_dapo.report.alarms import Spell, alarm_spells, limits_of
from megatron_dapo.report.charts import count, draw_sections, has_paper_ranges, share, total
from megatron_dapo.report.evaluations import EvaluationRow, draw_evaluations, evaluation_rows
from megatron_dapo.report.source import Run

TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True, kw_only=True)
class Tile:
    """One headline figure; of two runs one line each."""

    label: str
    values: list[str]
    details: list[str]


@dataclass(frozen=True, kw_only=True)
class RunView:
    """One run's own parts of the page."""

    name: str
    path: str
    colour: int
    state: str
    complete: bool
    notes: list[str]
    spells: list[Spell]
    held_out: list[tables.HeldOut]
    evaluated: list[tuple[str, Markup, list]]
    evaluations: list[EvaluationRow]
    prompts: list[tables.Part]
    tokens: list[tables.Part]
    bias: list[tuple[str, str, str, str]]
    wording: list[tuple[str, str, str, str]]
    phases: list[tuple[str, str, str, str]]
    departures: list[Departure]
    config: list[tuple[str, str]]
    right: list[tables.Sample]
    wrong: list[tables.Sample]
    examples: list[tables.Example]
    provenance: list[tuple[str, str]]


def report_page(runs: Sequence[Run]) -> str:
    """HTML of one run, or of two on the same axes. No script, no request: the page's own policy forbids both."""
    if len({run.name for run in runs}) < len(runs):  # folders of one name, as two clones of a repository have them
        runs = [replace(run, name=str(run.path)) for run in runs]
    views = [_view(run, number) for number, run in enumerate(runs)]
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,  # responses are hostile text
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"shown": shown, "breakable": _breakable}
    return environment.get_template("report.html.j2").render(
        style=Markup((TEMPLATES / "report.css").read_text(encoding="utf-8")),
        title=" and ".join(run.name for run in runs),
        runs=views,
        two=len(runs) > 1,
        tiles=_tiles(runs, views),
        measured=any(view.held_out for view in views),
        baseline=any(run.before.get("baseline") for run in runs),
        sections=draw_sections(runs),
        has_steps=any(run.lines for run in runs),
        differences=tables.config_differences(runs),
        paper_ranges=all(has_paper_ranges(run) for run in runs),
    )


def _view(run: Run, number: int) -> RunView:
    return RunView(
        name=run.name,
        path=str(run.path),
        colour=number,
        state=_state(run),
        complete=run.finished,
        notes=[*run.notes, *_last_error(run)],
        spells=alarm_spells(run.lines, limits_of(run.setting)),
        held_out=tables.held_out(run),
        evaluated=draw_evaluations(run.evaluations, last_step=_last_evaluated(run), salt=f"evaluated{number}"),
        evaluations=evaluation_rows(run.evaluations),
        prompts=tables.parts(run.fates.prompts, "prompts") if run.fates else [],
        tokens=tables.parts(run.fates.tokens, "tokens") if run.fates else [],
        bias=tables.bias_rows(run),
        wording=tables.wording_rows(run),
        phases=tables.phase_rows(run),
        departures=tables.config_departures(run),
        config=[(key, shown(value)) for key, value in flatten(run.config).items()],
        right=tables.samples(run, right=True),
        wrong=tables.samples(run, right=False),
        examples=tables.examples(run),
        provenance=tables.provenance(run),
    )


def _last_evaluated(run: Run) -> int:
    return max([run.steps, *(each.step or 0 for each in run.evaluations)])


def _breakable(key: str) -> Markup:
    """A config key that may be broken after its dots, on a narrow screen."""
    return Markup(str(escape(key)).replace(".", ".<wbr>"))


def _last_error(run: Run) -> list[str]:
    """Why an unfinished run ended, if it said so."""
    beat = read_heartbeat(run.path)
    return [f"Last error: {beat.error}"] if beat and beat.error and not run.finished else []


def _state(run: Run) -> str:
    if run.finished:
        return f"finished after {count(run.steps)} rollout steps"
    if not run.lines:
        return "no rollout step finished yet"
    return f"{count(run.steps)} of {count(run.planned)} rollout steps" if run.planned else f"{count(run.steps)} steps"


def _tiles(runs: Sequence[Run], views: Sequence[RunView]) -> list[Tile]:
    """Headline figures, the same six for every run."""
    return [
        _tile("Held-out accuracy", [_headline(view) for view in views]),
        _tile("Rollout steps", [_progress(run) for run in runs]),
        _tile("Tokens generated", [_tokens(run) for run in runs]),
        _tile("Time", [_time(run) for run in runs]),
        _tile("Groups kept", [_kept(run) for run in runs]),
        _tile("Alarms now", [_alarms(run, view) for run, view in zip(runs, views, strict=True)]),
    ]


def _tile(label: str, pairs: Sequence[tuple[str, str]]) -> Tile:
    return Tile(label=label, values=[value for value, _ in pairs], details=[detail for _, detail in pairs])


NOTHING = ("–", "not measured yet")


def _headline(view: RunView) -> tuple[str, str]:
    if not view.held_out:
        return NOTHING
    first = view.held_out[0]
    shares = [f"{row.middle:.1f}%" for row in first.rows if row.stage in ("before", "after")]
    return " → ".join(shares), f"{first.way}; {first.gain}" if first.gain else f"{first.way}, so far only before"


def _progress(run: Run) -> tuple[str, str]:
    if not run.lines:
        return NOTHING
    optimizer = run.lines[-1].get("optimizer_step") or 0
    wanted = f" of {count(run.planned)}" if run.planned and run.planned != run.steps else ""
    return f"{count(run.steps)}{wanted}", f"{count(optimizer)} optimizer steps"


def _tokens(run: Run) -> tuple[str, str]:
    generated, trained = total(run, "tokens/generated"), total(run, "tokens/trained")
    return (count(generated), f"{share(trained / generated)} of them trained on") if generated else NOTHING


def _time(run: Run) -> tuple[str, str]:
    seconds = total(run, "timing/step")
    if not seconds:
        return NOTHING
    return duration(seconds), f"{duration(seconds / len(run.lines))} a rollout step"


def _kept(run: Run) -> tuple[str, str]:
    kept, right, wrong = (total(run, f"sampling/{fate}") for fate in ("kept", "all_correct", "all_wrong"))
    decided = kept + right + wrong
    if not decided:
        return NOTHING
    return share(kept / decided), f"{share(right / decided)} all right, {share(wrong / decided)} all wrong"


def _alarms(run: Run, view: RunView) -> tuple[str, str]:
    if not run.lines:
        return NOTHING
    holding = [spell for spell in view.spells if spell.holds]
    earlier = len(view.spells) - len(holding)
    return str(len(holding)), ", ".join(s.alarm.name for s in holding) or (f"{earlier} earlier" if earlier else "none")
