"""An hour under random kills: memory and open files of every process stay flat, nothing is left behind or lost."""

import pytest

from tests.soak import judge, soak

MINUTES = 60.0


@pytest.mark.slow
@pytest.mark.timeout(5400)
def test_an_hour_under_kills(tmp_path):
    page, wrong = judge(soak(tmp_path / "run", MINUTES, seed=1), tmp_path / "run")
    assert not wrong, page
