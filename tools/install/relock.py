"""Writes the lock of the GPU environment anew: `python -m tools.install.relock`, with uv on the PATH (pip install uv).

uv resolves pyproject's extras `gpu` and `dev` for Python 3.12 with every package's own declarations and no overrides.
The versions of the old lock stay where they still fit; `--from requirements/py312.lock.txt` keeps that lock's instead.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from tools.install.lock_file import read_lock

ROOT = Path(__file__).resolve().parents[2]
LOCK = ROOT / "requirements" / "gpu312.lock.txt"
TARGET = ("--python-version", "3.12", "--python-platform", "x86_64-manylinux_2_34")
INSTALLERS = ("pip", "uv")
"""In the lock without being a dependency of anything."""
HEADER = """\
# What `make install-gpu` puts into .venv: Python 3.12, Linux x86-64 with glibc 2.34 or newer, CUDA 13. Everything that
# SGLang and TransformerEngine declare is in it, without overrides. Written by `python -m tools.install.relock`.
"""


class RelockError(RuntimeError):
    """uv is not there or found no set of versions; the message holds its own words."""


def resolve(uv: str, root: Path, seed: Path, folder: Path) -> dict[str, str]:
    """Versions of all that the extras `gpu` and `dev` need; fetches metadata only.

    Args:
        uv: the program.
        root: where pyproject.toml lies.
        seed: lock whose versions are preferred where they are allowed.
        folder: an empty one.

    Raises:
        RelockError: there is no such set, or the package index does not answer.
    """
    pins = folder / "pins.txt"
    pins.write_text(lines(read_lock(seed)))
    command = [
        uv,
        "pip",
        "compile",
        *TARGET,
        "--quiet",
        str(root / "pyproject.toml"),
        "--extra",
        "gpu",
        "--extra",
        "dev",
    ]
    try:
        answer = subprocess.run(
            [*command, "--no-header", "--no-annotate", "--output-file", str(pins)], capture_output=True, text=True
        )
    except FileNotFoundError:
        raise RelockError(f"{uv}: there is no such program: pip install uv") from None
    if answer.returncode != 0:
        raise RelockError(answer.stderr.strip())
    return read_lock(pins)


def lines(pins: dict[str, str]) -> str:
    """The pins as a lock has them."""
    return "".join(f"{name}=={version}\n" for name, version in sorted(pins.items()))


def main() -> int:
    """Exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.install.relock", description=__doc__)
    parser.add_argument("--from", dest="seed", type=Path, default=LOCK, help="lock whose versions are preferred")
    parser.add_argument("--uv", default="uv", help="the program (default: from the PATH)")
    options = parser.parse_args()
    try:
        with tempfile.TemporaryDirectory() as folder:
            found = resolve(options.uv, ROOT, options.seed, Path(folder))
    except RelockError as error:
        print(error, file=sys.stderr)
        return 1
    installers = {name: version for name, version in read_lock(options.seed).items() if name in INSTALLERS}
    LOCK.write_text(HEADER + lines(found | installers))
    return 0


if __name__ == "__main__":
    sys.exit(main())
