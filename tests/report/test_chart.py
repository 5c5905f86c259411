"""Charts as SVG: what is drawn, in colours of the page."""

import re

import pytest

from megatron_dapo.report.chart import Curve, Frame, draw_curves, smoothed

FRAME = Frame(title="", note="", unit="share", last=4)


def test_a_spread_is_shaded_behind_its_curve_in_the_same_colour() -> None:
    curve = Curve(
        label="", steps=[1, 2, 4], values=[0.2, 0.4, 0.3], colour=2, low=[0.1, 0.3, 0.2], high=[0.3, 0.5, 0.4]
    )
    with_spread = draw_curves([curve], FRAME, salt="a").svg
    (shade,) = re.findall(r'style="fill: var\(--c2\); fill-opacity: 0\.16[^"]*"', with_spread)
    assert with_spread.index(shade) < with_spread.index("stroke: var(--c2)")
    alone = draw_curves([Curve(label="", steps=[1, 2, 4], values=[0.2, 0.4, 0.3], colour=2)], FRAME, salt="a").svg
    assert "fill-opacity" not in alone


def test_the_axis_reaches_below_zero_where_only_the_spread_does() -> None:
    curve = Curve(label="", steps=[1, 2], values=[0.1, 0.1], colour=0, low=[-0.5, -0.5], high=[0.2, 0.2])
    shown = draw_curves([curve], Frame(title="", note="", last=2), salt="b").svg
    assert ">-0.4<" in shown


@pytest.mark.parametrize(
    ("window", "expected"),
    [(1, [3, 0, 6, 9, 0]), (3, [1.5, 3, 5, 5, 4.5]), (2, [1.5, 3, 5, 5, 4.5]), (99, [3.6] * 5)],
)
def test_smoothing_is_the_mean_around_each_value(window, expected) -> None:
    assert smoothed([3, 0, 6, 9, 0], window) == pytest.approx(expected)
