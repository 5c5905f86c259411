"""Byte-compile the environment once, on all cores: without it every start of every process takes 3 times as long."""

import os
import re
from pathlib import Path

from tools.install.command import InstallError, run
from tools.install.pip import advice
from tools.install.progress import Progress

# Compiled on their first import like anything else, should they ever be imported: the packages' own tests, and parts of
# large packages that this project does not use. They are a third of all source code. (Of the 5900 modules that a server
# imports, 15 are among them.)
LATER = re.compile(
    r"/tests?/|/sglang/multimodal_gen/|/ray/(rllib|data|serve|tune|train|llm)/|/torch/testing/"
    r"|/transformers/models/(?!(?:auto|llama|qwen2|qwen3)/)[^/]+/"
    r"(modeling|modular|convert|image_processing|processing|video_processing|feature_extraction)_"
)
FILES_PER_S = 250.0
"""A core's rate, for the time left until the phase has measured its own."""
SETTLED = 1000
"""So many files into the phase, its own rate outweighs the assumed one."""


def compile_packages(python: Path, site: Path, *, progress: Progress, scratch: Path, log: Path) -> int:
    """Compile what is not compiled yet below `site`; returns how many files that was.

    A file that is no valid Python (templates, other Pythons' syntax) is passed over, as pip does.

    Raises:
        InstallError: the disk is full, or the compiler itself failed.
    """
    waiting = uncompiled(site)
    if not waiting:
        return 0
    cores = len(os.sched_getaffinity(0))
    done = 0

    def on_line(line: str) -> None:
        nonlocal done
        done += line.startswith("Compiling ")

    def on_tick() -> None:
        # The assumed rate counts like SETTLED files, so that a slow first second does not look like an hour left.
        rate = (done + SETTLED) / (progress.elapsed + SETTLED / (FILES_PER_S * cores))
        progress.show(f"{done} of {waiting} files", left_s=max((waiting - done) / rate, 0.5))

    command = [str(python), "-I", "-u", "-m", "compileall", "-j", str(cores), "-x", LATER.pattern, str(site)]
    status, lines = run(command, scratch=scratch, log=log, on_line=on_line, on_tick=on_tick)
    # compileall ends with 1 for files that are no valid Python, too.
    if status not in (0, 1) or any("No space left on device" in line for line in lines):
        raise InstallError(advice(lines, status, log=log))
    return waiting


def uncompiled(site: Path) -> int:
    """Number of files below `site` that are to be compiled now and are not."""
    tag = f".cpython-{site.parent.name.removeprefix('python').replace('.', '')}.pyc"
    count = 0
    for folder, subfolders, names in os.walk(site):
        if "__pycache__" in subfolders:
            subfolders.remove("__pycache__")
        present = set(os.listdir(f"{folder}/__pycache__")) if os.path.isdir(f"{folder}/__pycache__") else set()
        for name in names:
            if name.endswith(".py") and name.removesuffix(".py") + tag not in present:
                count += LATER.search(f"{folder}/{name}") is None
    return count
