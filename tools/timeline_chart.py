"""A recorded rollout step as a picture: phases, each server's running responses, each rank's passes, over seconds."""

from collections.abc import Sequence

from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from megatron_dapo.monitor.timeline import ProcessStep, Span
from megatron_dapo.report.chart import FAINT, GRID, INK, SERIES, svg_of
from tools.timeline_figures import RecordedStep, running

WIDTH, ROW = 900, 26
"""Units of the view box."""
LEFT, RIGHT, BOTTOM = 118, 12, 40
SHOWN_RANKS, SHOWN_SERVERS = 16, 8
KINDS = (("forward", 0), ("backward", 1), ("optimizer", 2), ("gradient sum", 3), ("between stages", 4))
"""What a rank's bar can be, and its series colour."""
PHASE_COLOURS = {
    "rollout": 0, "logprob": 3, "update": 1, "weight_sync": 2, "handover": 5, "evaluation": 6, "checkpoint": 4,
}  # fmt: skip


def draw_timeline(step: RecordedStep, *, salt: str) -> str:
    """SVG element; its colours follow the page."""
    zero, end = step.window
    servers = sorted(step.requests.items())[:SHOWN_SERVERS]
    ranks = step.ranks[:SHOWN_RANKS]
    rows = 1 + len(servers) + len(ranks)
    height = rows * ROW + BOTTOM
    figure = Figure(figsize=(WIDTH / 72, height / 72), dpi=72)
    FigureCanvasSVG(figure)
    figure.patch.set_visible(False)
    box = (LEFT / WIDTH, BOTTOM / height, (WIDTH - LEFT - RIGHT) / WIDTH, rows * ROW / height)
    panel = figure.add_axes(box)
    panel.patch.set_visible(False)
    panel.set_xlim(0, end - zero)
    panel.set_ylim(rows, 0)
    labels = ["phases"]
    least = (end - zero) / (WIDTH - LEFT)
    for span in step.phases:
        shade = SERIES[PHASE_COLOURS.get(span.name, 4)]
        panel.broken_barh([(span.start - zero, span.seconds)], (0.12, 0.76), facecolors=shade, linewidth=0)
    most = max((int(running(spans)[1].max()) for _, spans in servers if spans), default=1)
    for row, (_, spans) in enumerate(servers, start=1):
        labels.append(f"server {row - 1}")
        times, counts = running(spans)
        panel.fill_between(
            times - zero,
            row + 0.9 - 0.8 * counts / most,
            row + 0.9,
            step="post",
            color=SERIES[0],
            alpha=0.55,
            linewidth=0,
        )
    for row, rank in enumerate(ranks, start=1 + len(servers)):
        labels.append(rank.process)
        calls = [(span.start - zero, span.seconds) for span in rank.spans if span.track == "calls"]
        panel.broken_barh(calls, (row + 0.12, 0.76), facecolors=GRID, linewidth=0)
        for kind, colour in KINDS:
            bars = [(start - zero, end - start) for start, end in merged(_of_kind(rank, kind), least)]
            panel.broken_barh(bars, (row + 0.12, 0.76), facecolors=SERIES[colour], linewidth=0)
    panel.set_yticks([at + 0.5 for at in range(rows)], labels)
    panel.tick_params(axis="y", colors=INK, length=0, pad=8)
    panel.tick_params(axis="x", colors=FAINT, length=0, pad=5)
    panel.grid(axis="x", color=GRID, linewidth=1)
    panel.set_axisbelow(True)
    for side in ("top", "right", "left"):
        panel.spines[side].set_visible(False)
    panel.spines["bottom"].set_color(FAINT)
    panel.set_xlabel("seconds since the step began", color=FAINT, loc="right", labelpad=6)
    return svg_of(figure, salt)


def left_out(step: RecordedStep) -> str:
    """Which rows the picture has no room for."""
    parts = [
        f"{len(rows) - shown} of {len(rows)} {what}"
        for rows, shown, what in ((step.requests, SHOWN_SERVERS, "servers"), (step.ranks, SHOWN_RANKS, "ranks"))
        if len(rows) > shown
    ]
    return f"Not drawn: {', '.join(parts)}." if parts else ""


def merged(spans: Sequence[Span], least: float) -> list[tuple[float, float]]:
    """(start, end) of bars; those closer than `least` seconds, less than the eye can tell, become one."""
    bars: list[tuple[float, float]] = []
    for span in sorted(spans, key=lambda span: span.start):
        if bars and span.start - bars[-1][1] < least:
            bars[-1] = (bars[-1][0], max(bars[-1][1], span.end))
        else:
            bars.append((span.start, span.end))
    return bars


def kind_of(name: str) -> str | None:
    """One of `KINDS`; None for what only encloses others."""
    if name == "forward-compute":
        return "forward"
    if name == "backward-compute":
        return "backward"
    if name == "optimizer":
        return "optimizer"
    if "grads" in name:
        return "gradient sum"
    return "between stages" if "send" in name or "recv" in name else None


def _of_kind(rank: ProcessStep, kind: str) -> list[Span]:
    return [span for span in rank.spans if kind_of(span.name) == kind]
