"""How far a phase is and how long it will take: a line that is written over on a terminal, in a log one every 5 s."""

import shutil
import sys
import time


class Progress:
    """Shows one phase on standard error; `show` may be called as often as wanted."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._start = self._written = time.monotonic()
        self._terminal = sys.stderr.isatty()

    def show(self, text: str, done: int, total: int) -> None:
        """Write `text`, how much of `total` is done, and the time left at the rate so far."""
        now = time.monotonic()
        if now - self._written < (0.2 if self._terminal else 5.0):
            return
        self._written = now
        left = f", about {(now - self._start) * (total - done) / done:.0f} s left" if done else ""
        line = f"{self._title} {text}: {done / 1e6:.0f} of {total / 1e6:.0f} MB, {now - self._start:.0f} s{left}"
        width = shutil.get_terminal_size().columns - 1
        print(
            "\r\x1b[2K" + line[:width] if self._terminal else line, end="" if self._terminal else "\n", file=sys.stderr
        )
        sys.stderr.flush()

    def close(self, text: str) -> None:
        """The phase's last line."""
        start = "\r\x1b[2K" if self._terminal else ""
        print(f"{start}{self._title} {text}, {time.monotonic() - self._start:.0f} s", file=sys.stderr, flush=True)
