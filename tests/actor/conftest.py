"""Fixtures of the actor's tests."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from megatron_dapo.actor.device import prepare

prepare("cpu")  # before any test here imports Megatron

from tests.actor.gloo import end_workers, run_ranks  # noqa: E402


@pytest.fixture(scope="session")
def gloo() -> Iterator:
    """`gloo(n, function, *args, timeout_s=120)`: see `run_ranks`; its processes end with the session."""
    yield run_ranks
    end_workers()
