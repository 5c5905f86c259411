"""curves.png is drawn for every kind of run, and shows the data it is given."""

import numpy as np
import pytest

from tests.monitor.runs import metrics, summary

pytest.importorskip("matplotlib")

from matplotlib import image

from megatron_dapo.monitor.picture import draw_run


def draw(lines, figures, folder) -> np.ndarray:
    draw_run(lines, figures, folder / "curves.png")
    return image.imread(folder / "curves.png")[..., :3]


@pytest.fixture(scope="module")
def usual(tmp_path_factory) -> np.ndarray:
    return draw(metrics(), summary(), tmp_path_factory.mktemp("usual"))


def difference(one: np.ndarray, other: np.ndarray) -> tuple[float, float]:
    """Where two pictures differ: mean position of the pixels as shares of width and height."""
    rows, columns = np.nonzero(np.abs(one - other).max(axis=2) > 0.1)
    assert len(rows), "the pictures are the same"
    return columns.mean() / one.shape[1], rows.mean() / one.shape[0]


def test_size_fits_a_readme(tmp_path):
    picture = draw(metrics(), summary(), tmp_path)
    height, width, _ = picture.shape
    assert 1600 <= width <= 2400
    assert 1.7 <= width / height <= 2.3
    assert (tmp_path / "curves.png").stat().st_size < 500_000


@pytest.mark.parametrize(
    ("name", "value", "place"),
    [
        ("accuracy/mean", 0.9, (0, 0)),
        ("response_length/mean", 30.0, (1, 0)),
        ("truncated_fraction", 0.02, (2, 0)),
        ("entropy", 0.1, (1, 1)),
        ("sampling/all_correct", 90, (2, 1)),
    ],
)
def test_each_panel_shows_its_metric(usual, tmp_path, name, value, place):
    changed = [dict(line) for line in metrics()]
    changed[5][name] = value
    across, down = difference(usual, draw(changed, summary(), tmp_path))
    column, row = place
    assert (0.0, 0.43, 0.72)[column] < across < (0.43, 0.72, 1.0)[column]
    if column:
        assert (0.0, 0.5)[row] < down < (0.5, 1.0)[row]


@pytest.mark.parametrize("part", ["before", "baseline", "after"])
def test_held_out_marks_show(usual, tmp_path, part):
    changed = summary()
    changed["heldout"][part]["greedy"] = {**changed["heldout"][part]["greedy"], "accuracy": 0.5}
    across, _ = difference(usual, draw(metrics(), changed, tmp_path))
    assert across < 0.43


@pytest.mark.parametrize(
    ("lines", "figures"),
    [
        (metrics(), summary(baseline=False)),
        (metrics(), summary(greedy=False)),
        (metrics(1), summary()),
        ([], summary()),
        ([{"rollout_step": 1, "optimizer_step": 1}], summary()),
    ],
    ids=["no baseline", "no greedy", "one step", "no steps", "nothing measured"],
)
def test_runs_with_less_to_show_are_drawn_too(tmp_path, lines, figures, recwarn):
    picture = draw(lines, figures, tmp_path)
    assert (picture < 0.5).any()
    assert [str(warning.message) for warning in recwarn] == []
