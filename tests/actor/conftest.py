"""Fixtures of the actor's tests."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from megatron_dapo.actor.device import prepare

prepare("cpu")  # before any test here imports Megatron

from tests.actor.gloo import run_ranks  # noqa: E402


@pytest.fixture(scope="session")
def gloo() -> Callable[..., list]:
    """`gloo(n, function, *args, timeout_s=120)`: see `run_ranks`."""
    return run_ranks
