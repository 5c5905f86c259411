"""The terminal: one line a rollout step, a bar with the time left where there is a terminal, tables at the end.

Without a terminal (a batch job's log) the same text comes as plain lines, flushed at once.
"""

import errno
import os
import re
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import IO, Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from rich.console import Console as Terminal
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.text import Text

from megatron_dapo.monitor.statistics import STAGES, by_way, difference, percent

Figures = Mapping[str, Any]
WHOLE, BAR = "run", 20
"""Name of the bar of the whole run; width of a bar, in characters."""
RECENT = 5
"""Rollout steps whose mean duration predicts the time left."""
QUIET_S = 30.0
"""A log without a new line for so long gets one that says how far the work under way is."""
START_QUIET_S = 4.0
"""The same before the work itself has begun, where something has changed."""


@dataclass(frozen=True, slots=True)
class Count:
    """How far a work is. Count(12, 32, "groups kept", {"tokens/s": 1240.0, "longest_running_s": 38.2})"""

    done: int
    total: int
    unit: str
    figures: Mapping[str, float] = field(default_factory=dict)
    """What else is known of it, by name."""

    def text(self) -> str:
        """`12 of 32 groups kept, 1240 tokens/s, longest running 38 s`."""
        parts = [f"{self.done} of {self.total} {self.unit}"]
        for name, value in self.figures.items():
            words = name.removesuffix("_s").replace("_", " ")
            parts.append(f"{words} {duration(value)}" if name.endswith("_s") else f"{value:.0f} {words}")
        return ", ".join(parts)


class _Screen(Terminal):
    def on_broken_pipe(self) -> None:
        """Rich would end the program here; `Console` decides."""
        raise  # the BrokenPipeError that rich is handling when it calls this


class Console:
    """What a run prints. Everything goes to `file`; nothing is read."""

    def __init__(self, file: IO[str] | None = None, *, terminal: bool | None = None) -> None:
        """`file`: standard output if None; `terminal`: whether to draw a bar and colours, None: if `file` is one."""
        self._file = file or sys.stdout
        terminal = self._file.isatty() if terminal is None else terminal  # not rich's view, which FORCE_COLOR decides
        self._screen = _Screen(file=self._file, force_terminal=terminal, highlight=False)
        self._bar: Progress | None = None
        self._draws = terminal and not self._screen.is_dumb_terminal
        self._rows: dict[str, TaskID] = {}
        self._printed, self._said = time.monotonic(), dict[str, Count]()
        self._seconds: deque[float] = deque(maxlen=RECENT)
        self.run, self.noted = dict[str, Count](), ""
        """How far the whole run is, as `working` takes it, empty until it has started; and the newest note."""

    def note(self, text: str, style: str = "") -> None:
        """One line for the reader."""
        # soft_wrap: a log file has no width; Text: brackets in the text are no markup.
        with self._unless_gone():
            self._screen.print(Text(text, style=style), soft_wrap=True)
            self._file.flush()
        self._printed, self.noted = time.monotonic(), text

    def aside(self, text: str) -> None:
        """A `note` by a task that must go on: if nothing can be written, the next line of the run itself says so."""
        with suppress(OSError, ValueError):
            self.note(text)

    def working(self, works: Mapping[str, Count]) -> None:
        """How far each work is: on a terminal a bar that stays until a call without that work, in a log a line, each
        time nothing was printed for `QUIET_S`, at the start for `START_QUIET_S`."""
        if not self._draws:
            quiet, news = time.monotonic() - self._printed, not self.run and works != self._said
            if works and quiet >= (START_QUIET_S if news else QUIET_S):
                self._said = dict(works)
                for name, count in works.items():
                    self.note(f"  {name}: {count.text()}")
            return
        with self._unless_gone():
            rows = set(self._rows)
            for name in rows - works.keys():
                if self._bar is not None:
                    self._bar.remove_task(self._rows.pop(name))
            for name, count in works.items():
                self._draw_bar(name, count)
            if self._bar is not None and rows != works.keys():  # else twice a second
                self._bar.refresh()

    def error(self, text: str) -> None:
        """Why the run ends. Takes the bar down first, so that nothing is drawn over it."""
        self.close()
        self.note(text, "bold red")

    def step(self, metrics: Figures, *, total: int) -> None:
        """One finished rollout step of `total`, by its metrics."""
        self._seconds.append(metrics["timing/step"])
        left = (total - metrics["rollout_step"]) * sum(self._seconds) / len(self._seconds)
        figures = {"time_left_s": left} if left else {}
        self.run = {WHOLE: Count(metrics["rollout_step"], total, "rollout steps", figures)}
        self.note(step_line(metrics, total=total, seconds_left=left))

    def summary(self, summary: Figures) -> None:
        """Before and after, cost and examples: `summary.json` as tables."""
        self.close()
        ways = {way: stages for way, stages in sorted(by_way(summary["heldout"]).items()) if "after" in stages}
        called = {"percent": percent, "difference": difference, "stages": STAGES, "ways": ways, "examples": ()}
        text = text_page("megatron_dapo.monitor", "summary.txt.j2", **called | dict(summary))
        with self._unless_gone():
            self._screen.print(text, soft_wrap=True, emoji=False, end="")
            self._file.flush()

    @contextmanager
    def _unless_gone(self) -> Iterator[None]:
        """A reader that is gone (a closed pipe, a hung up terminal) must not end the run, nor keep it from saving."""
        try:
            yield
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.EIO):
                raise
            self._screen.quiet = True
            self._bar, self._rows, self._draws = None, {}, False
            with suppress(OSError):  # what is still buffered goes nowhere, also when Python ends
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self._file.fileno())
                os.close(nowhere)

    def _draw_bar(self, name: str, count: Count) -> None:
        if self._bar is None:
            columns = (TextColumn("{task.description}"), BarColumn(BAR), TextColumn("{task.fields[text]}"))
            self._bar = Progress(*columns, console=self._screen, transient=True, refresh_per_second=2)
            self._bar.start()
        if name not in self._rows:
            self._rows[name] = self._bar.add_task(name, text="")
        room = self._screen.width - BAR - 2 - max(map(len, self._rows))  # else the bar would give way
        self._bar.update(self._rows[name], completed=count.done, total=count.total, text=count.text()[: max(0, room)])

    def close(self) -> None:
        """Take the bars down; a later call may draw new ones."""
        if self._bar is not None:
            with self._unless_gone():
                self._bar.stop()
            self._bar, self._rows = None, {}


READING: dict[str, Any] = {"undefined": StrictUndefined, "trim_blocks": True, "lstrip_blocks": True}
"""How a template is read: a name that it was not given is a fault, and a line of a block alone leaves no line."""


def text_page(package: str, name: str, **values: Any) -> str:
    """A template of a package as text; `plain` keeps brackets in a value from being taken for rich's markup."""
    pages = Environment(loader=PackageLoader(package), **READING)
    # To rich, `\[` is a bracket also where no tag follows, as in LaTeX.
    pages.filters["plain"] = lambda text: escape(re.sub(r"\\(?=\[(?![a-z#/@]))", r"\\\\", text))
    pages.filters["duration"] = duration
    return pages.get_template(name).render(values)


def step_line(metrics: Figures, *, total: int, seconds_left: float) -> str:
    """`step  3/40  accuracy 41.2%  length 38  cut off 3.0%  entropy 0.310  1240 tokens/s  12 s  (7 min left)`."""
    seconds = metrics["timing/step"]
    parts = [
        f"step {metrics['rollout_step']:>{len(str(total))}}/{total}",
        f"accuracy {metrics['accuracy/mean']:6.1%}",
        f"length {metrics['response_length/mean']:.0f}",
        f"cut off {metrics['truncated_fraction']:.1%}",
        f"entropy {metrics['entropy']:.3f}",
        f"{metrics['tokens/generated'] / seconds:.0f} tokens/s",
        duration(seconds),
    ]
    if metrics["rollout_step"] < total:
        parts.append(f"({duration(seconds_left)} left)")
    return "  ".join(parts)


def duration(seconds: float) -> str:
    """Seconds as a person says them: `9.4 s`, `75 s`, `12 min`, `3 h 20 min`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"
