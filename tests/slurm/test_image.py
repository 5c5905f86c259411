"""The Dockerfile names what the locks, the installer and the batch script need. No image is built here."""

import re
import subprocess
from pathlib import Path

from tools.install.installer import GPU_PYTHON, read_lock

ROOT = Path(__file__).parents[2]
LINES = [
    line for line in (ROOT / "Dockerfile").read_text().replace("\\\n", " ").splitlines() if line[:1] not in ("", "#")
]


def words(instruction: str) -> list[str]:
    """All that follows it in the Dockerfile."""
    return [word for line in LINES if line.startswith(f"{instruction} ") for word in line.split()[1:]]


def test_cuda_and_python_are_the_locks():
    lock = read_lock(ROOT / "requirements" / f"gpu{GPU_PYTHON.replace('.', '')}.lock.txt")
    assert words("FROM") == [f"nvidia/cuda:{lock['cuda-toolkit']}-devel-ubuntu24.04"]
    assert {f"python{GPU_PYTHON}-dev", f"python{GPU_PYTHON}-venv", "g++", "make"} <= set(words("RUN"))
    assert f"PYTHON=python{GPU_PYTHON} make install-gpu" in " ".join(words("RUN"))


def test_python_is_that_of_the_environment():
    """The batch script starts `python` in a container."""
    (folder,) = words("WORKDIR")
    assert words("ENV") == [f"PATH={folder}/.venv/bin:$PATH"]


def test_nothing_that_git_holds_is_left_out_of_the_image():
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert ".venv*" in ignored
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    tops = {name.split("/")[0] for name in tracked}
    patterns = [re.compile(re.escape(one).replace(r"\*", "[^/]*")) for one in ignored if "**" not in one]
    assert not [name for name in tops if any(pattern.fullmatch(name) for pattern in patterns)]
