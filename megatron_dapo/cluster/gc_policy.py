"""When the coordinator's memory is looked over for cycles: between rollout steps, hardly ever within one.

At the paper's size some 10^4 requests are under way at once. Python's own thresholds look over all that hangs on them
about thirty times a step; nearly all of it is freed without that, as its last reference goes.
"""

import gc

_THRESHOLDS = (20_000, 20, 100)
"""New containers before a young collection, young ones before a middle one, middle ones before a full one."""


def begin_training() -> None:
    """Once every part has been started: what the imports made stays, and is looked over no more.

    After a restart what was frozen before is looked over once: the attempt that was lost hangs on its error.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)


def end_step() -> None:
    """What a step leaves in cycles goes before the next one."""
    gc.collect()
