"""Run a command, hand each of its lines to a listener, and keep the listener's clock ticking in between."""

import os
import queue
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

TICK_S = 0.2
SILENCE_S = 1800.0
"""A command that says nothing for so long is ended: the largest wheel unpacks in minutes even on a slow disk."""


class InstallError(RuntimeError):
    """The install cannot go on. The message says what failed, why, and what to do."""


def environment(scratch: Path) -> dict[str, str]:
    """The caller's environment for child processes, less what would lead pip or Python astray.

    `scratch` takes temporary files: /tmp is often small or in memory, and pip unpacks gigabytes there.
    """
    astray = ("PYTHONDONTWRITEBYTECODE", "PYTHONPATH", "PYTHONHOME", "PIP_TARGET", "PIP_PREFIX", "PIP_USER")
    kept = {key: value for key, value in os.environ.items() if key not in astray}
    return kept | {"TMPDIR": str(scratch), "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}


def run(
    command: Sequence[str],
    *,
    scratch: Path,
    log: Path,
    on_line: Callable[[str], None] = lambda line: None,
    on_tick: Callable[[], None] = lambda: None,
    variables: Mapping[str, str] | None = None,
) -> tuple[int, list[str]]:
    """Exit status of `command` and its lines; every line is appended to `log`. `variables` join its environment.

    Raises:
        InstallError: the command was silent for `SILENCE_S` seconds and was ended.
    """
    lines: queue.Queue[str | None] = queue.Queue()
    with (
        log.open("a") as record,
        subprocess.Popen(
            list(command), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
            stdin=subprocess.DEVNULL, env=environment(scratch) | dict(variables or {}),
        ) as process,
    ):  # fmt: skip
        record.write(f"$ {' '.join(command)}\n")
        reader = threading.Thread(target=_read, args=(process, lines), daemon=True)
        reader.start()

        def hear(line: str) -> None:
            record.write(line + "\n")
            on_line(line)

        try:
            seen = _collect(lines, hear, on_tick, command)
        except BaseException:
            process.terminate()
            process.wait(30)
            raise
        return process.wait(30), seen


def _read(process: subprocess.Popen[str], lines: "queue.Queue[str | None]") -> None:
    assert process.stdout is not None
    for line in process.stdout:
        lines.put(line.rstrip("\n"))
    lines.put(None)


def _collect(
    lines: "queue.Queue[str | None]",
    on_line: Callable[[str], None],
    on_tick: Callable[[], None],
    command: Sequence[str],
) -> list[str]:
    seen: list[str] = []
    heard = time.monotonic()
    while True:
        try:
            line = lines.get(timeout=TICK_S)
        except queue.Empty:
            if time.monotonic() - heard > SILENCE_S:
                raise InstallError(f"{' '.join(command[:6])} ... said nothing for {SILENCE_S / 60:g} minutes") from None
        else:
            if line is None:
                return seen
            heard = time.monotonic()
            on_line(line)
            if not line.startswith("Progress "):
                seen.append(line)
        on_tick()
