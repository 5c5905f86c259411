"""curves.png: the ladder, or the presets where no rung of it was run, at one glance, for a page that shows no HTML."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator

from examples.ablation.curves import CHARTS, Series, series
from examples.ablation.results import Outcome
from examples.ablation.rungs import LADDER, PRESETS
from examples.ablation.verdicts import Found

# Okabe and Ito's colours: told apart with any colour vision, and by lightness in print.
BLUE, ORANGE, GREEN, VERMILLION, SKY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9"
INK, FAINT, PALE = "#333333", "#8A8A8A", "#E9E9E9"
PALETTE = (FAINT, SKY, BLUE, ORANGE, VERMILLION, GREEN)
COLOURS = dict(zip((rung.name for rung in (*LADDER, *PRESETS)), (*PALETTE, *PALETTE[1:]), strict=True))


def draw_picture(outcomes: Sequence[Outcome], tables: Mapping[str, Sequence[Found]], out_png: Path) -> None:
    """Six curves of each rung, and each one's gain with its 95% interval over the seeds."""
    ran = {outcome.rung for outcome in outcomes}
    ladder = any(rung.name in ran for rung in LADDER) or not ran
    rungs = [rung.name for rung in (LADDER if ladder else PRESETS)]
    figure = Figure(figsize=(13, 7), dpi=150, facecolor="white", layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.08))
    FigureCanvasAgg(figure)
    above, below = figure.subfigures(2, 1, height_ratios=(2, 0.9))  # apart: long labels below leave the curves alone
    panels = above.subplots(2, 3).flat
    for number, (chart, panel) in enumerate(zip(CHARTS, panels, strict=True)):
        _style(panel, chart.title, chart.x_label)
        for one in series(chart, outcomes, rungs):
            _curve(panel, one)
        if chart.unit == "share":
            panel.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g}%")
        panel.set_ylim(bottom=0)
        if number == 0 and panel.lines:
            panel.legend(fontsize=8, frameon=False, labelcolor=INK)
    over = "the one before" if ladder else "the paper's preset"
    _gains(below.subplots(), tables["ladder" if ladder else "presets"], over)
    figure.savefig(out_png)


def _curve(panel: Axes, one: Series) -> None:
    colour, alone = COLOURS[one.rung], "o" if len(one.x) == 1 else None
    panel.fill_between(one.x, one.low, one.high, color=colour, alpha=0.12, linewidth=0)
    panel.plot(one.x, one.mean, color=colour, linewidth=1.8, label=one.rung, marker=alone)


def _gains(panel: Axes, comparisons: Sequence[Found], over: str) -> None:
    _style(panel, f"Gain of each over {over}, held-out, sampled: mean over the seeds, 95% interval", "points")
    known = [found for found in comparisons if found.difference]
    for at, found in enumerate(known):
        difference = found.difference
        assert difference is not None
        low, high = (difference.mean if end is None else end for end in (difference.low, difference.high))
        panel.plot([100 * low, 100 * high], [at, at], color=BLUE, linewidth=3, alpha=0.45)
        panel.plot([100 * difference.mean], [at], "o", color=BLUE)
        said = found.verdict.partition(":")[0]
        panel.annotate(said, (100 * high, at), (8, 0), textcoords="offset points", va="center", fontsize=8, color=INK)
    panel.axvline(0, color=INK, linewidth=1)
    panel.set_yticks(range(len(known)), [found.what for found in known], fontsize=8)
    panel.margins(x=0.12, y=0.12)
    panel.invert_yaxis()


def _style(panel: Axes, title: str, x_label: str) -> None:
    panel.set_title(title, loc="left", fontsize=10, color=INK, fontweight="bold")
    panel.set_xlabel(x_label, color=FAINT, fontsize=8)
    panel.grid(axis="y", color=PALE, linewidth=0.8)
    panel.set_axisbelow(True)
    panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    panel.tick_params(colors=INK, length=0, labelsize=8)
    for side in ("top", "right", "left"):
        panel.spines[side].set_visible(False)
    panel.spines["bottom"].set_color(FAINT)
