"""When the coordinator's garbage collector runs: between rollout steps, hardly ever within one.

At the paper's size some 10^4 requests are under way at once. With Python's default thresholds the collector would scan
all their objects about thirty times a step, although reference counting frees nearly all of them.
"""

import gc

_THRESHOLDS = (20_000, 20, 100)
"""New containers before a collection of the young generation, young collections before a middle one, middle ones
before a full one."""


def begin_training() -> None:
    """Call it when everything has been started: what exists then is frozen, and no later collection scans it.

    After a restart, what was frozen before is collected once: the error of the failed attempt still refers to it.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)


def end_step() -> None:
    """Free what the step left in reference cycles before the next one begins."""
    gc.collect()
