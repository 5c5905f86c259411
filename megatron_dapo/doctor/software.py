"""Versions: what is installed, against what this package declares and against the lock that was run."""

import importlib.metadata
import platform
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from megatron_dapo.doctor.result import Finding, failed, passed, warning

PACKAGE = "megatron-dapo"
PROJECT = Path(__file__).parents[2] / "pyproject.toml"
LOCKS = PROJECT.parent / "requirements"
"""Both are there in a checkout; a wheel has neither."""

_EXTRA = "cpu"
"""Names what training and generation need on any device."""

_INSTALLER = "pip"

_SHOWN = ("torch", "megatron-core", "sglang", "ray", "transformers")
_SHOWN_DIFFERENCES = 4


def installed_versions() -> dict[str, str]:
    """Version of every package that this Python finds, by normalised name."""
    return {
        canonicalize_name(name): found.version
        for found in importlib.metadata.distributions()
        if (name := found.metadata["Name"]) is not None
    }


def declared(project: Path = PROJECT) -> list[str]:
    """Requirements of a run: the checkout's, or else those of the installed package's metadata.

    Raises:
        importlib.metadata.PackageNotFoundError: there is neither.
    """
    if project.is_file():
        tables = tomllib.loads(project.read_text())["project"]
        return [*tables["dependencies"], *tables["optional-dependencies"][_EXTRA]]
    found = [Requirement(text) for text in importlib.metadata.requires(PACKAGE) or []]
    return [str(one) for one in found if one.marker is None or one.marker.evaluate({"extra": _EXTRA})]


def check_python(version: tuple[int, int] = sys.version_info[:2]) -> Finding:
    """3.11 or 3.12: megatron-core and sglang have wheels that work together for no other."""
    if version in ((3, 11), (3, 12)):
        return passed("python", platform.python_version())
    return failed("python", f"{version[0]}.{version[1]}", "use Python 3.11 or 3.12: PYTHON=python3.12 make install")


def check_versions(requirements: Sequence[str], installed: Mapping[str, str]) -> Iterator[Finding]:
    """Every requirement that is not there or lies outside its bounds, or one line that all is well."""
    if not requirements:
        yield warning("versions", f"{PACKAGE} declares none", "install it whole: make install, or pip install -e .")
        return
    wrong = False
    for requirement in map(Requirement, requirements):
        version = installed.get(canonicalize_name(requirement.name))
        if version is not None and requirement.specifier.contains(version, prereleases=True):
            continue
        wrong = True
        found = "is not installed" if version is None else f"{version} is installed"
        yield failed(
            "versions",
            f"{requirement.name} {found}; needed: {requirement.specifier or 'any version'}",
            f'make install, or pip install --no-deps "{requirement.name}{requirement.specifier}"',
        )
    if not wrong:
        shown = ", ".join(f"{name} {installed[name]}" for name in _SHOWN if name in installed)
        yield passed("versions", f"{len(requirements)} packages inside their bounds: {shown}")


def check_lock(lock: Path, installed: Mapping[str, str]) -> Finding:
    """Whether the packages are those that were run together; others may work."""
    if not lock.is_file():
        return passed("lock", f"no {lock.name} beside this package: not compared")
    pins = dict(_pins(lock))
    other = [
        f"{name} {installed[name]} (locked {version})"
        for name, version in pins.items()
        if name != _INSTALLER and name in installed and installed[name].partition("+")[0] != version
    ]
    if not other:
        return passed("lock", f"as in {lock.name}")
    target = "install-gpu" if lock.name.startswith("gpu") else "install"
    more = f" and {len(other) - _SHOWN_DIFFERENCES} more" if len(other) > _SHOWN_DIFFERENCES else ""
    return warning(
        "lock",
        f"not the versions that were run together: {', '.join(other[:_SHOWN_DIFFERENCES])}{more}",
        f"if something fails, make clean-venv {target} takes {lock.name} as it is",
    )


def lock_of(installed: Mapping[str, str]) -> Path:
    """The lock of this Python: that of GPU nodes where the servers' kernels are installed."""
    kind = "gpu" if "sglang-kernel" in installed else "py"
    return LOCKS / f"{kind}{sys.version_info[0]}{sys.version_info[1]}.lock.txt"


def software() -> Iterator[Finding]:
    """All checks of this environment."""
    yield check_python()
    installed = installed_versions()
    try:
        requirements = declared()
    except importlib.metadata.PackageNotFoundError:
        yield failed("versions", f"{PACKAGE} itself is not installed", "make install, or pip install --no-deps -e .")
    else:
        yield from check_versions(requirements, installed)
    yield check_lock(lock_of(installed), installed)


def _pins(lock: Path) -> Iterator[tuple[str, str]]:
    for line in lock.read_text().splitlines():
        name, separator, version = line.partition("#")[0].strip().partition("==")
        if separator:
            yield canonicalize_name(name), version
