"""Lines and stacked areas as inline SVG: matplotlib draws, and its colours become the page's CSS variables.

Text stays text (it can be selected, and grows on a small screen), ids are unique over the page, no script is needed.
"""

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import matplotlib
import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

WIDTH, HEIGHT = 420, 210
"""Units of the view box; on a wide screen one of them is a little more than a pixel."""
_PANEL = (48 / WIDTH, 42 / HEIGHT, 362 / WIDTH, 158 / HEIGHT)
"""Left, bottom, width and height of what the axes enclose."""

_FAINT, _GRID, _BAND = "#0a0b01", "#0a0b02", "#0a0b03"
_SERIES = tuple(f"#0a0b{number:02x}" for number in range(16, 25))
"""Colours that matplotlib is given; each is replaced by the page's variable of the same place."""
SERIES_COLOURS = len(_SERIES)
_VARIABLES = {_FAINT: "--faint", _GRID: "--grid", _BAND: "--band"}
_VARIABLES |= {colour: f"--c{number}" for number, colour in enumerate(_SERIES)}
_DASHES: tuple[str | tuple[int, tuple[float, ...]], ...] = ("-", (0, (4, 2)), (0, (1, 1.6)), (0, (6, 2, 1, 2)))


Unit = Literal["number", "share", "count", "seconds"]


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Values over rollout steps: a line, or a layer of a stack."""

    label: str
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

    title: str
    note: str
    unit: Unit = "number"
    x_label: str = "rollout step"
    first: int = 1
    last: int = 1
    """Newest rollout step of any run on the page: all charts share the axis."""
    from_zero: bool = True
    to_one: bool = False
    stack: bool = False
    """The curves are layers on each other, the first at the bottom."""
    smooth: int = 1
    """Rollout steps around each over which a line is the mean; what is not smoothed is drawn pale behind it."""
    marks: bool = False
    """A dot at each value: there are few of them."""
    figure: str = ""
    """The paper's."""
    band: tuple[float, float] | None = None
    """Range of that figure, drawn behind the curves."""


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """One chart on the page."""

    frame: Frame
    curves: Sequence[Curve]
    svg: Markup


def draw_curves(curves: Sequence[Curve], frame: Frame, *, salt: str) -> Drawn:
    """`salt` must differ between the charts of a page: ids are made from it."""
    figure = Figure(figsize=(WIDTH / 72, HEIGHT / 72), dpi=72, frameon=False)
    panel = figure.add_axes(_PANEL)
    panel.patch.set_visible(False)
    panel.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    panel.grid(axis="y", color=_GRID, linewidth=0.9)
    panel.set_axisbelow(True)
    panel.tick_params(colors=_FAINT, length=0, pad=5)
    panel.spines[["top", "right", "left"]].set_visible(False)
    panel.spines["bottom"].set_color(_FAINT)
    panel.set_xlim(frame.first - 0.5, max(frame.last, 1) + 0.5)
    panel.set_xlabel(frame.x_label, color=_FAINT, loc="right", labelpad=6)
    panel.yaxis.set_major_locator(MaxNLocator(nbins=4, steps=[1, 2, 2.5, 5, 10]))
    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _tick(value, frame.unit)))
    if frame.band:
        panel.axhspan(*frame.band, color=_BAND, linewidth=0)
    if frame.stack:
        _draw_layers(panel, curves, range(frame.first, max(frame.last, 1) + 1))
    else:
        _draw_lines(panel, curves, frame)
    if frame.to_one:
        panel.set_ylim(0, 1)
    elif frame.from_zero and not frame.stack:
        panel.set_ylim(bottom=min(0, panel.dataLim.y0), top=None if panel.get_ylim()[1] > 0 else 1)
    return Drawn(frame=frame, curves=curves, svg=Markup(_svg_of(figure, salt)))


def _draw_lines(panel: Axes, curves: Sequence[Curve], frame: Frame) -> None:
    for curve in curves:
        colour, dash = _SERIES[curve.colour], _DASHES[curve.dash % len(_DASHES)]
        values = smoothed(curve.values, frame.smooth)
        if curve.low is not None and curve.high is not None:
            low, high = smoothed(curve.low, frame.smooth), smoothed(curve.high, frame.smooth)
            panel.fill_between(curve.steps, low, high, color=colour, alpha=0.16, linewidth=0)
        elif frame.smooth > 1:
            panel.plot(curve.steps, curve.values, color=colour, alpha=0.3, linewidth=0.8)
        dot = "o" if frame.marks or len(curve.steps) == 1 else None  # a line through one point would not be seen
        panel.plot(curve.steps, values, color=colour, linestyle=dash, linewidth=1.8, marker=dot, markersize=5)


def smoothed(values: Sequence[float], window: int) -> Sequence[float]:
    """The mean of the `window` values around each (one more if it is even); at the ends of those that there are."""
    if window <= 1:
        return values
    half, here = window // 2, slice(window // 2, window // 2 + len(values))
    kernel = np.ones(2 * half + 1)
    return list(np.convolve(values, kernel)[here] / np.convolve(np.ones(len(values)), kernel)[here])


def _draw_layers(panel: Axes, curves: Sequence[Curve], steps: range) -> None:
    """A bar a step and layer, without gaps: one path a layer, however long the run."""
    edges = [step - 0.5 for step in (*steps, steps[-1] + 1)]
    known = [dict(zip(curve.steps, curve.values, strict=True)) for curve in curves]
    tops = np.cumsum([[0.0] * len(steps), *([values.get(step, 0.0) for step in steps] for values in known)], axis=0)
    for curve, base, top in zip(curves, tops, tops[1:], strict=False):
        panel.stairs(top, edges, baseline=base, fill=True, color=_SERIES[curve.colour], linewidth=0)


def value_text(value: float, unit: Unit) -> str:
    """A value as text: `12.5%`, `4 680`, `0.314`, `1.2e-06`."""
    if unit == "share":
        return f"{100 * value:.1f}%" if value == 0 or abs(value) >= 0.001 else f"{100 * value:.2g}%"
    if unit == "seconds":
        return f"{value:.1f} s"
    if unit == "count" and abs(value) < 100 and value != int(value):
        return f"{value:.1f}"
    return f"{value:,.0f}".replace(",", "\u2009") if unit == "count" or abs(value) >= 1000 else f"{value:.3g}"


def _tick(value: float, unit: Unit) -> str:
    if unit == "share":
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
}


def _svg_of(figure: Figure, salt: str) -> str:
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": salt, "font.size": 10}):
        figure.savefig(buffer, format="svg")
    text = buffer.getvalue()
    for pattern, replacement in _CLEANED.items():
        text = re.sub(pattern, replacement, text, flags=re.DOTALL)
    for colour, variable in _VARIABLES.items():
        text = text.replace(colour, f"var({variable})")
    return text.strip()
