"""The comparison with published steps says what docs/measurements/plan.md says."""

from pathlib import Path

import pytest

from tests.benchmarks.compare_plan import SIGMA, STEPS, table, uncut_mean

PAGE = Path(__file__).parents[2] / "docs" / "measurements" / "plan.md"


@pytest.fixture(scope="module")
def made() -> str:
    return table()


def test_the_page_holds_the_table_that_the_code_makes(made):
    assert made in PAGE.read_text()


def test_every_error_stays_within_the_factor_that_the_page_claims(made):
    errors = [float(row.split(" | ")[4].rstrip("%")) / 100 for row in made.splitlines()[2:]]
    assert len(errors) == len(STEPS)
    assert all(0.5 <= 1 + error <= 2 for error in errors)


def test_a_cut_far_away_leaves_the_mean():
    assert uncut_mean(1000, 10**7) == pytest.approx(1000, rel=0.02 + SIGMA / 100)
    assert uncut_mean(3000, 4096) > 4096
