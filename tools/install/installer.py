"""The steps of `make install`: environment, packages, bytecode, project, check; all of them may be done again.

torch comes first and with its dependencies: whichever build pip's configuration leads to (a CPU wheel where one is
offered, else the CUDA build with the libraries it needs). Everything else follows from the lock of the running Python
with --no-deps, because sglang declares another torch and GPU packages that a CPU does without.

`make install-gpu` goes the same way with the lock of the GPU nodes, and builds TransformerEngine after the packages.
An environment stays of its kind: `make install` on one of `make install-gpu` keeps that one up to date.
"""

import argparse
import ast
import fcntl
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, TextIO

from tools.install import transformer_engine

ROOT = Path(__file__).resolve().parents[2]
STAMP = "megatron-dapo.json"
"""Says what an environment was made from; written first, and with `inputs` and `ready` at the end."""
LOCK = "install.lock"
"""Held by the install at work; there before anything else is."""
CHECK = Path(__file__).with_name("import_check.py")
PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"
GPU_PYTHON = "3.12"
GPU_MARK = Path("/proc/driver/nvidia/version")
LATER = (
    r"/(tests?|testing|_inductor|_vendor|multimodal_gen|beartype|fontTools|hypothesis|mypyc?|networkx|pandas|pip|torchgen)/"
    r"|/ray/(data|rllib|serve|train|tune)/|/(lexers|physics)/|/transformers/models/(?!(?:auto|llama|qwen2|qwen3)/)"
)
"""Compiled on their first import like anything else, should they ever be imported: parts of large packages that a run
does not use, half of all code."""

_ASTRAY = ("PIP_TARGET", "PIP_PREFIX", "PIP_USER", "UV_SYSTEM_PYTHON")
"""Variables of the caller that would lead pip or uv to another place; so would PYTHON*."""
_SHARED = "index-url|extra-index-url|find-links|no-index|trusted-host|cert"
"""Options of pip that `uv pip` knows by the same names."""


class InstallError(RuntimeError):
    """The install cannot go on. The message says what failed, why, and what to do."""


class Installer:
    """Brings one environment to the state that lock and project ask for."""

    def __init__(self, root: Path, venv: Path, *, gpu: bool = False, engine: bool = True) -> None:
        """An environment of `make install-gpu` that is asked for by `make install` stays one.

        `engine`: whether TransformerEngine is installed, where `gpu` is set.

        Raises:
            InstallError: GPU nodes' packages are asked for and this Python has no lock for them.
        """
        self.root, self.venv = root, venv
        done = self._stamp()
        self.gpu = gpu or done.get("gpu", False)
        self.engine = engine if gpu else done.get("engine", True)
        if self.gpu and PYTHON != GPU_PYTHON:
            raise InstallError(f"the GPU lock is for another Python: PYTHON=python{GPU_PYTHON} make install-gpu")
        # In a virtual environment sys.executable is a link inside it; the base is what must be compared. Scripts hold
        # the path of their environment, so a moved or copied one does not work.
        base = str(Path(getattr(sys, "_base_executable", None) or sys.executable).resolve())
        kind = {"gpu": self.gpu, "engine": self.engine}
        self.made_from: dict[str, Any] = {"place": str(venv.resolve()), "base": base, **kind}
        self.site = venv / "lib" / f"python{PYTHON}" / "site-packages"
        self.lock = root / "requirements" / f"{'gpu' if self.gpu else 'py'}{PYTHON.replace('.', '')}.lock.txt"
        self._cuda_lock = self.lock.with_name("cuda.lock.txt")
        self._pins = {name: f"{name}=={version}" for name, version in read_lock(self.lock).items()}
        self._wheels = venv / "wheels" / self._pins["torch"].replace("==", "-")
        self._python = str(venv / "bin" / "python")
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", *_ASTRAY))}
        self._environment = kept | {"PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        # For the verbs that uv lacks. -I: neither this folder's packages nor PYTHON* variables reach it.
        self._pip = (self._python, "-I", "-m", "pip")
        self._installer: tuple[str, ...] = (*self._pip, "install", "--no-compile")

    def _stamp(self) -> dict[str, Any]:
        """What the environment was made from; empty where there is none, or it is half written."""
        stamp = self.venv / STAMP
        return dict(json.loads(stamp.read_text() or "{}")) if stamp.exists() else {}

    def _inputs(self) -> str:
        """Hash of all that decides what is installed."""
        files = (self.lock, self._cuda_lock, self.root / "pyproject.toml", *self.root.glob("megatron_dapo/__init__.py"))
        return hashlib.sha256(b"\0".join(path.read_bytes() for path in files)).hexdigest()[:16]

    def install(self) -> None:
        """Do what is not done yet. Raises InstallError where a step fails; what is installed stays."""
        if not self.gpu and GPU_MARK.exists():
            print(f"this environment is for CPUs; for this machine's GPU: PYTHON=python{GPU_PYTHON} make install-gpu")
        if self._is_current():
            return
        self.venv.mkdir(parents=True, exist_ok=True)
        if any(self.venv.iterdir()) and not (self.venv / LOCK).exists():
            raise InstallError(f"{self.venv} was not made by `make install`: move it away, or VENV=path make install")
        with exclusive(self.venv / LOCK):
            if self._is_current():  # the install that was waited for did it
                return
            self._clear()
            (self.venv / STAMP).write_text(json.dumps(self.made_from))
            say(f"environment of Python {sys.version.split()[0]}")
            self._call(self.made_from["base"], "-m", "venv", "--prompt", "megatron-dapo", str(self.venv))
            self._find_uv()
            self._install_packages()
            if self.gpu and self.engine:
                self._install_engine()
            say("byte-compile: else every process would do it again at its start")
            # It ends with 1 for files that are no valid Python, too (templates, other Pythons' syntax).
            compiling = (self._python, "-I", "-m", "compileall", "-qq", "-j", "0", "-x", LATER, str(self.site))
            self._call(*compiling, must=False)
            say("project, editable")
            # Everything that building needs is in the lock, so this step works without a network.
            self._call(*self._installer, "--no-deps", "--no-build-isolation", "--force-reinstall", "-e", str(self.root))
            say("import the packages")
            kind = [name for name in ("gpu", "engine") if self.made_from[name]]
            self._call(self._python, "-I", "-W", "ignore", str(CHECK), *kind)
            (self.venv / STAMP).write_text(json.dumps(self.made_from | {"inputs": self._inputs()}))
        print(f"{os.path.relpath(self.venv)} is ready")

    def _is_current(self) -> bool:
        stamp = self._stamp()
        current = self._is_usable(stamp) and stamp.get("inputs") == self._inputs()
        if current:
            print(f"{os.path.relpath(self.venv)} is ready")
        return current

    def _is_usable(self, stamp: dict[str, Any]) -> bool:
        """Whether what is there was made for this place, Python and kind."""
        return self.made_from.items() <= stamp.items() and Path(self._python).exists()

    def _clear(self) -> None:
        """Remove an environment that cannot be used here, or the half packages of one that can."""
        stamp = self._stamp()
        if stamp and not self._is_usable(stamp):
            print(f"{self.venv} was made for another place, Python or kind (from {stamp.get('base')}): making it anew")
            for path in self.venv.iterdir():
                if path.name not in (LOCK, "wheels"):
                    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        # uv and pip would take them for installed packages. Both write INSTALLER after every file of the package.
        for info in self.site.glob("*.dist-info"):
            if not (info / "INSTALLER").exists():
                print(f"{info.name.removesuffix('.dist-info')} was left half installed: installing it again")
                shutil.rmtree(info)

    def _find_uv(self) -> None:
        """From the package index into the environment; without it pip installs."""
        fetch = (*self._pip, "install", "--no-deps", "--retries", "1", "-c", str(self.lock), "uv")
        if self._call(*fetch, must=False, capture_output=True).returncode:
            say("uv cannot be had, so pip installs")
            return
        config = self._call(*self._pip, "config", "list", stdout=subprocess.PIPE).stdout
        self._installer = (f"{self.venv}/bin/uv", "pip", "install", "--python", self._python, *uv_options(config))
        if proxy := re.search(r"^[\w:]+\.proxy='(.+)'", config, re.MULTILINE):
            self._environment["ALL_PROXY"] = proxy[1]

    def _call(self, *command: str, must: bool = True, **options: Any) -> "subprocess.CompletedProcess[str]":
        """Run a command, its output on the terminal. Raises InstallError where it `must` not fail and does."""
        done = subprocess.run(command, env=self._environment, stdin=subprocess.DEVNULL, text=True, **options)
        if must and done.returncode:
            raise InstallError(
                f"`{' '.join(command)[:200]}` failed, see above. What is installed stays: `make` goes on from here.\n"
                "After a failed download check the network, and index and proxy in `pip config list`; or make room on "
                "the disk. The locks are for Linux x86-64 with glibc 2.34 or newer."
            )
        return done

    def _install_packages(self) -> None:
        say(f"torch, then the {len(self._pins)} packages of {self.lock.name}")
        if self.gpu and self.engine:  # what a build needs is missed gigabytes before it begins
            wheel = self._engine_wheel("--only-binary", ":all:", must=False, capture_output=True)
            if wheel is None and (lacking := transformer_engine.missing_tools()):
                raise InstallError(transformer_engine.REFUSAL.format("\n  ".join(lacking)))
        bounds = ("-c", str(self.lock), *(() if self.gpu else ("-c", str(self._cuda_lock))))
        self._call(*self._installer, self._pins["torch"], *bounds)
        if self.gpu and any(self.site.glob("torch-*+cpu.dist-info")):
            raise InstallError(
                "torch is a CPU build: unset TORCH_INDEX (`pip config list`), make clean-venv install-gpu"
            )
        others = (pin for name, pin in self._pins.items() if name not in transformer_engine.PACKAGES)
        self._call(*self._installer, "--no-deps", *others)

    def _engine_wheel(self, *options: str, **how: Any) -> Path | None:
        """The extension: of an earlier install, else what `pip wheel` finds or builds."""
        pin = self._pins[transformer_engine.EXTENSION]
        found = f"{pin.replace('-', '_').replace('==', '-')}-*.whl"
        if not any(self._wheels.glob(found)):
            # A built wheel in pip's cache may have been built against another torch.
            options += ("--no-cache-dir", "--no-deps", "--no-build-isolation", "--wheel-dir", str(self._wheels))
            self._call(*self._pip, "wheel", *options, pin, **how)
        return next(self._wheels.glob(found), None)

    def _install_engine(self) -> None:
        say("TransformerEngine; without a wheel of its torch extension, that is built: 25 core minutes")
        say("if memory runs out, MAX_JOBS=1 make install-gpu")
        self._environment |= transformer_engine.build_variables(self._python, self.site)
        wheel = self._engine_wheel("-v")
        others = (self._pins[name] for name in transformer_engine.PACKAGES[1:])
        self._call(*self._installer, "--no-deps", "--force-reinstall", "--only-binary", ":all:", str(wheel), *others)


def say(text: str) -> None:
    """A step, before the output of what it runs."""
    print(f"== {text}", flush=True)


def read_lock(path: Path) -> dict[str, str]:
    """Versions by name, of lines `name==version`."""
    return dict(re.findall(r"^([\w.-]+)==([^\s;#]+)", path.read_text(), re.MULTILINE))


def uv_options(pip_config: str) -> tuple[str, ...]:
    """uv's options for what pip was told: by its files, and by PIP_* variables, which are stronger.

    Args:
        pip_config: what `pip config list` printed: a line `section.option='value'` each.
    """
    options = {"": ["--index-strategy=unsafe-best-match"]}  # as pip: the best version of all indexes
    for section in ("global", "install", ":env:"):
        for name, value in re.findall(rf"^{section}\.({_SHARED})=(.+)$", pip_config, re.MULTILINE):
            words = str(ast.literal_eval(value)).split()
            options[name] = ["--no-index"] if name == "no-index" else [f"--{name}={word}" for word in words]
    return tuple(word for words in options.values() for word in words)


def exclusive(path: Path) -> TextIO:
    """The lock file at `path`, held until it is closed; waits for the install that holds it now."""
    file = path.open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print(f"another `make install` works on {path.parent}: waiting for it", flush=True)
        fcntl.flock(file, fcntl.LOCK_EX)
    return file


def main(arguments: list[str]) -> int:
    """Exit status: 0 installed, 1 failed (the reason is on standard error), 130 interrupted."""
    parser = argparse.ArgumentParser(prog="python -m tools.install", description=__doc__)
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="where the environment goes")
    parser.add_argument("--gpu", action="store_true", help="for GPU nodes (make install-gpu)")
    parser.add_argument("--without-te", action="store_true", help="with --gpu: no TransformerEngine")
    options = parser.parse_args(arguments)
    command = "make install-gpu" if options.gpu else "make install"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        Installer(ROOT, options.venv.absolute(), gpu=options.gpu, engine=not options.without_te).install()
    except (InstallError, OSError) as error:
        # An OSError is the machine's own: a full disk, no permission; it names the file.
        print(f"\n{command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"\n{command}: interrupted; what is installed stays, `{command}` goes on from here", file=sys.stderr)
        return 130
    return 0
