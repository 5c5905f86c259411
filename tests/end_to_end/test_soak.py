"""An hour under random kills: memory and open files of every process stay flat, nothing is left behind or lost."""

import numpy as np
import pytest

from tests.soak import GROWTH_FILES_PER_HOUR, WARM_UP_STEPS, Life, growth, judge, soak

MINUTES = 60.0
GOES_ON = ("rollout.deterministic=false", "algorithm.dynamic_sampling.surplus=4")


@pytest.mark.slow
@pytest.mark.timeout(5400)
@pytest.mark.parametrize("overrides", [(), GOES_ON], ids=["", "while a surplus goes on"])
def test_an_hour_under_kills(overrides, tmp_path):
    page, wrong = judge(soak(tmp_path / "run", MINUTES, seed=1, overrides=overrides), tmp_path / "run")
    assert not wrong, page


def life(files: np.ndarray, resident: np.ndarray) -> Life:
    """A process that was looked at every five seconds, with a rollout step in each look."""
    seen = len(files)
    return Life(
        seconds=[5.0 * at for at in range(seen)],
        steps=list(range(seen)),
        files=files.tolist(),
        resident=resident.tolist(),
    )


def test_growth_is_found_below_what_comes_and_goes():
    at = np.arange(400)
    coming_and_going = np.where(at % 7 < 5, 300, 40)
    early = 1e9 - 1e8 * np.maximum(WARM_UP_STEPS - at, 0)
    flat = [life(coming_and_going, early) for _ in range(2)]
    leaking = [life(coming_and_going + at // 10, early + 1e5 * at) for _ in range(2)]
    assert abs(growth(flat, "files")[0]) < 1
    assert abs(growth(flat, "resident")[0]) < 1
    begins_low = life(np.where((at[:60] + 4) % 7 < 5, 300, 40), early[:60])  # in the first look that counts
    assert growth([begins_low], "files") == (0.0, 1)
    files, counted = growth(leaking, "files")
    assert counted == 2
    assert 0.8 * 72 < files < 1.2 * 72
    assert files > GROWTH_FILES_PER_HOUR
    assert growth(leaking, "resident")[0] == pytest.approx(72e6)
    imported = [life(coming_and_going, early + 5e7 * (at > begun)) for begun in (100, 300)]
    assert growth(imported, "resident")[0] == 0, "once in a life is no growth"
    assert growth([life(coming_and_going[:20], early[:20])], "files") == (0.0, 0)
