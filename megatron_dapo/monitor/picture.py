"""curves.png: one run at a glance, readable at the width of a README."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator, PercentFormatter

from megatron_dapo.monitor.writer import series

Lines = Sequence[Mapping[str, Any]]
Summary = Mapping[str, Any]

# Okabe and Ito's colours: told apart with any colour vision, and by lightness in print.
BLUE, ORANGE, GREEN, VERMILLION, SKY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9"
INK, FAINT, PALE = "#333333", "#8A8A8A", "#E9E9E9"
WAYS = {"greedy": (GREEN, "s"), "sampled": (VERMILLION, "o")}
"""Ways of answering held-out problems: colour and marker."""


def draw_run(metrics: Lines, summary: Summary, out_png: str | Path) -> None:
    """Accuracy (training and held-out, before and after), length, truncation, entropy and dynamic sampling.

    Args:
        metrics: lines of `writer.read_metrics`, one a rollout step.
        summary: what `summary.json` holds. Read are `heldout` (`before`, `after`, and `baseline` or None: way of
            answering -> accuracy, low, high) and, for the caption, `rollout_steps`, `optimizer_steps`, `tokens`,
            `seconds`.
        out_png: file to write; it is replaced.
    """
    figure = Figure(
        figsize=(11, 5.4), dpi=180, facecolor="white", layout=ConstrainedLayoutEngine(w_pad=0.10, h_pad=0.06)
    )
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(2, 3, width_ratios=(1.55, 1, 1))
    last = max((line["rollout_step"] for line in metrics), default=summary["rollout_steps"])
    panels = [figure.add_subplot(place) for place in (grid[:, 0], grid[0, 1], grid[0, 2], grid[1, 1], grid[1, 2])]
    for panel in panels:
        _style(panel, last)
    _draw_accuracy(panels[0], metrics, summary["heldout"], last)
    _draw_length(panels[1], metrics)
    _draw_share(panels[2], metrics, "truncated_fraction", "Cut off at the limit", VERMILLION)
    _draw_entropy(panels[3], metrics)
    _draw_sampling(panels[4], metrics)
    for panel in (panels[0], panels[3], panels[4]):
        panel.set_xlabel("rollout step", color=INK)
    figure.suptitle(_caption(summary), x=0.008, ha="left", fontsize=10, color=FAINT)
    figure.savefig(out_png)


def _style(panel: Axes, last: int) -> None:
    panel.set_xlim(-0.03 * max(last, 1), 1.03 * max(last, 1))
    panel.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    panel.grid(axis="y", color=PALE, linewidth=0.8)
    panel.set_axisbelow(True)
    panel.tick_params(colors=INK, length=0, labelsize=9)
    for side in ("top", "right", "left"):
        panel.spines[side].set_visible(False)
    panel.spines["bottom"].set_color(FAINT)


def _title(panel: Axes, text: str) -> None:
    panel.set_title(text, loc="left", fontsize=11, color=INK, fontweight="bold")


def _curve(panel: Axes, metrics: Lines, name: str, *, color: str = BLUE, linewidth: float = 2, **style: Any) -> None:
    steps, values = series(metrics, name)
    alone = "o" if len(steps) == 1 else None  # a line through one point would not be seen
    panel.plot(steps, values, color=color, linewidth=linewidth, marker=alone, **style)


def _draw_accuracy(panel: Axes, metrics: Lines, heldout: Mapping[str, Any], last: int) -> None:
    _title(panel, "Accuracy")
    panel.set_xlim(-0.22 * max(last, 1), 1.22 * max(last, 1))  # room for the numbers beside the first and last marks
    _curve(panel, metrics, "accuracy/mean", label="training prompts, sampled")
    for way, (colour, marker) in WAYS.items():
        during = {step: value for step, value in zip(*series(metrics, f"evaluation/{way}"), strict=True)}
        points = {0: heldout["before"].get(way), last: heldout["after"].get(way)}
        points = {step: point for step, point in points.items() if point}
        path = sorted({**during, **{step: point["accuracy"] for step, point in points.items()}}.items())
        if path:
            panel.plot(*zip(*path, strict=True), color=colour, linewidth=1, linestyle=(0, (1, 2)))
        for number, (step, point) in enumerate(points.items()):
            _mark(panel, step, point, colour, marker, f"held-out, {way}" if number == 0 else None)
        if during:
            panel.plot(list(during), list(during.values()), marker, color=colour, markersize=4, clip_on=False)
        baseline = (heldout.get("baseline") or {}).get(way)
        if baseline:
            panel.axhspan(baseline["low"], baseline["high"], color=colour, alpha=0.10, linewidth=0)
            panel.axhline(
                baseline["accuracy"], color=colour, linewidth=1.2, linestyle="--", label=f"base made to work, {way}"
            )
    panel.set_ylim(0, 1)
    panel.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    handles, labels = panel.get_legend_handles_labels()
    order = sorted(range(len(labels)), key=lambda at: ("held-out" not in labels[at], "training" not in labels[at]))
    panel.legend(
        [handles[at] for at in order],
        [labels[at] for at in order],
        loc="lower right",
        fontsize=9,
        frameon=True,
        framealpha=0.9,
        edgecolor="none",
        labelcolor=INK,
    )


def _mark(panel: Axes, step: int, point: Mapping[str, float], colour: str, marker: str, label: str | None) -> None:
    below, above = point["accuracy"] - point["low"], point["high"] - point["accuracy"]
    panel.errorbar(
        [step],
        [point["accuracy"]],
        yerr=[[max(0.0, below)], [max(0.0, above)]],
        color=colour,
        marker=marker,
        markersize=7,
        capsize=3,
        linewidth=1.5,
        label=label,
        linestyle="none",
        clip_on=False,
        zorder=5,
    )
    first = label is not None
    panel.annotate(
        f"{point['accuracy']:.1%}",
        (step, point["accuracy"]),
        xytext=(-8 if first else 8, 0),
        textcoords="offset points",
        ha="right" if first else "left",
        va="center",
        fontsize=9.5,
        fontweight="bold",
        color=colour,
        path_effects=[withStroke(linewidth=3, foreground="white")],
        zorder=6,
    )


def _draw_length(panel: Axes, metrics: Lines) -> None:
    _title(panel, "Response length, tokens")
    _curve(panel, metrics, "response_length/p95", color=SKY, linewidth=1.3, linestyle="--", label="95th percentile")
    _curve(panel, metrics, "response_length/mean", label="mean")
    panel.set_ylim(bottom=0)
    panel.legend(loc="best", fontsize=8.5, frameon=True, framealpha=0.85, edgecolor="none", labelcolor=INK)


def _draw_share(panel: Axes, metrics: Lines, name: str, title: str, colour: str) -> None:
    _title(panel, title)
    _curve(panel, metrics, name, color=colour)
    panel.set_ylim(0, max([0.05, *(1.15 * share for share in series(metrics, name)[1])]))
    panel.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    panel.yaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 5, 10]))


def _draw_entropy(panel: Axes, metrics: Lines) -> None:
    _title(panel, "Entropy, nats a token")
    _curve(panel, metrics, "entropy")
    panel.set_ylim(bottom=0)


def _draw_sampling(panel: Axes, metrics: Lines) -> None:
    """Shares of the groups decided in each step, from top to bottom: all right, kept, all wrong."""
    _title(panel, "Groups sampled")
    names, labels = ("sampling/all_wrong", "sampling/kept", "sampling/all_correct"), ("all wrong", "kept", "all right")
    counted = [line for line in metrics if sum(line.get(name) or 0 for name in names)]
    steps = [line["rollout_step"] for line in counted]
    shares = [[(line.get(name) or 0) / sum(line.get(n) or 0 for n in names) for line in counted] for name in names]
    if counted:
        handles = panel.stackplot(steps, shares, colors=(VERMILLION, PALE, GREEN), alpha=0.8)
        panel.legend(
            handles[::-1], labels[::-1], loc="center", fontsize=8.5, frameon=True, framealpha=0.85, edgecolor="none"
        )
    panel.set_ylim(0, 1)
    panel.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))


def _caption(summary: Summary) -> str:
    parts = [f"{summary['rollout_steps']} rollout steps", f"{summary['optimizer_steps']} optimizer steps"]
    if "tokens" in summary:
        parts.append(f"{summary['tokens']['generated']:,} tokens generated".replace(",", " "))
    if "seconds" in summary:
        parts.append(f"{summary['seconds']['total'] / 60:.1f} minutes")
    parts.append("bars and bands: 95% intervals")
    return "  ·  ".join(parts)
