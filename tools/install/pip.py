"""pip in the environment: what it says turned into progress, what goes wrong turned into advice."""

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from tools.install.command import InstallError, run
from tools.install.lock import SMALL_MB, Pins, installed, normalised
from tools.install.progress import Progress

UNPACK_MB_PER_S = 25.0
"""Taken for the time left until the phase has measured its own rate (wheels, as packed, on a laptop's disk)."""

_WHEEL = re.compile(r"\s*(?:Downloading|Using cached|Processing) (?:\S*/)?([\w.]+)-[^\s/]+\.whl(?: |$)")
_NO_NETWORK = re.compile(
    r"Connection|Timed? ?out|Temporary failure|ProxyError|SSLError|Max retries|from versions: none"
)
_BYTES = re.compile(r"Progress (\d+) of (\d+)")


class PipPhase:
    """Progress of one pip run: megabytes fetched, then megabytes unpacked, each at its own measured rate."""

    def __init__(self, pins: Pins, optional: Pins, site: Path, progress: Progress) -> None:
        """`pins` are expected; `optional` ones join them as soon as pip fetches the first of them."""
        self._pins = dict(pins)
        self._optional = optional
        self._site = site
        self._progress = progress
        self._fetched: set[str] = set()
        self._current = ""
        self._share_of_current = 0.0
        self._fetch_s: float | None = None

    def line(self, line: str) -> None:
        """Take one line of pip's output."""
        wheel, progress = _WHEEL.match(line), _BYTES.match(line)
        if wheel:
            self._fetched.add(self._current)
            self._current, self._share_of_current = normalised(wheel[1]), 0.0
            if self._current in self._optional:
                self._pins |= self._optional
        elif progress:
            self._share_of_current = int(progress[1]) / max(int(progress[2]), 1)
        elif line.startswith("Installing collected packages"):
            self._fetch_s = self._progress.elapsed
            self._fetched.update(self._pins)

    def tick(self) -> None:
        """Show where the phase stands."""
        total = sum(pin.megabytes for pin in self._pins.values())
        fetched = sum(pin.megabytes for name, pin in self._pins.items() if name in self._fetched)
        if self._current in self._pins and self._current not in self._fetched:
            fetched += self._share_of_current * self._pins[self._current].megabytes
        elapsed = self._progress.elapsed
        if not self._pins:
            self._progress.show("pip", left_s=None)
            return
        if self._fetch_s is None:
            known = fetched > 2 * SMALL_MB and elapsed > 1
            left = (total - fetched) * elapsed / fetched + total / UNPACK_MB_PER_S if known else None
            self._progress.show(f"fetched {fetched:.0f} of {total:.0f} MB  {self._current}", left_s=left)
            return
        present = installed(self._site)
        unpacked = sum(pin.megabytes for name, pin in self._pins.items() if name in present)
        seconds = elapsed - self._fetch_s
        rate = unpacked / seconds if unpacked > total / 10 and seconds > 1 else UNPACK_MB_PER_S
        count = sum(name in present for name in self._pins)
        text = f"unpacked {count} of {len(self._pins)} packages, {unpacked:.0f} of {total:.0f} MB"
        self._progress.show(text, left_s=max((total - unpacked) / rate, 1.0))


def pip(python: Path) -> list[str]:
    """The command that starts the pip of the environment of `python`."""
    # -I: neither this folder's packages nor PYTHON* variables reach pip.
    return [str(python), "-I", "-u", "-m", "pip"]


def pip_install(python: Path, arguments: Sequence[str], *, phase: PipPhase, scratch: Path, log: Path) -> None:
    """Run `pip install ARGUMENTS` in the environment of `python`.

    Raises:
        InstallError: pip failed; the message holds pip's own errors and advice.
    """
    options = ["--no-compile", "--progress-bar", _progress_bar(python)]
    status, lines = run(
        [*pip(python), "install", *options, *arguments],
        scratch=scratch, log=log, on_line=phase.line, on_tick=phase.tick,
    )  # fmt: skip
    if status != 0:
        raise InstallError(advice(lines, status, log=log))


def _progress_bar(python: Path) -> str:
    version = next((v for name, v in installed(site_packages(python)).items() if name == "pip"), "0.0")
    major, minor = (int(part) for part in version.split(".")[:2])
    return "raw" if (major, minor) >= (24, 1) else "off"


def site_packages(python: Path) -> Path:
    """The package folder of the environment whose interpreter is `python`, of the running Python's version."""
    return python.parents[1] / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"


def advice(lines: Sequence[str], status: int, *, log: Path) -> str:
    """What went wrong in a pip run, in pip's words and in ours."""
    text = "\n".join(lines)
    errors = [line for line in lines if line.startswith(("ERROR:", "error:", "OSError", "Killed"))]
    # A list of hundreds of known versions says nothing more at its end.
    said = [line if len(line) <= 300 else line[:297] + "..." for line in errors or lines[-5:]][-6:]
    if "No space left on device" in text or "Errno 28" in text:
        cause = f"The disk that holds {log.parent} is full: make room there."
    elif _NO_NETWORK.search(text):
        cause = (
            "A download failed: check the network, and index and proxy in pip's own configuration (`pip config list`)."
        )
    elif "No matching distribution" in text:
        cause = "There is no wheel for this machine: the locks are for Linux x86-64 with glibc 2.34 or newer."
    else:
        cause = f"pip ended with status {status}."
    stays = f"What is installed stays: `make install` goes on from here. All that pip said: {log}"
    return "\n".join([*said, cause, stays])
