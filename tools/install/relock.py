"""Writes the lock of the GPU environment anew: `python -m tools.install.relock`, with uv on the PATH (pip install uv).

uv resolves pyproject's extras `gpu` and `dev` for Python 3.12 with every package's own declarations and no overrides.
The versions of the old lock stay where they still fit; `--from requirements/py312.lock.txt` keeps that lock's instead.
"""

import argparse
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from tools.install.lock import Pins, read_lock

ROOT = Path(__file__).resolve().parents[2]
LOCK = "gpu312.lock.txt"
TARGET = ("--python-version", "3.12", "--python-platform", "x86_64-manylinux_2_34", "--quiet")
HEADER = """\
# What `make install-gpu` puts into .venv: Python 3.12, Linux x86-64 with glibc 2.34 or newer, CUDA 13. Everything that
# SGLang and TransformerEngine declare is in it, without overrides. Written by `python -m tools.install.relock`; the
# sizes are those of the wheels, and the progress bar uses them.
"""


class RelockError(RuntimeError):
    """uv is not there or found no set of versions; the message holds its own words."""


def resolve(uv: str, root: Path, seed: Path, folder: Path) -> Path:
    """Pins of all that the extras `gpu` and `dev` need, in a new file in `folder`; fetches metadata only.

    Args:
        uv: the program.
        root: where pyproject.toml lies.
        seed: lock whose versions are preferred where they are allowed.
        folder: an empty one.

    Raises:
        RelockError: there is no such set, or the package index does not answer.
    """
    pins = folder / "pins.txt"
    pins.write_text("".join(f"{pin.name}=={pin.version}\n" for pin in read_lock(seed).values()))
    extras = ("--extra", "gpu", "--extra", "dev")
    _uv(uv, str(root / "pyproject.toml"), *extras, "--no-header", "--no-annotate", "--output-file", str(pins))
    return pins


def megabytes(uv: str, pins: Path) -> dict[str, float]:
    """Size of each pinned package's wheel, or of its source where it has no wheel."""
    full = pins.with_name("pylock.sizes.toml")
    _uv(uv, str(pins), "--no-deps", "--format", "pylock.toml", "--output-file", str(full))
    packages = tomllib.loads(full.read_text())["packages"]
    return {p["name"]: max(file["size"] for file in p.get("wheels") or [p["sdist"]]) / 1e6 for p in packages}


def lock_text(pins: Pins, sizes: dict[str, float]) -> str:
    """The lock file."""
    lines = [f"{pin.name}=={pin.version}" for _, pin in sorted(pins.items())]
    comments = [f"  # {sizes[name]:.0f} MB" if sizes.get(name, 0) >= 1 else "" for name in sorted(pins)]
    return HEADER + "".join(f"{line}{comment}\n" for line, comment in zip(lines, comments, strict=True))


def _uv(uv: str, *arguments: str) -> None:
    try:
        answer = subprocess.run([uv, "pip", "compile", *TARGET, *arguments], capture_output=True, text=True)
    except FileNotFoundError:
        raise RelockError(f"{uv}: there is no such program: pip install uv") from None
    if answer.returncode != 0:
        raise RelockError(answer.stderr.strip())


def main() -> int:
    """Exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.install.relock", description=__doc__)
    lock = ROOT / "requirements" / LOCK
    parser.add_argument("--from", dest="seed", type=Path, default=lock, help="lock whose versions are preferred")
    parser.add_argument("--uv", default="uv", help="the program (default: from the PATH)")
    options = parser.parse_args()
    try:
        with tempfile.TemporaryDirectory() as folder:
            pins = resolve(options.uv, ROOT, options.seed, Path(folder))
            # The installer's own pip is no dependency of anything.
            pip = read_lock(options.seed)["pip"]
            with pins.open("a") as file:
                file.write(f"pip=={pip.version}\n")
            lock.write_text(lock_text(read_lock(pins), megabytes(options.uv, pins)))
    except RelockError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
