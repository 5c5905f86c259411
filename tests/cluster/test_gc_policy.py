"""What is freed, and when."""

import gc
import weakref

import pytest

from megatron_dapo.cluster import gc_policy


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


def test_a_step_leaves_nothing_in_cycles():
    gc_policy.begin_training()
    left = weakref.ref(Batch())
    assert left() is not None, "only a collection finds it"
    gc_policy.end_step()
    assert left() is None


def test_what_a_lost_attempt_held_is_freed_though_it_was_frozen():
    batch = Batch()
    gc_policy.begin_training()
    left = weakref.ref(batch)
    del batch
    gc_policy.end_step()
    assert left() is not None, "frozen: a collection does not look at it"
    gc_policy.begin_training()
    assert left() is None


def test_training_hardly_ever_looks_over_everything():
    gc_policy.begin_training()
    before = gc.get_stats()[2]["collections"]
    kept = [[number] for number in range(1_000_000)]
    assert gc.get_stats()[2]["collections"] == before
    assert len(kept) == 1_000_000
