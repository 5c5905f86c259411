"""curves.png is drawn for every kind of run, and shows the data it is given."""

import numpy as np
import pytest
from matplotlib import image
from matplotlib.axes import Axes

from megatron_dapo.monitor.picture import run_figure
from tests.monitor.runs import metrics, summary


def panels(lines, figures) -> dict[str, Axes]:
    return {panel.get_title(loc="left"): panel for panel in run_figure(lines, figures).axes}


def drawn(panel: Axes, lines, name) -> bool:
    """Whether one of the panel's curves has the metric's values over the rollout steps."""
    steps, values = [line["rollout_step"] for line in lines], [line[name] for line in lines]
    return any([*curve.get_xdata()] == steps and [*curve.get_ydata()] == values for curve in panel.lines)


def test_size_fits_a_readme(tmp_path):
    run_figure(metrics(), summary()).savefig(tmp_path / "curves.png")
    height, width, _ = image.imread(tmp_path / "curves.png").shape
    assert 1600 <= width <= 2400
    assert 1.7 <= width / height <= 2.3
    assert (tmp_path / "curves.png").stat().st_size < 500_000


@pytest.mark.parametrize(
    ("title", "name"),
    [
        ("Accuracy", "accuracy/mean"),
        ("Response length, tokens", "response_length/mean"),
        ("Response length, tokens", "response_length/p95"),
        ("Cut off at the limit", "truncated_fraction"),
        ("Entropy, nats a token", "entropy"),
    ],
)
def test_each_panel_shows_its_metric(title, name):
    assert drawn(panels(metrics(), summary())[title], metrics(), name)


def test_groups_are_shares_of_those_decided():
    layers = panels(metrics(), summary())["Groups sampled"].collections
    tops = [max(point[1] for path in layer.get_paths() for point in path.vertices) for layer in layers]
    last = metrics()[-1]
    wrong, kept, right = (last[f"sampling/{name}"] for name in ("all_wrong", "kept", "all_correct"))
    edge = next(path.vertices for path in layers[1].get_paths())
    at_the_end = max(y for x, y in edge if x == last["rollout_step"])
    assert at_the_end == pytest.approx((wrong + kept) / (wrong + kept + right))
    assert max(tops) == pytest.approx(1)


def test_held_out_marks_and_baseline_stand_where_they_were_measured():
    panel, heldout = panels(metrics(), summary())["Accuracy"], summary()["heldout"]
    levels = {float(y) for curve in panel.lines for y in np.atleast_1d(curve.get_ydata())}
    assert {heldout[stage]["greedy"]["accuracy"] for stage in ("before", "baseline", "after")} <= levels
    assert {text.get_text() for text in panel.texts} == {
        f"{heldout[stage][way]['accuracy']:.1%}" for stage in ("before", "after") for way in ("greedy", "sampled")
    }


@pytest.mark.parametrize(
    ("lines", "figures"),
    [
        (metrics(), summary(baseline=False)),
        (metrics(), summary(greedy=False)),
        (metrics(), summary(heldout=False)),
        (metrics(1), summary()),
        ([], summary()),
        ([{"rollout_step": 1, "optimizer_step": 1}], summary()),
    ],
    ids=["no baseline", "no greedy", "nothing held out", "one step", "no steps", "nothing measured"],
)
def test_runs_with_less_to_show_are_drawn_too(tmp_path, lines, figures, recwarn):
    run_figure(lines, figures).savefig(tmp_path / "curves.png")
    assert (image.imread(tmp_path / "curves.png")[..., :3] < 0.5).any()
    assert [str(warning.message) for warning in recwarn] == []
