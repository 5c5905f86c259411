"""Progress of one phase on a terminal (a bar) or in a log (a plain line a second), with the time left."""

import shutil
import time
from collections.abc import Callable
from typing import TextIO

BAR_WIDTH = 24


def duration(seconds: float) -> str:
    """`48 s`, `3:07 min` or `1:02:03 h`."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02d} min"
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d} h"


class Progress:
    """Shows one phase. `show` may be called as often as wanted; it writes at most once an interval."""

    def __init__(self, title: str, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._title = title
        self._stream = stream
        self._clock = clock
        self._terminal = stream.isatty()
        self._interval = 0.1 if self._terminal else 1.0
        self._start = clock()
        # A log gets its first line after a second: phases that take no time print their closing line only.
        self._written = self._start

    @property
    def elapsed(self) -> float:
        """Seconds since the phase began."""
        return self._clock() - self._start

    def show(self, text: str, *, left_s: float | None) -> None:
        """Write `text` with the share done and the time left; `left_s` None means that it cannot be told yet."""
        if self._clock() - self._written < self._interval:
            return
        self._written = self._clock()
        elapsed = self.elapsed
        share = None if left_s is None else elapsed / max(elapsed + left_s, 1e-9)
        times = duration(elapsed) + ("" if left_s is None else f", about {duration(left_s)} left")
        percent = "" if share is None else f"{share:4.0%} "
        if self._terminal:
            filled = round(BAR_WIDTH * (share or 0))
            line = f"{self._title} {'━' * filled}{'╌' * (BAR_WIDTH - filled)} {percent} {times}  {text}"
            self._stream.write("\r\x1b[2K" + line[: shutil.get_terminal_size().columns - 1])
        else:
            self._stream.write(f"{self._title} {percent}{times}  {text}\n")
        self._stream.flush()

    def close(self, text: str) -> None:
        """Replace the bar by the phase's closing line."""
        start = "\r\x1b[2K" if self._terminal else ""
        self._stream.write(f"{start}{self._title} {text}, {duration(self.elapsed)}\n")
        self._stream.flush()
