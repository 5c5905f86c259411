"""What was installed into an environment, and from what: the stamp that makes a second install do nothing."""

import hashlib
import json
import platform
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tools.install.command import InstallError

STAMP = "megatron-dapo.json"
LOCK = "install.lock"
"""Held by the install at work; there before anything else is."""


@dataclass(kw_only=True, slots=True)
class State:
    """The stamp file of an environment."""

    place: str
    """Where the environment was made: its scripts hold this path, so a moved or copied one does not work."""

    python: str
    """Minor version, `3.11`."""

    base: str
    """The interpreter that the environment was made from, links resolved."""

    phases: dict[str, str] = field(default_factory=dict)
    """Finished phase to the hash of what it was done from."""

    ready: str = ""
    """The closing line of the finished install."""

    gpu: bool = False
    """Made by `make install-gpu`."""

    engine: bool = True
    """TransformerEngine is wanted, where `gpu` is set."""

    def same_environment(self, other: "State") -> bool:
        return (self.place, self.python, self.base, self.gpu) == (other.place, other.python, other.base, other.gpu)


def wanted_state(venv: Path, *, gpu: bool = False, engine: bool = True) -> State:
    """The state of an environment at `venv` made from the running Python, before its first phase."""
    # In a virtual environment sys.executable is a link inside it; the base is what must be compared.
    base = getattr(sys, "_base_executable", None) or sys.executable
    python = ".".join(platform.python_version_tuple()[:2])
    return State(place=str(venv.resolve()), python=python, base=str(Path(base).resolve()), gpu=gpu, engine=engine)


def read_state(venv: Path) -> State | None:
    """The stamp of `venv`; None where there is no environment yet.

    Raises:
        InstallError: the folder was not made by this installer, which then leaves it alone.
    """
    stamp = venv / STAMP
    if stamp.exists():
        try:
            return State(**json.loads(stamp.read_text()))
        except (ValueError, TypeError):
            # Written by another version of the installer, or cut short: known to be ours, so made anew.
            return State(place="", python="", base="")
    if venv.exists() and any(venv.iterdir()) and not (venv / LOCK).exists():
        raise InstallError(
            f"{venv} was not made by `make install`, so it is left alone: move it away, or name another place by "
            "VENV=path make install"
        )
    return None


def write_state(venv: Path, state: State) -> None:
    """Write the stamp whole or not at all."""
    draft = venv / f"{STAMP}.draft"
    draft.write_text(json.dumps(asdict(state), indent=1) + "\n")
    draft.replace(venv / STAMP)


def digest(*paths: Path) -> str:
    """Hash of the files' bytes."""
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in paths)).hexdigest()[:16]
