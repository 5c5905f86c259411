"""Curves as inline SVG whose colours follow the page: matplotlib draws, its colours become CSS variables.

Text stays text (it can be selected, and grows on a small screen), ids are unique over the page, no script is needed.
"""

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

SIZE = (420, 210)
"""Units of the view box; on a wide screen one of them is a little more than a pixel."""
_MARGIN = {"left": 48, "right": 10, "bottom": 42, "top": 10}

INK, FAINT, GRID, BAND = "#0a0b00", "#0a0b01", "#0a0b02", "#0a0b03"
SERIES = tuple(f"#0a0b{number:02x}" for number in range(16, 24))
"""Colours that matplotlib is given; each is replaced by the page's variable of the same place."""
_VARIABLES = {INK: "--ink", FAINT: "--faint", GRID: "--grid", BAND: "--band"} | {
    colour: f"--c{number}" for number, colour in enumerate(SERIES)
}
DASHES: tuple[str | tuple[int, tuple[float, ...]], ...] = ("-", (0, (4, 2)), (0, (1, 1.6)), (0, (6, 2, 1, 2)))
BARS_UP_TO = 60
"""Rollout steps that are drawn as one bar each; beyond, bars would be thinner than a pixel."""


class Unit(StrEnum):
    NUMBER = "number"
    SHARE = "share"
    COUNT = "count"
    SECONDS = "seconds"


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One line of a chart: values over rollout steps."""

    steps: Sequence[int]
    values: Sequence[float]
    colour: int
    """Which of the page's series colours."""
    dash: int = 0
    low: Sequence[float] | None = None
    """Of an interval around the values, with `high`; drawn as a pale band."""
    high: Sequence[float] | None = None


@dataclass(frozen=True, kw_only=True)
class Frame:
    """What a chart has around its curves."""

    unit: Unit
    x_label: str
    last: int
    """Newest rollout step of any run on the page: all charts share the axis."""
    first: int = 1
    """Where it begins."""
    from_zero: bool = True
    to_one: bool = False
    band: tuple[float, float] | None = None
    """Range of the paper's figure, drawn behind the curves."""


def draw_curves(curves: Sequence[Curve], frame: Frame, *, salt: str) -> str:
    """SVG element of lines. `salt` must differ between the charts of a page: ids are made from it."""
    figure, panel = _panel(frame)
    if frame.band:
        panel.axhspan(*frame.band, color=BAND, linewidth=0)
    for curve in curves:
        if curve.low is not None and curve.high is not None:
            colour = SERIES[curve.colour]
            panel.fill_between(curve.steps, curve.low, curve.high, color=colour, alpha=0.16, linewidth=0)
        alone = "o" if len(curve.steps) == 1 else None  # a line through one point would not be seen
        panel.plot(
            curve.steps,
            curve.values,
            color=SERIES[curve.colour],
            linestyle=DASHES[curve.dash],
            linewidth=1.8,
            marker=alone,
            markersize=5,
            solid_capstyle="round",
            solid_joinstyle="round",
        )
    if frame.to_one:
        panel.set_ylim(0, 1)
    elif frame.from_zero:
        drawn = [values for curve in curves for values in (curve.values, curve.low, curve.high) if values is not None]
        low = min((value for values in drawn for value in values), default=0)
        panel.set_ylim(bottom=min(0, low), top=None if panel.get_ylim()[1] > 0 else 1)
    return svg_of(figure, salt)


def draw_stack(steps: Sequence[int], layers: Sequence[Sequence[float]], frame: Frame, *, salt: str) -> str:
    """SVG element of layers on each other, the first at the bottom in the first series colour."""
    figure, panel = _panel(frame)
    if len(steps) > BARS_UP_TO:
        panel.stackplot(steps, layers, colors=SERIES[: len(layers)], linewidth=0)
    else:
        base = [0.0] * len(steps)
        for number, layer in enumerate(layers):
            panel.bar(steps, layer, bottom=base, width=0.82, color=SERIES[number], linewidth=0)
            base = [below + value for below, value in zip(base, layer, strict=True)]
    if frame.to_one:
        panel.set_ylim(0, 1)
    return svg_of(figure, salt)


def spoken(value: float, unit: Unit) -> str:
    """A value as text: `12.5%`, `4 680`, `0.314`, `1.2e-06`."""
    if unit is Unit.SHARE:
        return f"{100 * value:.1f}%" if value == 0 or abs(value) >= 0.001 else f"{100 * value:.2g}%"
    if unit is Unit.SECONDS:
        return f"{value:.1f} s"
    if unit is Unit.COUNT and abs(value) < 100 and value != int(value):
        return f"{value:.1f}"
    if unit is Unit.COUNT or abs(value) >= 1000:
        return f"{value:,.0f}".replace(",", "\u2009")
    return f"{value:.3g}"


def _panel(frame: Frame) -> tuple[Figure, Axes]:
    width, height = SIZE
    figure = Figure(figsize=(width / 72, height / 72), dpi=72)
    FigureCanvasSVG(figure)
    figure.patch.set_visible(False)
    across = width - _MARGIN["left"] - _MARGIN["right"]
    up = height - _MARGIN["bottom"] - _MARGIN["top"]
    panel = figure.add_axes((_MARGIN["left"] / width, _MARGIN["bottom"] / height, across / width, up / height))
    panel.patch.set_visible(False)
    panel.set_xlim(frame.first - 0.5, max(frame.last, 1) + 0.5)
    panel.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    panel.yaxis.set_major_locator(MaxNLocator(nbins=4, steps=[1, 2, 2.5, 5, 10]))
    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _tick(value, frame.unit)))
    panel.grid(axis="y", color=GRID, linewidth=1)
    panel.set_axisbelow(True)
    panel.tick_params(colors=FAINT, length=0, pad=5)
    for side in ("top", "right", "left"):
        panel.spines[side].set_visible(False)
    panel.spines["bottom"].set_color(FAINT)
    panel.spines["bottom"].set_linewidth(0.8)
    panel.set_xlabel(frame.x_label, color=FAINT, loc="right", labelpad=6)
    return figure, panel


def _tick(value: float, unit: Unit) -> str:
    if unit is Unit.SHARE:
        return f"{100 * value:g}%"
    if abs(value) >= 10_000:
        return f"{value / 1000:g}k" if abs(value) < 1e6 else f"{value / 1e6:g}M"
    return f"{value:g}".replace("e-0", "e-")


_CLEANED: Mapping[str, str] = {
    r"^.*?(?=<svg)": "",  # XML declaration and document type: the page has its own
    r"<metadata>.*?</metadata>": "",
    r"<defs>\s*<style.*?</style>\s*</defs>": "",  # would hold for the whole page
    r'<svg [^>]*viewBox="([^"]*)"[^>]*>': r'<svg viewBox="\1" aria-hidden="true">',
    r'<g id="[^"]*"': "<g",  # matplotlib's own names, the same in every chart
    r"font-size: [^;]*; font-family: [^;]*; ": "",  # the page's font, and its size
    r' transform="rotate\(-0 [^"]*"': "",
    r"<g/>": "",
    r" *\n\s*": "\n",
}


def svg_of(figure: Figure, salt: str) -> str:
    """The SVG element of a figure drawn in the colours of this file. `salt`: as in `draw_curves`."""
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": salt, "font.size": 10}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = buffer.getvalue()
    for pattern, replacement in _CLEANED.items():
        text = re.sub(pattern, replacement, text, flags=re.DOTALL)
    for colour, variable in _VARIABLES.items():
        text = text.replace(colour, f"var({variable})")
    return text.strip()
