"""The ladder's report: one HTML file without network, the same as Markdown, and a picture."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from examples.ablation.curves import CHARTS, SETS, draw
from examples.ablation.paired import Paired
from examples.ablation.picture import draw_picture
from examples.ablation.results import GREEDY, MEASURES, SAMPLED, Measure, Outcome
from examples.ablation.rungs import RUNGS
from examples.ablation.verdicts import NOISE, ONE_SEED, UNSURE, Found, claims, compare
from megatron_dapo.report.page import page_environment

TEMPLATES = Path(__file__).parent / "templates"
HEADS = {
    "ladder": "The ladder: each rung against the one before it",
    "on": "Each technique switched on alone, against naive GRPO",
    "off": "Each technique switched off alone: DAPO against DAPO without it",
    "presets": "Presets against the paper's",
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of a table of comparisons, as text."""

    what: str
    pair: str
    seeds: str
    gain: str
    greedy: str
    equal_tokens: str
    paper: str
    verdict: str


@dataclass(frozen=True, kw_only=True)
class Base:
    """The base of the seeds: as it is, and not allowed to guess."""

    way: str
    before: str
    no_guessing: str


def write_report(folder: Path, outcomes: Sequence[Outcome]) -> list[Path]:
    """report.html, results.md and curves.png in `folder`; returns their paths."""
    environment = page_environment(TEMPLATES)
    found, ran = compare(outcomes), {outcome.rung for outcome in outcomes}
    content = {
        "seeds": sorted({outcome.seed for outcome in outcomes}),
        "runs": len(outcomes),
        "failures": [f"{o.rung}, seed {o.seed}: {o.failure}" for o in outcomes if o.failure],
        "tables": [(HEADS[name], rows) for name, items in found.items() if (rows := comparison_rows(items, ran))],
        "claims": [claim_row(item) for item in claims(outcomes) if item.one in ran or item.other in ran],
        "said": said(found, claims(outcomes)),
        "rungs": rung_rows(outcomes),
        "measures": [measure.label for measure in MEASURES],
        "bases": base_rows(outcomes),
        "late": "the last third of its rollout steps",
    }
    html, markdown, picture = folder / "report.html", folder / "results.md", folder / "curves.png"
    charts = [
        (title, [draw(chart, outcomes, key) for chart in CHARTS])
        for key, (title, rungs) in SETS.items()
        if not ran.isdisjoint(rungs)
    ]
    page = environment.get_template("ladder.html.j2").render(**content, charts=charts)
    html.write_text(page, encoding="utf-8")
    markdown.write_text(environment.get_template("ladder.md.j2").render(**content), encoding="utf-8")
    draw_picture(outcomes, found, picture)
    return [html, markdown, picture]


def spoken_difference(found: Paired | None, measure: Measure) -> str:
    """`+4.2 [+1.0, +7.4]`, in points where the measure is a share."""
    if found is None:
        return "–"
    scale = 100 if measure.percent else 1
    text = f"{scale * found.mean:+.{measure.digits}f}"
    if found.low is None or found.high is None:
        return text
    return f"{text} [{scale * found.low:+.{measure.digits}f}, {scale * found.high:+.{measure.digits}f}]"


def comparison_rows(items: Sequence[Found], ran: Collection[str]) -> list[Row]:
    """Those of a family of which a run was made; none where none was."""
    made = any(item.one in ran and item.other in ran for item in items)
    return [comparison_row(item) for item in items] if made else []


def comparison_row(found: Found) -> Row:
    return Row(
        what=found.what,
        pair=f"{found.one} → {found.other}",
        seeds=str(found.difference.n) if found.difference else "0",
        gain=spoken_difference(found.difference, SAMPLED),
        greedy=spoken_difference(found.greedy, GREEDY),
        equal_tokens=spoken_difference(found.equal_tokens, SAMPLED),
        paper="–" if found.paper is None else f"+{found.paper:g}",
        verdict=found.verdict,
    )


def claim_row(found: Found) -> tuple[str, str, str, str, str, str]:
    """(effect, where in the paper, pair, measure, difference, verdict)"""
    difference = spoken_difference(found.difference, found.measure)
    return found.what, found.where, f"{found.one} → {found.other}", found.measure.label, difference, found.verdict


def rung_rows(outcomes: Sequence[Outcome]) -> list[list[str]]:
    """[rung, seeds, each measure's mean and the deviation between seeds] of every rung with a finished run."""
    rows = []
    for name, rung in RUNGS.items():
        runs = [outcome for outcome in outcomes if outcome.rung == name and not outcome.failure]
        if runs:
            cells = [_mean_and_deviation([measure.of(run) for run in runs], measure) for measure in MEASURES]
            rows.append([f"{name}: {rung.label}", str(len(runs)), *cells])
    return rows


def _mean_and_deviation(values: Sequence[float], measure: Measure) -> str:
    scale = 100 if measure.percent else 1
    mean = sum(values) / len(values)
    text = f"{scale * mean:.{measure.digits}f}"
    if len(values) == 1:
        return text
    deviation = (sum((value - mean) ** 2 for value in values) / (len(values) - 1)) ** 0.5
    return f"{text} ±{scale * deviation:.{measure.digits}f}"


def base_rows(outcomes: Sequence[Outcome]) -> list[Base]:
    """Held-out accuracy of the bases, a mean over the seeds whose rung `naive` is done."""
    runs = [outcome for outcome in outcomes if outcome.rung == "naive" and outcome.summary]
    if not runs:
        return []

    def mean(part: str, way: str) -> str:
        known = [run.summary["heldout"][part][way]["accuracy"] for run in runs if run.summary["heldout"].get(part)]
        return f"{100 * sum(known) / len(known):.1f}" if known else "–"

    return [
        Base(way=way, before=mean("before", way), no_guessing=mean("baseline", way)) for way in ("sampled", "greedy")
    ]


ORDER = ("gains", "shows", "loses", "shows the opposite", UNSURE, NOISE, ONE_SEED)


def said(tables: dict[str, list[Found]], effects: Sequence[Found]) -> dict[str, list[str]]:
    """What may be said in plain words: verdict -> the comparisons with it, each pair of rungs and measure once."""
    rows = [*(row for rows in tables.values() for row in rows), *effects]
    by_pair = {(row.one, row.other, row.measure.key): row for row in reversed(rows)}
    words: dict[str, list[str]] = {verdict: [] for verdict in ORDER}
    for row in reversed(by_pair.values()):
        if row.verdict in words:
            words[row.verdict].append(f"{row.what} ({row.one} → {row.other}; {row.measure.label})")
    return {verdict: items for verdict, items in words.items() if items}
