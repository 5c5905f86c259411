"""The signals that ask a run to stop, and what they do before there is a run."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
"""SIGUSR1 is what `sbatch --signal` is usually told to send ahead of the time limit."""


class StoppedEarly(BaseException):
    """A stop signal came before there was anything to save. No Exception: nobody may take it for an error of theirs."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)


def heeded_signals() -> list[signal.Signals]:
    """Those of STOP_SIGNALS that this process is to heed: `nohup` wants its SIGHUP ignored. SIGINT is ignored in a
    script's background, where it must stop a run too."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [number for number in STOP_SIGNALS if number is not signal.SIGHUP or not ignored]


@contextmanager
def stop_at_once() -> Iterator[None]:
    """A stop signal raises StoppedEarly in the body, in the main thread, until the body sets handlers of its own: the
    system's own way would end the process with a code that says nothing of going on."""

    def on_signal(number: int, frame: object) -> None:
        raise StoppedEarly(number)

    before = {number: signal.signal(number, on_signal) for number in heeded_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
