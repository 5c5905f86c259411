"""Fixtures of the tests that are as strict as a cluster."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))  # spawned processes inherit it: they import the tests by name

from tests.actor.gloo import run_ranks
from tests.emulated.strict_ranks import StrictRanks


@pytest.fixture(scope="session")
def strict() -> Iterator:
    """`strict(n, function, *args, patience_s=60)`: see `StrictRanks.run`; its processes end with the session."""
    ranks = StrictRanks()
    yield ranks.run
    ranks.close()


@pytest.fixture(scope="session")
def gloo() -> Callable[..., list]:
    """`gloo(n, function, *args)`: the same on plain gloo."""
    return run_ranks
