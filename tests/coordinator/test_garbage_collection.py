"""What is freed, and when."""

import gc
import weakref

import pytest

from megatron_dapo.coordinator.run import tune_collector


class Batch:
    """Stands in a cycle, as what hangs on an error's traceback does."""

    def __init__(self) -> None:
        self.me = self


@pytest.fixture(autouse=True)
def _as_before():
    thresholds = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*thresholds)


def test_what_a_lost_attempt_held_is_freed_though_it_was_frozen():
    batch = Batch()
    tune_collector()
    left = weakref.ref(batch)
    del batch
    gc.collect()
    assert left() is not None, "frozen: a collection does not look at it"
    tune_collector()
    assert left() is None


def test_training_hardly_ever_looks_over_everything():
    tune_collector()
    before = gc.get_stats()[2]["collections"]
    kept = [[number] for number in range(1_000_000)]
    assert gc.get_stats()[2]["collections"] == before
    assert len(kept) == 1_000_000
