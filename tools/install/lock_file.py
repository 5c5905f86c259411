"""What a lock asks for and what an environment holds."""

import re
from pathlib import Path

_PIN = re.compile(r"(?P<name>[\w.-]+)==(?P<version>[^\s#]+)(\s*#.*)?$")


def normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def read_lock(path: Path) -> dict[str, str]:
    """Versions by normalised name (lower case, dashes).

    Raises:
        ValueError: a line is no pin; names file and line.
    """
    pins = {}
    for number, text in enumerate(path.read_text().splitlines(), start=1):
        line = text.strip()
        if line and not line.startswith("#"):
            match = _PIN.match(line)
            if match is None:
                raise ValueError(f"{path}:{number}: {line!r}: a lock holds lines `name==version` only")
            pins[normalised(match["name"])] = match["version"]
    return pins


def installed(site: Path) -> dict[str, str]:
    """Name to version of every completely installed package; the version holds a build's mark (`2.13.0+cpu`)."""
    stems = [info.name.removesuffix(".dist-info") for info in site.glob("*.dist-info") if _complete(info)]
    return {normalised(name): version for name, _, version in (stem.partition("-") for stem in stems)}


def unfinished(site: Path) -> list[Path]:
    """`.dist-info` folders that an interrupted install left: uv and pip would take them for installed packages."""
    return [info for info in site.glob("*.dist-info") if not _complete(info)]


def _complete(info: Path) -> bool:
    # Both installers write INSTALLER after every file of the package.
    return (info / "INSTALLER").exists() and (info / "RECORD").exists()
