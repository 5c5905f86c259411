"""curves.png: one run at a glance, readable at the width of a README."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from megatron_dapo.monitor.writer import series, shares

Lines = Sequence[Mapping[str, Any]]
Summary = Mapping[str, Any]

# Okabe and Ito's colours: told apart with any colour vision, and by lightness in print.
BLUE, ORANGE, GREEN, VERMILLION, SKY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9"
INK, FAINT, PALE = "#333333", "#8A8A8A", "#E9E9E9"
ANSWERS = {"greedy": (GREEN, "s"), "sampled": (VERMILLION, "o")}
"""Ways of answering held-out problems: colour and marker."""
PANELS: Any = [
    ["Accuracy", "Response length, tokens", "Cut off at the limit"],
    ["Accuracy", "Entropy, nats a token", "Groups sampled"],
]
GROUPS = {"sampling/all_wrong": VERMILLION, "sampling/kept": PALE, "sampling/all_correct": GREEN}
_LEGEND: dict[str, Any] = {"frameon": True, "framealpha": 0.85, "edgecolor": "none", "labelcolor": INK}


def plain_axes(panel: Axes, *, text: str, line: str, grid: str) -> None:
    """Horizontal grid lines, a line at the bottom, whole numbers below it; the arguments are colours."""
    panel.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    panel.grid(axis="y", color=grid, linewidth=0.9)
    panel.set_axisbelow(True)
    panel.tick_params(colors=text, length=0, pad=5)
    panel.spines[["top", "right", "left"]].set_visible(False)
    panel.spines["bottom"].set_color(line)


def run_figure(metrics: Lines, summary: Summary) -> Figure:
    """Accuracy (training and held-out, before and after), length, truncation, entropy and dynamic sampling.

    Args:
        metrics: lines of `writer.read_metrics`, one a rollout step.
        summary: what `summary.json` holds. Read are `heldout` (`before`, `after`, and `baseline` or None: way of
            answering -> accuracy, low, high) and, for the caption, `rollout_steps`, `optimizer_steps`, `tokens`,
            `seconds`.
    """
    figure = Figure(figsize=(11, 5.4), dpi=180, facecolor="white", layout="constrained")
    panels = figure.subplot_mosaic(PANELS, width_ratios=(1.55, 1, 1))
    last = max((line["rollout_step"] for line in metrics), default=summary["rollout_steps"])
    for title, panel in panels.items():
        plain_axes(panel, text=INK, line=FAINT, grid=PALE)
        panel.set_title(title, loc="left", fontsize=11, color=INK, fontweight="bold")
        panel.set_xlim(-0.03 * max(last, 1), 1.03 * max(last, 1))
    accuracy, length, cut_off, entropy, groups = panels.values()
    _draw_accuracy(accuracy, metrics, summary["heldout"], last)
    _curve(length, metrics, "response_length/p95", color=SKY, linewidth=1.3, linestyle="--", label="95th percentile")
    _curve(length, metrics, "response_length/mean", label="mean")
    length.legend(fontsize=8.5, **_LEGEND)
    _curve(cut_off, metrics, "truncated_fraction", color=VERMILLION)
    _curve(entropy, metrics, "entropy")
    _draw_groups(groups, metrics)
    for panel, least in ((length, 0.0), (cut_off, 0.05), (entropy, 0.0)):
        panel.set_ylim(0, max(least, panel.get_ylim()[1]))
    for panel in (accuracy, cut_off, groups):
        panel.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    for panel in (accuracy, entropy, groups):
        panel.set_xlabel("rollout step", color=INK)
    figure.suptitle(_caption(summary), x=0.008, ha="left", fontsize=10, color=FAINT)
    return figure


def _curve(panel: Axes, metrics: Lines, name: str, *, color: str = BLUE, linewidth: float = 2, **style: Any) -> None:
    steps, values = series(metrics, name)
    alone = "o" if len(steps) == 1 else None  # a line through one point would not be seen
    panel.plot(steps, values, color=color, linewidth=linewidth, marker=alone, **style)


def _draw_accuracy(panel: Axes, metrics: Lines, heldout: Mapping[str, Any], last: int) -> None:
    panel.set_xlim(-0.22 * max(last, 1), 1.22 * max(last, 1))  # room for the numbers beside the first and last marks
    for way, (colour, marker) in ANSWERS.items():
        measured = dict(zip(*series(metrics, f"evaluation/{way}"), strict=True))
        ends = {step: (heldout[when] or {}).get(way) for step, when in ((0, "before"), (last, "after"))}
        marks = {step: point for step, point in ends.items() if point}
        path = sorted({**measured, **{step: point["accuracy"] for step, point in marks.items()}}.items())
        steps, values = [step for step, _ in path], [value for _, value in path]
        panel.plot(steps, values, color=colour, linestyle=":", linewidth=1)
        panel.plot(list(measured), list(measured.values()), marker, color=colour, markersize=4)
        for step, point in marks.items():
            _mark(panel, step, point, colour, marker, label=f"held-out, {way}" if step == 0 else "")
        if baseline := (heldout.get("baseline") or {}).get(way):
            panel.axhspan(baseline["low"], baseline["high"], color=colour, alpha=0.10, linewidth=0)
            label = f"base made to work, {way}"
            panel.axhline(baseline["accuracy"], color=colour, linewidth=1.2, linestyle="--", label=label)
    _curve(panel, metrics, "accuracy/mean", label="training prompts, sampled")
    panel.set_ylim(0, 1)
    panel.legend(loc="lower right", fontsize=9, **_LEGEND)


def _mark(panel: Axes, step: int, point: Mapping[str, float], colour: str, marker: str, *, label: str) -> None:
    """A measurement with its interval, and its number beside it; the first one has the label."""
    value, first = point["accuracy"], bool(label)
    spread = [[max(0.0, value - point["low"])], [max(0.0, point["high"] - value)]]
    style: dict[str, Any] = {"color": colour, "marker": marker, "markersize": 7, "capsize": 3, "linestyle": "none"}
    panel.errorbar([step], [value], yerr=spread, label=label, **style)
    side, away = ("right", -8) if first else ("left", 8)
    text: dict[str, Any] = {"fontweight": "bold", "color": colour, "ha": side, "va": "center"}
    panel.annotate(f"{value:.1%}", (step, value), xytext=(away, 0), textcoords="offset points", **text)


def _draw_groups(panel: Axes, metrics: Lines) -> None:
    """Shares of the groups decided in each step, from top to bottom: all right, kept, all wrong."""
    if decided := shares(metrics, list(GROUPS)):
        steps, labels = [line["rollout_step"] for line in decided], ("all wrong", "kept", "all right")
        layers = [[line[name] for line in decided] for name in GROUPS]
        panel.stackplot(steps, layers, colors=list(GROUPS.values()), alpha=0.8, labels=labels)
        panel.legend(loc="center", reverse=True, fontsize=8.5, **_LEGEND)
    panel.set_ylim(0, 1)


def _caption(summary: Summary) -> str:
    parts = (
        f"{summary['rollout_steps']} rollout steps",
        f"{summary['optimizer_steps']} optimizer steps",
        f"{summary['tokens']['generated']:,} tokens generated".replace(",", " "),
        f"{summary['seconds']['total'] / 60:.1f} minutes",
        "bars and bands: 95% intervals",
    )
    return "  ·  ".join(parts)
