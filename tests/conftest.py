"""Settings of every test."""

import gc
import os
import sys
from collections.abc import Iterator

import pytest
from hypothesis import settings

# Examples take as long as the machine lets them: what must be fast has a test of its own, in CPU seconds.
settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")


def pytest_configure() -> None:
    """What collection makes stays: to look through it again and again for garbage costs each worker a CPU second."""
    gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def _rank_processes_end_with_the_module() -> Iterator[None]:
    """Idle ones would go on costing CPU: each process group of theirs leaves threads that poll."""
    yield
    if (gloo := sys.modules.get("tests.actor.gloo")) is not None:
        gloo.end_workers()


@pytest.fixture(autouse=True)
def _environment_ends_with_the_test() -> Iterator[None]:
    """What a command sets for itself and the processes that it starts, the next test must not inherit."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)
