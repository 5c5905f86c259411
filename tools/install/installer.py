"""The phases of `make install`, each done once: environment, torch, packages, bytecode, project, check.

torch comes first and with its dependencies, by ordinary pip: whichever build pip's own configuration leads to (a CPU
wheel where one is offered, else the CUDA build with the libraries it needs). Everything else follows from the lock of
the running Python with --no-deps, because sglang declares another torch and GPU packages that a CPU does without.

`make install-gpu` goes the same way with the lock of the GPU nodes, and builds TransformerEngine after the packages.
An environment stays of its kind: `make install` on one of `make install-gpu` keeps that one up to date.
"""

import argparse
import contextlib
import fcntl
import importlib.util
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.install import engine
from tools.install.bytecode import compile_packages
from tools.install.check import check_imports
from tools.install.command import InstallError, run
from tools.install.lock import Pins, missing, read_lock, unfinished
from tools.install.pip import PipPhase, advice, pip, pip_install, site_packages
from tools.install.progress import Progress, duration
from tools.install.state import LOCK, State, digest, read_state, wanted_state, write_state

ROOT = Path(__file__).resolve().parents[2]
PHASES = ("environment", "torch", "packages", "bytecode", "project", "check")
GPU_PHASES = ("environment", "torch", "packages", "engine", "bytecode", "project", "check")
GPU_PYTHON = "3.12"
GPU_MARKS = (Path("/dev/nvidia0"), Path("/proc/driver/nvidia/version"))
UNPACKED = 4.5
"""Disk that an install takes while it runs, as a multiple of its wheels: packed once, unpacked, compiled."""
GPU_UNPACKED = 3.3
"""The same for GPU nodes, most of whose wheels are libraries."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where an install works."""

    root: Path
    venv: Path
    requirements: Path
    gpu: bool = False
    engine: bool = True
    """Whether TransformerEngine is installed, where `gpu` is set."""

    @property
    def python(self) -> Path:
        return self.venv / "bin" / "python"

    @property
    def site(self) -> Path:
        return site_packages(self.python)

    @property
    def scratch(self) -> Path:
        return self.venv / "tmp"

    @property
    def log(self) -> Path:
        return self.venv / "install.log"

    @property
    def lock(self) -> Path:
        return self.requirements / f"{'gpu' if self.gpu else 'py'}{sys.version_info[0]}{sys.version_info[1]}.lock.txt"

    @property
    def cuda_lock(self) -> Path:
        return self.requirements / "cuda.lock.txt"


class Installer:
    """Brings one environment to the state that lock and project ask for."""

    def __init__(self, place: Place, *, torch_index: str) -> None:
        self._place = place
        self._torch_index = torch_index
        self._state = wanted_state(place.venv, gpu=place.gpu, engine=place.engine)
        self._pins = read_lock(place.lock)
        # What torch's CUDA build brings along: for GPU nodes the same packages, at the versions of their lock.
        self._cuda = {name: self._pins.get(name, pin) for name, pin in read_lock(place.cuda_lock).items()}
        self._phases = GPU_PHASES if place.gpu else PHASES
        packages = digest(place.lock)
        without = "" if place.engine else " without engine"
        project = digest(place.root / "pyproject.toml", *place.root.glob("megatron_dapo/__init__.py"))
        self._wanted = {
            "environment": self._pin_text("pip"),
            "torch": packages,
            "packages": packages,
            "engine": packages + without,
            "bytecode": packages + without,
            "project": project,
            "check": packages + project + without,
        }
        if not place.gpu:
            del self._wanted["engine"]

    def install(self) -> None:
        """Do the phases that are not done yet. Raises InstallError where one fails; the others stay done."""
        done = read_state(self._place.venv)
        if not self._place.gpu and has_gpu():
            print("This machine has a GPU, and `make install` makes an environment for the CPU: it lacks SGLang's GPU")
            print(f"kernels and TransformerEngine. For GPUs: PYTHON=python{GPU_PYTHON} make install-gpu")
        if done is not None and self._usable(done) and done.phases == self._wanted:
            print(done.ready)
            return
        begin = time.monotonic()
        self._place.venv.mkdir(parents=True, exist_ok=True)
        with exclusive(self._place.venv / LOCK):
            self._take_up(read_state(self._place.venv))
            self._place.scratch.mkdir(exist_ok=True)
            self._refuse_small_disk()
            self._clear_unfinished()
            for phase, work in self._work().items():
                if self._state.phases.get(phase) != self._wanted[phase]:
                    self._do(phase, work)
            shutil.rmtree(self._place.scratch)
        print(f"{self._state.ready} (took {duration(time.monotonic() - begin)})")

    def _usable(self, done: State) -> bool:
        return done.same_environment(self._state) and self._place.python.exists()

    def _take_up(self, done: State | None) -> None:
        """Go on from an earlier install, or clear away one that cannot be used here."""
        if done is not None and self._usable(done):
            self._state = done
            self._state.engine = self._place.engine
            return
        if done is not None:
            print(f"{self._place.venv} was made {_otherwise(done, self._state)}: making it anew")
            for path in self._place.venv.iterdir():
                if path.name != LOCK:
                    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        write_state(self._place.venv, self._state)

    def _work(self) -> dict[str, Callable[[Progress], str]]:
        work = {
            "environment": self._make_environment,
            "torch": self._install_torch,
            "packages": self._install_packages,
            "engine": self._install_engine,
            "bytecode": self._compile,
            "project": self._install_project,
            "check": self._check,
        }
        return {phase: work[phase] for phase in self._phases}

    def _do(self, phase: str, work: Callable[[Progress], str]) -> None:
        progress = Progress(f"[{self._phases.index(phase) + 1}/{len(self._phases)}] {phase:<11}", sys.stdout)
        closing = work(progress)
        self._state.phases[phase] = self._wanted[phase]
        write_state(self._place.venv, self._state)
        progress.close(closing)

    def _make_environment(self, progress: Progress) -> str:
        if importlib.util.find_spec("ensurepip") is None:
            raise InstallError(
                f"{self._state.base} cannot make environments (it has no ensurepip). On Debian and Ubuntu: "
                f"apt install python{self._state.python}-venv"
            )
        command = [self._state.base, "-m", "venv", "--prompt", "megatron-dapo", str(self._place.venv)]
        status, lines = run(
            command, scratch=self._place.scratch, log=self._place.log,
            on_tick=lambda: progress.show("python -m venv", left_s=max(6 - progress.elapsed, 1)),
        )  # fmt: skip
        if status != 0:
            raise InstallError(advice(lines, status, log=self._place.log))
        pip = {name: pin for name, pin in self._pins.items() if name == "pip"}
        if missing(pip, self._place.site):
            self._pip([self._pin_text("pip"), "--no-deps"], pip, progress)
        return f"Python {sys.version.split()[0]}"

    def _install_torch(self, progress: Progress) -> str:
        if self._place.gpu and self._place.engine and (lacking := engine.missing_tools()) and not self._has_engine():
            engine.refuse_build(lacking)  # gigabytes before the build would
        torch = {pin.name: pin for pin in missing(self._pins, self._place.site) if pin.name == "torch"}
        constraints = ["-c", str(self._place.lock), *([] if self._place.gpu else ["-c", str(self._place.cuda_lock)])]
        index = ["--extra-index-url", self._torch_index] if self._torch_index else []
        if index and not torch:
            print("TORCH_INDEX has no effect: torch is already installed (`make clean-venv install` starts over)")
        self._pip([self._pin_text("torch"), *constraints, *index], torch, progress, optional=self._cuda)
        version = self._version("torch")
        if self._place.gpu and "+cpu" in version:
            raise InstallError(
                f"{version} is a CPU build, and a GPU node needs the CUDA build that PyPI has: unset TORCH_INDEX, and "
                "take the folder or index that offers it out of `pip config list`; then make clean-venv install-gpu"
            )
        return version

    def _install_packages(self, progress: Progress) -> str:
        wanted = {name: pin for name, pin in self._pins.items() if name not in engine.PACKAGES}
        pins = {pin.name: pin for pin in missing(wanted, self._place.site)}
        if pins:
            asked = self._place.scratch / self._place.lock.name
            asked.write_text("".join(f"{pin.name}=={pin.version}\n" for pin in wanted.values()))
            self._pip(["--no-deps", "-r", str(asked)], pins, progress)
        left = missing(wanted, self._place.site)
        if left:
            raise InstallError("not installed, though pip ended well: " + ", ".join(pin.name for pin in left))
        return f"{len(wanted)} packages of {self._place.lock.name}"

    def _install_engine(self, progress: Progress) -> str:
        place = self._place
        if not place.engine:
            # Half of it would make `import megatron.core` fail, so all of it goes.
            uninstall = [*pip(place.python), "uninstall", "--yes", *engine.PACKAGES]
            status, lines = run(uninstall, scratch=place.scratch, log=place.log)
            if status != 0:
                raise InstallError(advice(lines, status, log=place.log))
            return f"TransformerEngine is left out: {engine.LOST}"
        wheel = engine.wheel_of(
            place.python, place.site, self._pins, place.venv / "wheels", progress, scratch=place.scratch, log=place.log
        )
        pins = {name: self._pins[name] for name in engine.PACKAGES}
        self._pip(["--no-deps", "--no-index", "--force-reinstall", str(wheel)], {}, progress)
        rest = [self._pin_text(name) for name in engine.PACKAGES if name != engine.EXTENSION]
        self._pip(["--no-deps", *rest], {pin.name: pin for pin in missing(pins, place.site)}, progress)
        version = pins[engine.EXTENSION].version
        return f"TransformerEngine {version}, its built wheel is kept in {os.path.relpath(wheel.parent)}"

    def _has_engine(self) -> bool:
        return engine.kept_wheel(self._place.venv / "wheels", self._pins) is not None or engine.has_wheel(
            self._place.python, self._pins[engine.EXTENSION], scratch=self._place.scratch, log=self._place.log
        )

    def _compile(self, progress: Progress) -> str:
        count = compile_packages(
            self._place.python, self._place.site, progress=progress, scratch=self._place.scratch, log=self._place.log
        )
        return f"{count} files"

    def _install_project(self, progress: Progress) -> str:
        # Everything that building needs is in the lock, so this phase works without a network.
        arguments = ["--no-index", "--no-deps", "--no-build-isolation", "-e", str(self._place.root)]
        self._pip(arguments, {}, progress)
        return "megatron-dapo, editable"

    def _check(self, progress: Progress) -> str:
        place = self._place
        versions, untried = check_imports(
            place.python, progress=progress, scratch=place.scratch, log=place.log, gpu=place.gpu, engine=place.engine
        )
        self._state.ready = f"{os.path.relpath(place.venv)} is ready: {versions}"
        if place.gpu and not place.engine:
            self._state.ready += "; without TransformerEngine"
        if untried:
            self._state.ready += f"; this machine has no GPU driver, so a GPU node must still import {untried}"
        return "the packages import"

    def _pip(self, arguments: Sequence[str], pins: Pins, progress: Progress, *, optional: Pins | None = None) -> None:
        phase = PipPhase(pins, optional or {}, self._place.site, progress)
        pip_install(self._place.python, arguments, phase=phase, scratch=self._place.scratch, log=self._place.log)

    def _pin_text(self, name: str) -> str:
        return f"{name}=={self._pins[name].version}" if name in self._pins else ""

    def _version(self, name: str) -> str:
        info = next(self._place.site.glob(f"{name}-*.dist-info"), None)
        return info.name.removesuffix(".dist-info").replace("-", " ") if info else ""

    def _clear_unfinished(self) -> None:
        for info in unfinished(self._place.site):
            print(f"{info.name.removesuffix('.dist-info')} was left half installed: installing it again")
            shutil.rmtree(info)

    def _refuse_small_disk(self) -> None:
        megabytes = sum(pin.megabytes for pin in missing(self._pins, self._place.site))
        free = shutil.disk_usage(self._place.venv).free / 1e6
        needed = (GPU_UNPACKED if self._place.gpu else UNPACKED) * megabytes
        if free < needed:
            more = "" if self._place.gpu else " (with a CUDA build of torch some 6 GB more)"
            raise InstallError(
                f"{self._place.venv}: {free / 1e3:.1f} GB are free on this disk, the install needs about "
                f"{needed / 1e3:.1f} GB{more}. Make room, or name another place by VENV=path"
            )


def has_gpu() -> bool:
    """Whether an NVIDIA driver runs here."""
    return shutil.which("nvidia-smi") is not None or any(mark.exists() for mark in GPU_MARKS)


def _otherwise(done: State, wanted: State) -> str:
    if done.gpu != wanted.gpu:
        return "for GPUs" if done.gpu else "for the CPU"
    return f"elsewhere or from another Python ({done.base})"


@contextlib.contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Hold the lock file at `path`. Raises InstallError while another install holds it."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InstallError(f"another `make install` works on {path.parent} at this moment: let it finish") from None
        yield


def main(arguments: list[str]) -> int:
    """Exit status: 0 installed, 1 failed (the reason is on standard error), 130 interrupted."""
    parser = argparse.ArgumentParser(prog="python -m tools.install", description=__doc__)
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="where the environment goes")
    parser.add_argument("--root", type=Path, default=ROOT, help="the project to install, with its folder requirements/")
    parser.add_argument("--gpu", action="store_true", help="for GPU nodes (make install-gpu)")
    parser.add_argument("--without-te", action="store_true", help=f"leave TransformerEngine out: {engine.LOST}")
    options = parser.parse_args(arguments)
    command = "make install-gpu" if options.gpu else "make install"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if sys.platform != "linux":
        print(
            f"{command}: the locks are for Linux, this is {sys.platform}: use a Linux machine or container",
            file=sys.stderr,
        )
        return 1
    try:
        place = place_of(
            options.root.resolve(), options.venv.absolute(), gpu=options.gpu, with_engine=not options.without_te
        )
        Installer(place, torch_index=os.environ.get("TORCH_INDEX", "")).install()
    except (InstallError, OSError) as error:
        # An OSError is the machine's own: a full disk, no permission; it names the file.
        print(f"\n{command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"\n{command}: interrupted; what is installed stays, `{command}` goes on from here", file=sys.stderr)
        return 130
    return 0


def place_of(root: Path, venv: Path, *, gpu: bool, with_engine: bool = True) -> Place:
    """What to install at `venv`; an environment of `make install-gpu` that is asked for by `make install` stays one.

    Raises:
        InstallError: GPU nodes' packages are asked for and this Python has no lock for them.
    """
    done = read_state(venv)
    if not gpu and done is not None and done.gpu:
        gpu, with_engine = True, done.engine
    if gpu and f"{sys.version_info[0]}.{sys.version_info[1]}" != GPU_PYTHON:
        raise InstallError(
            f"the GPU packages are locked for Python {GPU_PYTHON}, this is {sys.version.split()[0]}: "
            f"PYTHON=python{GPU_PYTHON} make install-gpu"
        )
    return Place(root=root, venv=venv, requirements=root / "requirements", gpu=gpu, engine=with_engine)
