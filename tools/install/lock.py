"""What a lock asks for and what an environment holds."""

import re
from dataclasses import dataclass
from pathlib import Path

SMALL_MB = 0.3
"""Size taken for a wheel whose lock line states none (they are below 1 MB)."""

_PIN = re.compile(r"(?P<name>[\w.-]+)==(?P<version>[^\s#]+)(?:\s*#\s*(?P<megabytes>\d+) MB)?$")


@dataclass(frozen=True, kw_only=True, slots=True)
class Pin:
    """One line of a lock: `ray==2.60.0  # 79 MB` is `Pin(name="ray", version="2.60.0", megabytes=79.0)`."""

    name: str
    """Normalised: lower case, dashes."""

    version: str
    megabytes: float
    """Size of the wheel; only the progress bar uses it."""


Pins = dict[str, Pin]


def normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def read_lock(path: Path) -> Pins:
    """The pins of a lock by name.

    Raises:
        ValueError: a line is no pin; names file and line.
    """
    pins = {}
    for number, text in enumerate(path.read_text().splitlines(), start=1):
        line = text.strip()
        if not line or line.startswith("#"):
            continue
        match = _PIN.match(line)
        if match is None:
            raise ValueError(f"{path}:{number}: {line!r}: a lock holds lines `name==version  # size MB` only")
        name = normalised(match["name"])
        pins[name] = Pin(name=name, version=match["version"], megabytes=float(match["megabytes"] or SMALL_MB))
    return pins


def installed(site: Path) -> dict[str, str]:
    """Name to version of every completely installed package; the version holds a build's mark (`2.13.0+cpu`)."""
    found = {}
    for info in site.glob("*.dist-info"):
        name, _, version = info.name.removesuffix(".dist-info").partition("-")
        if _complete(info):
            found[normalised(name)] = version
    return found


def unfinished(site: Path) -> list[Path]:
    """`.dist-info` folders that an interrupted install left: pip would take them for installed packages."""
    return [info for info in site.glob("*.dist-info") if not _complete(info)]


def missing(pins: Pins, site: Path) -> list[Pin]:
    """The pins that the environment does not satisfy; `2.13.0+cpu` satisfies `2.13.0`, as it does for pip."""
    present = installed(site)
    return [pin for pin in pins.values() if present.get(pin.name, "").partition("+")[0] != pin.version]


def _complete(info: Path) -> bool:
    # pip writes INSTALLER and then RECORD last, after every file of the package.
    return (info / "INSTALLER").exists() and (info / "RECORD").exists()
