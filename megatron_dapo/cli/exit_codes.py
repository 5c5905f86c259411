"""What a run's exit code means; a job script may rely on it.

An error class names its code as a number, `exit_code = 2`, wherever the class stands.
"""

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
    """Ray or a trainer rank could not be started, or was lost too often."""
    INEXACT = 7
    """`tools.certify`, `tools.bisect`: numbers that should be the same differ by more than the bounds."""
    CONTINUE = 75
    """Stopped by a signal, with everything saved: the same command with `run.resume=true` goes on."""
    INTERRUPTED = 130
    """Ended at once by a second signal; `run.resume=true` goes on from the last checkpoint."""


def exit_code_of(error: BaseException) -> ExitCode | None:
    """The `exit_code` of the error's class, for errors that explain themselves; None: a fault of ours, worth a
    traceback."""
    code = getattr(error, "exit_code", ExitCode.FAILED if isinstance(error, OSError) else None)
    return None if code is None else ExitCode(code)


def named(error: BaseException) -> str:
    """The message of an error that explains itself, under its name and that by which docs/operations.md lists it. An
    error of the config or of the command line names its key or option; those of files their file."""
    name = type(error).__name__
    listed = next((kind.__name__ for kind in type(error).__mro__ if "exit_code" in vars(kind)), name)
    if name == "ConfigError" or isinstance(error, OSError):
        return str(error)
    return f"{name}: {error}" if listed == name else f"{name} ({listed}): {error}"
