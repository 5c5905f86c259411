"""Versions: what is installed, against what this package declares and against the lock that was run."""

import importlib.metadata
import platform
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from megatron_dapo.doctor.probing import Finding, Node, failed, passed, warning

PACKAGE = "megatron-dapo"
PROJECT = Path(__file__).parents[2] / "pyproject.toml"
LOCKS = PROJECT.parent / "requirements"
"""Both are there in a checkout; a wheel has neither."""

_EXTRA = "cpu"
"""Names what training and generation need on any device."""

_INSTALLER = "pip"

_SHOWN = ("torch", "megatron-core", "sglang", "ray", "transformers")
_SHOWN_DIFFERENCES = 4


def installed_versions(node: Node) -> dict[str, str]:
    """Version of every package that the node's Python finds, by normalised name."""
    found = importlib.metadata.distributions(path=list(node.packages))
    return {canonicalize_name(name): one.version for one in found if (name := one.metadata["Name"]) is not None}


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


def check_versions(requirements: Sequence[str], installed: Mapping[str, str]) -> list[Finding]:
    """Every requirement that is not there or lies outside its bounds, or one line that all is well."""
    if not requirements:
        return [warning("versions", f"{PACKAGE} declares none", "install it whole: make install, or pip install -e .")]
    wrong = []
    for one in map(Requirement, requirements):
        version = installed.get(canonicalize_name(one.name))
        if version is None or not one.specifier.contains(version, prereleases=True):
            there = "is not installed" if version is None else f"{version} is installed"
            found = f"{one.name} {there}; needed: {one.specifier or 'any version'}"
            fix = f'make install, or pip install --no-deps "{one.name}{one.specifier}"'
            wrong.append(failed("versions", found, fix))
    shown = ", ".join(f"{name} {installed[name]}" for name in _SHOWN if name in installed)
    return wrong or [passed("versions", f"{len(requirements)} packages inside their bounds: {shown}")]


def check_lock(lock: Path, installed: Mapping[str, str]) -> Finding:
    """Whether the packages are those that were run together; others may work."""
    if not lock.is_file():
        return passed("lock", f"no {lock.name} beside this package: not compared")
    lines = [line.partition("#")[0].strip() for line in lock.read_text().splitlines()]
    pins = {
        canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines) if version
    }
    other = [
        f"{name} {installed[name]} (locked {version})"
        for name, version in pins.items()
        if name != _INSTALLER and name in installed and installed[name].partition("+")[0] != version
    ]
    if not other:
        return passed("lock", f"as in {lock.name}")
    target = "install-gpu" if lock.name.startswith("gpu") else "install"
    more = f" and {len(other) - _SHOWN_DIFFERENCES} more" if len(other) > _SHOWN_DIFFERENCES else ""
    found = f"not the versions that were run together: {', '.join(other[:_SHOWN_DIFFERENCES])}{more}"
    return warning("lock", found, f"if something fails, make clean-venv {target} takes {lock.name} as it is")


def lock_of(installed: Mapping[str, str]) -> Path:
    """The lock of this Python: that of GPU nodes where the servers' kernels are installed."""
    kind = "gpu" if "sglang-kernel" in installed else "py"
    return LOCKS / f"{kind}{sys.version_info[0]}{sys.version_info[1]}.lock.txt"


def check_software(node: Node) -> Iterator[Finding]:
    """All checks of the node's environment."""
    yield check_python()
    installed = installed_versions(node)
    try:
        requirements = declared()
    except importlib.metadata.PackageNotFoundError:
        yield failed("versions", f"{PACKAGE} itself is not installed", "make install, or pip install --no-deps -e .")
    else:
        yield from check_versions(requirements, installed)
    yield check_lock(lock_of(installed), installed)
