"""The steps of `make install`: environment, packages, bytecode, project, check; all of them may be done again.

torch comes first and with its dependencies: whichever build pip's configuration leads to (a CPU wheel where one is
offered, else the CUDA build with the libraries it needs). Everything else follows from the lock of the running Python
with --no-deps, because sglang declares another torch and GPU packages that a CPU does without.

`make install-gpu` goes the same way with the lock of the GPU nodes, and builds TransformerEngine after the packages.
An environment stays of its kind: `make install` on one of `make install-gpu` keeps that one up to date.
"""

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tools.install import transformer_engine
from tools.install.lock_file import installed, read_lock, unfinished
from tools.install.package_installer import InstallError, PackageInstaller

ROOT = Path(__file__).resolve().parents[2]
STAMP = "megatron-dapo.json"
"""Says what an environment was made from; written first, and with `inputs` and `ready` at the end."""
LOCK = "install.lock"
"""Held by the install at work; there before anything else is."""
CHECK = Path(__file__).with_name("import_check.py")
PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"
GPU_PYTHON = "3.12"
GPU_MARKS = (Path("/dev/nvidia0"), Path("/proc/driver/nvidia/version"))
LATER = (
    r"/tests?/|/_vendor/|/site-packages/(beartype|fontTools|hypothesis|mypyc?|networkx|pandas|pip|torchgen|werkzeug)/"
    r"|/sglang/(multimodal_gen|test|srt/debug_utils)/|/openai/resources/|/torch/(testing|_inductor|_export)/"
    r"|/ray/(air|rllib|data|serve|tune|train|llm)/"
    r"|/sympy/(physics|plotting)/|/pygments/(lexers|styles)/|/numpy/distutils/|/huggingface_hub/inference/"
    r"|/transformers/models/(?!(?:auto|llama|qwen2|qwen3)/)"
)
"""Compiled on their first import like anything else, should they ever be imported: parts of large packages that a run
does not use, half of all code. (Of the 5900 files that a run imports, 200 are among them.)"""


class Installer:
    """Brings one environment to the state that lock and project ask for."""

    def __init__(
        self, root: Path, venv: Path, *, gpu: bool = False, engine: bool = True, torch_index: str = ""
    ) -> None:
        """`engine`: whether TransformerEngine is installed, where `gpu` is set."""
        self.root, self.venv, self.gpu, self.engine, self._torch_index = root, venv, gpu, engine, torch_index
        self.python = venv / "bin" / "python"
        self.site = venv / "lib" / f"python{PYTHON}" / "site-packages"
        self.lock = root / "requirements" / f"{'gpu' if gpu else 'py'}{PYTHON.replace('.', '')}.lock.txt"
        self._cuda_lock = root / "requirements" / "cuda.lock.txt"
        self._pins = read_lock(self.lock)
        self._scratch = venv / "tmp"
        self._wheels = venv / "wheels" / f"torch-{self._pins['torch']}"
        self._packages = PackageInstaller(self.python, self.stamp()["base"], self._scratch)
        self._step = 0

    def stamp(self) -> dict[str, Any]:
        """What this environment is made from; one whose stamp differs in these is made anew."""
        # In a virtual environment sys.executable is a link inside it; the base is what must be compared. Scripts hold
        # the path of their environment, so a moved or copied one does not work.
        base = getattr(sys, "_base_executable", None) or sys.executable
        return {"place": str(self.venv.resolve()), "base": str(Path(base).resolve()), "gpu": self.gpu}

    def inputs(self) -> str:
        """Hash of all that decides what is installed."""
        files = (self.lock, self._cuda_lock, self.root / "pyproject.toml", *self.root.glob("megatron_dapo/__init__.py"))
        content = b"\0".join(path.read_bytes() for path in files) + str(self.engine).encode()
        return hashlib.sha256(content).hexdigest()[:16]

    def install(self) -> None:
        """Do what is not done yet. Raises InstallError where a step fails; what is installed stays."""
        if not self.gpu and has_gpu():
            print("This machine has a GPU, and `make install` makes an environment for the CPU: it lacks SGLang's GPU")
            print(f"kernels and TransformerEngine. For GPUs: PYTHON=python{GPU_PYTHON} make install-gpu")
        if self._is_current():
            return
        begin = time.monotonic()
        self.venv.mkdir(parents=True, exist_ok=True)
        with exclusive(self.venv / LOCK):
            if self._is_current():  # the install that was waited for did it
                return
            self._clear()
            self._scratch.mkdir(exist_ok=True)
            stamp = self.stamp() | {"engine": self.engine}
            write_stamp(self.venv, stamp)
            self._say(f"environment of Python {sys.version.split()[0]}")
            print(f"  packages come by {self._packages.make_environment(self._pin('uv'))}", flush=True)
            self._install_packages()
            if self.gpu:
                self._install_engine()
            self._compile()
            self._say("project, editable")
            # Everything that building needs is in the lock, so this step works without a network.
            self._packages.install(
                "--no-index", "--no-deps", "--no-build-isolation", "--force-reinstall", "-e", str(self.root)
            )
            ready = self._check()
            shutil.rmtree(self._scratch)
            write_stamp(self.venv, stamp | {"inputs": self.inputs(), "ready": ready})
        print(f"{ready} (took {time.monotonic() - begin:.0f} s)")

    def _say(self, text: str) -> None:
        self._step += 1
        print(f"[{self._step}/{6 if self.gpu else 5}] {text}", flush=True)

    def _is_current(self) -> bool:
        stamp = read_stamp(self.venv)
        current = self._usable(stamp) and stamp.get("inputs") == self.inputs()
        if current:
            print(stamp["ready"])
        return current

    def _usable(self, stamp: dict[str, Any]) -> bool:
        wanted = self.stamp()
        return {key: stamp.get(key) for key in wanted} == wanted and self.python.exists()

    def _clear(self) -> None:
        """Remove an environment that cannot be used here, or the half packages of one that can."""
        venv, stamp = self.venv, read_stamp(self.venv)
        if stamp and not self._usable(stamp):
            print(f"{venv} was made for another place, Python or kind (from {stamp.get('base')}): making it anew")
            for path in venv.iterdir():
                if path.name != LOCK:
                    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        for info in unfinished(self.site):
            print(f"{info.name.removesuffix('.dist-info')} was left half installed: installing it again")
            shutil.rmtree(info)

    def _install_packages(self) -> None:
        self._say(f"torch, then the {len(self._pins)} packages of {self.lock.name}")
        if (
            self.gpu
            and self.engine
            and (lacking := transformer_engine.missing_tools())
            and not self._has_engine_wheel()
        ):
            raise InstallError(transformer_engine.refusal(lacking))  # gigabytes before the build would
        constraints = ["-c", str(self.lock), *([] if self.gpu else ["-c", str(self._cuda_lock)])]
        index = ["--extra-index-url", self._torch_index] if self._torch_index else []
        if index and "torch" in installed(self.site):
            print("TORCH_INDEX has no effect: torch is already installed (`make clean-venv install` starts over)")
        self._packages.install(self._pin("torch"), *constraints, *index)
        version = installed(self.site)["torch"]
        if self.gpu and "+cpu" in version:
            raise InstallError(
                f"torch {version} is a CPU build, a GPU node needs the CUDA build that PyPI has: unset TORCH_INDEX, "
                "take the folder or index with it out of `pip config list`, then make clean-venv install-gpu"
            )
        asked = self._scratch / self.lock.name
        asked.write_text(
            "".join(f"{self._pin(name)}\n" for name in self._pins if name not in transformer_engine.PACKAGES)
        )
        self._packages.install("--no-deps", "-r", str(asked))

    def _pin(self, name: str) -> str:
        return f"{name}=={self._pins[name]}" if name in self._pins else ""

    def _kept_wheel(self) -> Path | None:
        """The extension that an earlier install built."""
        return next(
            self._wheels.glob(f"transformer_engine_torch-{self._pins[transformer_engine.EXTENSION]}-*.whl"), None
        )

    def _has_engine_wheel(self) -> bool:
        wanted = ("--no-deps", "--only-binary", ":all:", self._pin(transformer_engine.EXTENSION))
        return self._kept_wheel() is not None or self._packages.finds(*wanted)

    def _install_engine(self) -> None:
        pins = [self._pin(name) for name in transformer_engine.PACKAGES]
        if not self.engine:
            self._say(f"TransformerEngine is left out: {transformer_engine.LOST}")
            # Half of it would make `import megatron.core` fail, so all of it goes.
            self._packages.uninstall(*transformer_engine.PACKAGES)
            return
        self._say("TransformerEngine; its torch extension is built here where no wheel of it is found: 25 core minutes")
        if not self._has_engine_wheel():
            variables = transformer_engine.build_variables(self.python, self.site, os.environ)
            try:
                self._packages.build(pins[0], self._wheels, variables)
            except InstallError as error:
                raise InstallError(
                    f"{error}\nFewer compilers at a time need less memory: MAX_JOBS=1 make install-gpu"
                ) from None
        if wheel := self._kept_wheel():
            pins[0] = str(wheel)
            print(f"  the built wheel is kept in {os.path.relpath(wheel.parent)}")
        self._packages.install("--no-deps", "--force-reinstall", "--only-binary", ":all:", *pins)

    def _compile(self) -> None:
        cores = len(os.sched_getaffinity(0))
        self._say(f"byte-compile, on {cores} cores: else every process would do it again at its start")
        python = (str(self.python), "-I", "-m", "compileall", "-q", "-j", str(cores), "-x", LATER)
        done = self._packages.call(*python, str(self.site), must=False, stdout=subprocess.PIPE)
        # It ends with 1 for files that are no valid Python, too (templates, other Pythons' syntax).
        if done.returncode not in (0, 1) or "No space left on device" in done.stdout:
            raise InstallError(f"{done.stdout[-2000:]}\nbyte-compilation failed")

    def _check(self) -> str:
        self._say("import the packages")
        kind = [*(["gpu"] if self.gpu else []), *(["engine"] if self.engine else [])]
        done = self._packages.call(str(self.python), "-I", str(CHECK), *kind, must=False, stdout=subprocess.PIPE)
        if done.returncode:
            raise InstallError(f"{done.stdout[-2000:]}\nthe packages do not import (status {done.returncode})")
        failed, untried, versions = json.loads(done.stdout.splitlines()[-1])
        if failed:
            anew = f"`make clean-venv install{'-gpu' if self.gpu else ''}` makes the environment anew"
            lines = [f"  {name}: {why}" for name, why in failed]
            raise InstallError("\n".join(["these packages do not work:", *lines, anew]))
        shown = ", ".join(f"{name} {version}" for name, version in versions.items())
        ready = f"{os.path.relpath(self.venv)} is ready: Python {sys.version.split()[0]}, {shown}"
        if self.gpu and not self.engine:
            ready += "; without TransformerEngine"
        if untried:
            ready += f"; this machine has no GPU driver, so a GPU node must still import {', '.join(untried)}"
        return ready


def has_gpu() -> bool:
    """Whether an NVIDIA driver runs here."""
    return shutil.which("nvidia-smi") is not None or any(mark.exists() for mark in GPU_MARKS)


def read_stamp(venv: Path) -> dict[str, Any]:
    """What `venv` was made from; empty where there is no environment yet.

    Raises:
        InstallError: the folder was not made by this installer, which then leaves it alone.
    """
    try:
        return dict(json.loads((venv / STAMP).read_text()))
    except FileNotFoundError:
        if venv.exists() and any(venv.iterdir()) and not (venv / LOCK).exists():
            raise InstallError(
                f"{venv} was not made by `make install`, so it is left alone: move it away, or name another place by "
                "VENV=path make install"
            ) from None
        return {}
    except ValueError:
        return {"base": "an unreadable stamp"}  # known to be ours, so made anew


def write_stamp(venv: Path, stamp: dict[str, Any]) -> None:
    """Write the stamp whole or not at all."""
    draft = venv / f"{STAMP}.draft"
    draft.write_text(json.dumps(stamp, indent=1) + "\n")
    draft.replace(venv / STAMP)


@contextlib.contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Hold the lock file at `path`, after the install that holds it now."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"another `make install` works on {path.parent}: waiting for it", flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def installer_of(root: Path, venv: Path, *, gpu: bool, engine: bool = True, torch_index: str = "") -> Installer:
    """What to install at `venv`; an environment of `make install-gpu` that is asked for by `make install` stays one.

    Raises:
        InstallError: GPU nodes' packages are asked for and this Python has no lock for them.
    """
    done = read_stamp(venv)
    if not gpu and done.get("gpu"):
        gpu, engine = True, done.get("engine", True)
    if gpu and PYTHON != GPU_PYTHON:
        raise InstallError(
            f"the GPU packages are locked for Python {GPU_PYTHON}, this is {sys.version.split()[0]}: "
            f"PYTHON=python{GPU_PYTHON} make install-gpu"
        )
    return Installer(root, venv, gpu=gpu, engine=engine, torch_index=torch_index)


def main(arguments: list[str]) -> int:
    """Exit status: 0 installed, 1 failed (the reason is on standard error), 130 interrupted."""
    parser = argparse.ArgumentParser(prog="python -m tools.install", description=__doc__)
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="where the environment goes")
    parser.add_argument("--gpu", action="store_true", help="for GPU nodes (make install-gpu)")
    parser.add_argument(
        "--without-te", action="store_true", help=f"leave TransformerEngine out: {transformer_engine.LOST}"
    )
    options = parser.parse_args(arguments)
    command = "make install-gpu" if options.gpu else "make install"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        if sys.platform != "linux":
            raise InstallError(f"the locks are for Linux, this is {sys.platform}: use a Linux machine or container")
        index, venv = os.environ.get("TORCH_INDEX", ""), options.venv.absolute()
        installer_of(ROOT, venv, gpu=options.gpu, engine=not options.without_te, torch_index=index).install()
    except (InstallError, OSError) as error:
        # An OSError is the machine's own: a full disk, no permission; it names the file.
        print(f"\n{command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"\n{command}: interrupted; what is installed stays, `{command}` goes on from here", file=sys.stderr)
        return 130
    return 0
