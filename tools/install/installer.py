"""The steps of `make install`: environment, packages, bytecode, project, check; all of them may be done again.

torch comes first and with its dependencies: whichever build pip's configuration leads to (a CPU wheel where one is
offered, else the CUDA build with the libraries it needs). Everything else follows from the lock of the running Python
with --no-deps, because sglang declares another torch and GPU packages that a CPU does without.

`make install-gpu` goes the same way with the lock of the GPU nodes, and builds TransformerEngine after the packages.
An environment stays of its kind: `make install` on one of `make install-gpu` keeps that one up to date.
"""

import argparse
import ast
import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
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
    r"/tests?/|/_vendor/|/site-packages/(beartype|fontTools|hypothesis|mypyc?|networkx|pandas|pip|torchgen|werkzeug)/"
    r"|/sglang/(multimodal_gen|test|srt/debug_utils)/|/openai/resources/|/torch/(testing|_inductor|_export)/"
    r"|/ray/(air|rllib|data|serve|tune|train|llm)/"
    r"|/sympy/(physics|plotting)/|/pygments/(lexers|styles)/|/numpy/distutils/|/huggingface_hub/inference/"
    r"|/transformers/models/(?!(?:auto|llama|qwen2|qwen3)/)"
)
"""Compiled on their first import like anything else, should they ever be imported: parts of large packages that a run
does not use, half of all code. (Of the 5900 files that a run imports, 200 are among them.)"""

_ASTRAY = {"PYTHONDONTWRITEBYTECODE", "PYTHONPATH", "PYTHONHOME", "PIP_TARGET", "PIP_PREFIX", "PIP_USER", "UV_PYTHON"}
_ASTRAY |= {"UV_SYSTEM_PYTHON"}
"""Variables of the caller that would lead pip, uv or Python to another place."""
_UV_NAMES = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "cert": "SSL_CERT_FILE",
    "proxy": "ALL_PROXY",
    "trusted-host": "UV_INSECURE_HOST",
    "timeout": "UV_HTTP_TIMEOUT",
    "no-index": "UV_NO_INDEX",  # ours, for --no-index
}
"""pip's option to the variable by which uv takes the same."""


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
            raise InstallError(
                f"the GPU packages are locked for Python {GPU_PYTHON}, this is {sys.version.split()[0]}: "
                f"PYTHON=python{GPU_PYTHON} make install-gpu"
            )
        # In a virtual environment sys.executable is a link inside it; the base is what must be compared. Scripts hold
        # the path of their environment, so a moved or copied one does not work.
        base = str(Path(getattr(sys, "_base_executable", None) or sys.executable).resolve())
        self.made_from: dict[str, Any] = {"place": str(venv.resolve()), "base": base, "gpu": self.gpu}
        self.site = venv / "lib" / f"python{PYTHON}" / "site-packages"
        self.lock = root / "requirements" / f"{'gpu' if self.gpu else 'py'}{PYTHON.replace('.', '')}.lock.txt"
        self._cuda_lock = self.lock.with_name("cuda.lock.txt")
        self._pins = read_lock(self.lock)
        self._wheels = venv / "wheels" / f"torch-{self._pins['torch']}"
        self._python = str(venv / "bin" / "python")
        kept = {key: value for key, value in os.environ.items() if key not in _ASTRAY}
        quiet = {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}
        # /tmp is often small or in memory, and pip unpacks gigabytes.
        self._environment = kept | quiet | {"TMPDIR": str(venv / "tmp")}
        # For the verbs that uv lacks. -I: neither this folder's packages nor PYTHON* variables reach it.
        self._pip = (self._python, "-I", "-m", "pip")
        self._installer: tuple[str, ...] = (*self._pip, "install", "--no-compile")
        self._step = 0

    def _stamp(self) -> dict[str, Any]:
        """What the environment was made from; empty where there is none, or it is half written."""
        with contextlib.suppress(FileNotFoundError, ValueError):
            return dict(json.loads((self.venv / STAMP).read_text()))
        return {}

    def inputs(self) -> str:
        """Hash of all that decides what is installed."""
        files = (self.lock, self._cuda_lock, self.root / "pyproject.toml", *self.root.glob("megatron_dapo/__init__.py"))
        content = b"\0".join(path.read_bytes() for path in files) + str(self.engine).encode()
        return hashlib.sha256(content).hexdigest()[:16]

    def install(self) -> None:
        """Do what is not done yet. Raises InstallError where a step fails; what is installed stays."""
        if not self.gpu and GPU_MARK.exists():
            print("This environment is for the CPU, without GPU kernels and TransformerEngine. For this machine's GPU:")
            print(f"  PYTHON=python{GPU_PYTHON} make install-gpu")
        if self._is_current():
            return
        begin = time.monotonic()
        self.venv.mkdir(parents=True, exist_ok=True)
        if any(self.venv.iterdir()) and not (self.venv / LOCK).exists():
            raise InstallError(
                f"{self.venv} was not made by `make install`, so it is left alone: move it away, or name another place "
                "by VENV=path make install"
            )
        with exclusive(self.venv / LOCK):
            if self._is_current():  # the install that was waited for did it
                return
            self._clear()
            (self.venv / "tmp").mkdir(exist_ok=True)
            stamp = self.made_from | {"engine": self.engine}
            (self.venv / STAMP).write_text(json.dumps(stamp))
            self._say(f"environment of Python {sys.version.split()[0]}")
            self._call(self.made_from["base"], "-m", "venv", "--prompt", "megatron-dapo", str(self.venv))
            self._find_uv()
            self._install_packages()
            if self.gpu:
                self._install_engine()
            self._compile()
            self._say("project, editable")
            # Everything that building needs is in the lock, so this step works without a network.
            self._install("--no-deps", "--no-build-isolation", "--force-reinstall", "-e", str(self.root))
            ready = self._check()
            shutil.rmtree(self.venv / "tmp")
            (self.venv / STAMP).write_text(json.dumps(stamp | {"inputs": self.inputs(), "ready": ready}))
        print(f"{ready} (took {time.monotonic() - begin:.0f} s)")

    def _say(self, text: str) -> None:
        self._step += 1
        print(f"[{self._step}/{6 if self.gpu else 5}] {text}", flush=True)

    def _is_current(self) -> bool:
        stamp = self._stamp()
        current = self._is_usable(stamp) and stamp.get("inputs") == self.inputs()
        if current:
            print(stamp["ready"])
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
                if path.name != LOCK:
                    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        # uv and pip would take them for installed packages. Both write INSTALLER after every file of the package.
        for info in self.site.glob("*.dist-info"):
            if not (info / "INSTALLER").exists() or not (info / "RECORD").exists():
                print(f"{info.name.removesuffix('.dist-info')} was left half installed: installing it again")
                shutil.rmtree(info)

    def _find_uv(self) -> None:
        """In the environment, on the PATH, or in the package index; without it pip installs."""
        own = str(self.venv / "bin" / "uv")
        uv = own if Path(own).exists() else shutil.which("uv")
        if uv is None:
            fetch = (*self._pip, "install", "--quiet", "--no-deps", "--retries", "1", "-c", str(self.lock), "uv")
            uv = None if self._call(*fetch, must=False, capture_output=True).returncode else own
        print(f"  packages come by {'uv' if uv else 'pip, for uv cannot be had'}", flush=True)
        if uv:
            config = self._call(*self._pip, "config", "list", stdout=subprocess.PIPE)
            self._environment = uv_variables(config.stdout) | self._environment
            offline = ("--no-index",) if self._environment.get("UV_NO_INDEX") else ()
            self._installer = (uv, "pip", "install", "--python", self._python, *offline)

    def _install(self, *arguments: str) -> None:
        """`pip install ARGUMENTS`."""
        self._call(*self._installer, *arguments)

    def _call(self, *command: str, must: bool = True, **options: Any) -> "subprocess.CompletedProcess[str]":
        """Run a command, its output on the terminal. Raises InstallError where it `must` not fail and does."""
        done = subprocess.run(command, env=self._environment, stdin=subprocess.DEVNULL, text=True, **options)
        if must and done.returncode:
            raise InstallError(
                f"`{' '.join(command)[:200]}` ended with status {done.returncode}; what it said stands above. What is "
                "installed stays: the same command goes on from here.\nIf a download failed, check the network, and "
                "index and proxy in `pip config list`; if the disk is full, make room. The locks are for Linux x86-64 "
                "with glibc 2.34 or newer."
            )
        return done

    def _install_packages(self) -> None:
        self._say(f"torch, then the {len(self._pins)} packages of {self.lock.name}")
        if self.gpu and self.engine:  # what a build needs is missed gigabytes before it begins
            wheel = self._engine_wheel("--only-binary", ":all:", must=False, capture_output=True)
            if wheel is None and (lacking := transformer_engine.missing_tools()):
                raise InstallError(transformer_engine.REFUSAL.format("\n  ".join(lacking)))
        constraints = ["-c", str(self.lock), *([] if self.gpu else ["-c", str(self._cuda_lock)])]
        if index := os.environ.get("TORCH_INDEX"):
            constraints += ["--extra-index-url", index]
            if any(self.site.glob("torch-*.dist-info")):
                print("TORCH_INDEX has no effect: torch is already installed (`make clean-venv install` starts over)")
        self._install(self._pin("torch"), *constraints)
        if self.gpu and (build := next(self.site.glob("torch-*+cpu.dist-info"), None)):
            raise InstallError(
                f"{build.stem} is a CPU build: unset TORCH_INDEX, or take the folder or index that has it out of "
                "`pip config list`, then make clean-venv install-gpu"
            )
        others = [self._pin(name) for name in self._pins if name not in transformer_engine.PACKAGES]
        self._install("--no-deps", *others)

    def _pin(self, name: str) -> str:
        return f"{name}=={self._pins[name]}"

    def _engine_wheel(self, *options: str, **how: Any) -> Path | None:
        """The extension: of an earlier install, else what `pip wheel` finds or builds."""
        pin = self._pin(transformer_engine.EXTENSION)
        found = f"{pin.replace('-', '_').replace('==', '-')}-*.whl"
        if not any(self._wheels.glob(found)):
            # A built wheel in pip's cache may have been built against another torch.
            options += ("--no-cache-dir", "--no-deps", "--no-build-isolation", "--wheel-dir", str(self._wheels))
            self._call(*self._pip, "wheel", *options, pin, **how)
        return next(self._wheels.glob(found), None)

    def _install_engine(self) -> None:
        extension, *others = transformer_engine.PACKAGES
        if not self.engine:
            self._say(f"TransformerEngine is left out: {transformer_engine.LOST}")
            # Half of it would make `import megatron.core` fail, so all of it goes.
            self._call(*self._pip, "uninstall", "--yes", extension, *others)
            return
        self._say("TransformerEngine")
        print("  where no wheel of its torch extension was found, that is built: 25 core minutes")
        print("  if memory runs out, MAX_JOBS=1 make install-gpu", flush=True)
        self._environment |= transformer_engine.build_variables(self._python, self.site)
        wheel = self._engine_wheel("-v")
        print(f"  its wheel is kept in {os.path.relpath(self._wheels)}")
        pins = (str(wheel), *map(self._pin, others))
        self._install("--no-deps", "--force-reinstall", "--only-binary", ":all:", *pins)

    def _compile(self) -> None:
        cores = str(len(os.sched_getaffinity(0)))
        self._say(f"byte-compile, on {cores} cores: else every process would do it again at its start")
        command = (self._python, "-I", "-m", "compileall", "-q", "-j", cores, "-x", LATER, str(self.site))
        done = self._call(*command, must=False, stdout=subprocess.PIPE)
        # It ends with 1 for files that are no valid Python, too (templates, other Pythons' syntax).
        if done.returncode not in (0, 1) or "No space left on device" in done.stdout:
            raise InstallError(f"{done.stdout[-2000:]}\nbyte-compilation failed")

    def _check(self) -> str:
        """What the last line says of an environment that works."""
        self._say("import the packages")
        kind = [*(["gpu"] if self.gpu else []), *(["engine"] if self.engine else [])]
        done = self._call(self._python, "-I", str(CHECK), *kind, must=False, stdout=subprocess.PIPE)
        if done.returncode:
            again = f"`make clean-venv install{'-gpu' if self.gpu else ''}` makes the environment anew"
            raise InstallError(f"{done.stdout[-2000:]}the check of the packages failed; {again}")
        without = "; without TransformerEngine" if self.gpu and not self.engine else ""
        versions = f"Python {sys.version.split()[0]}, {done.stdout.splitlines()[-1]}{without}"
        return f"{os.path.relpath(self.venv)} is ready: {versions}"


def read_lock(path: Path) -> dict[str, str]:
    """Versions by name, of lines `name==version`."""
    return dict(re.findall(r"^([\w.-]+)==([^\s;#]+)", path.read_text(), re.MULTILINE))


def uv_variables(pip_config: str) -> dict[str, str]:
    """uv's variables for what pip was told: by its files, and by PIP_* variables, which are stronger.

    Args:
        pip_config: what `pip config list` printed: a line `section.option='value'` each.
    """
    variables = {"UV_INDEX_STRATEGY": "unsafe-best-match"}  # as pip: the best version of all indexes
    for section in ("global", "install", ":env:"):
        for option, value in re.findall(rf"^{section}\.(?:default-)?([\w-]+)=(.+)$", pip_config, re.MULTILINE):
            if name := _UV_NAMES.get(option):
                words = str(ast.literal_eval(value)).split()
                variables[name] = ("," if name == "UV_FIND_LINKS" else " ").join(words)
    return variables


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
        if sys.platform != "linux":
            raise InstallError(f"the locks are for Linux, this is {sys.platform}: use a Linux machine or container")
        Installer(ROOT, options.venv.absolute(), gpu=options.gpu, engine=not options.without_te).install()
    except (InstallError, OSError) as error:
        # An OSError is the machine's own: a full disk, no permission; it names the file.
        print(f"\n{command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"\n{command}: interrupted; what is installed stays, `{command}` goes on from here", file=sys.stderr)
        return 130
    return 0
