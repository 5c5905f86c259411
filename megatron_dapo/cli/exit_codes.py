"""What a run's exit code means; a job script may rely on it."""

from enum import IntEnum


class ExitCode(IntEnum):
    FINISHED = 0
    FAILED = 1
    """An error that has no code of its own; the message says what."""
    CONFIG = 2
    """Config, data, model or run directory cannot be used."""
    DIVERGED = 3
    """Training stopped making sense: non-finite gradient, or engine and trainer disagree."""
    STALLED = 4
    """A deadline passed."""
    FLEET = 5
    """The rollout servers could not be started or were lost."""
    TRAINER = 6
    """A trainer rank could not be started or was lost."""
    INTERRUPTED = 130
    """Ended by a signal."""
