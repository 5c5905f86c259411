"""`make install` on a project of tiny wheels (real pip and environments, no network), and what the real locks hold."""

import io
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests.tools.wheels import write_wheel
from tools.install import check, installer
from tools.install.command import InstallError
from tools.install.installer import Installer, Place
from tools.install.lock import installed, read_lock, unfinished
from tools.install.pip import PipPhase, advice
from tools.install.progress import Progress, duration
from tools.install.state import read_state, write_state

ROOT = Path(__file__).parents[2]
LOCKS = [ROOT / "requirements" / name for name in ("py311.lock.txt", "py312.lock.txt")]
BUILT_FOR_ONE_PYTHON = {"megatron-core", "contourpy"}
"""No version of these has wheels for both Pythons."""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """A project whose lock asks for `torch` and `alpha`, found in a folder by pip's own configuration."""
    root, wheels = tmp_path / "project", tmp_path / "wheels"
    (root / "requirements").mkdir(parents=True)
    wheels.mkdir()
    write_wheel(wheels, "torch", "2.13.0+cpu", {"torch.py": "__version__ = '2.13.0+cpu'"})
    write_wheel(wheels, "alpha", "1.0", {"alpha/__init__.py": "", "alpha/part.py": "answer = 42"})
    lock = "torch==2.13.0  # 192 MB\nalpha==1.0\n"
    (root / "requirements" / f"py{sys.version_info[0]}{sys.version_info[1]}.lock.txt").write_text(lock)
    (root / "requirements" / "cuda.lock.txt").write_text("nvidia-thing==13.0  # 400 MB\n")
    (root / "backend.py").write_text((Path(__file__).parent / "wheels.py").read_text())
    build = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    (root / "pyproject.toml").write_text(build + '[project]\nname = "tiny-project"\nversion = "1"\n')
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setattr(check, "FOUND", ("alpha",))
    monkeypatch.setattr(check, "IMPORTED", ("torch", "alpha.part"))
    monkeypatch.setattr(check, "SHOWN", ("torch",))
    monkeypatch.setattr(installer, "has_gpu", lambda: False)
    return Place(root=root, venv=tmp_path / "venv", requirements=root / "requirements")


def install(place: Place) -> None:
    Installer(place, torch_index="").install()


def phases(output: str) -> list[str]:
    """The phases that an install went through, in order."""
    return list(dict.fromkeys(re.findall(r"^\[\d/6\] (\w+)", output, flags=re.MULTILINE)))


def test_an_install_is_done_once_taken_up_again_and_follows_its_inputs(place, monkeypatch, capsys):
    install(place)
    assert phases(capsys.readouterr().out) == list(installer.PHASES)
    assert installed(place.site).items() >= {"torch": "2.13.0+cpu", "alpha": "1.0", "tiny-project": "1"}.items()
    assert list((place.site / "alpha" / "__pycache__").glob("part.*.pyc")), "not byte-compiled"
    assert not (place.venv / "tmp").exists()

    monkeypatch.setenv("PIP_FIND_LINKS", "/nonexistent")
    install(place)
    assert "[" not in capsys.readouterr().out, "the second install worked again"

    # A changed project is installed anew without anything to download.
    (place.root / "pyproject.toml").write_text((place.root / "pyproject.toml").read_text() + "# changed\n")
    install(place)
    assert phases(capsys.readouterr().out) == ["project", "check"]

    # What a kill in the middle of a package leaves: files missing, pip's closing marks missing, phases open.
    monkeypatch.setenv("PIP_FIND_LINKS", str(place.root.parent / "wheels"))
    (place.site / "alpha" / "part.py").unlink()
    (place.site / "alpha-1.0.dist-info" / "INSTALLER").unlink()
    state = read_state(place.venv)
    for phase in ("packages", "bytecode", "project", "check"):
        del state.phases[phase]
    write_state(place.venv, state)
    assert [info.name for info in unfinished(place.site)] == ["alpha-1.0.dist-info"]
    install(place)
    assert (place.site / "alpha" / "part.py").exists()
    assert phases(capsys.readouterr().out) == ["packages", "bytecode", "project", "check"]


def test_a_failed_download_says_so_and_what_is_installed_stays(place, monkeypatch):
    lock = place.lock
    lock.write_text(lock.read_text() + "beta==3.0\n")
    with pytest.raises(InstallError, match=r"(?s)beta==3\.0.*A download failed.*goes on from here"):
        install(place)
    assert "torch" in installed(place.site)
    assert set(read_state(place.venv).phases) == {"environment", "torch"}


def test_a_folder_of_someone_else_is_left_alone(place):
    place.venv.mkdir()
    (place.venv / "notes.txt").write_text("mine")
    with pytest.raises(InstallError, match="not made by `make install`"):
        install(place)
    assert [path.name for path in place.venv.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize(
    ("lines", "cause"),
    [
        (["ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device"], "full"),
        (
            ["ERROR: Could not find a version that satisfies the requirement x==1 (from versions: none)"],
            "download failed",
        ),
        (["WARNING: Retrying after connection broken by 'ReadTimeoutError'", "ERROR: x"], "download failed"),
        (["ERROR: ... (from versions: 0.1, 0.2)", "ERROR: No matching distribution found for sglang==0.5.17"], "glibc"),
        (["Killed"], "status 137"),
    ],
)
def test_pips_errors_become_advice(lines, cause, tmp_path):
    text = advice(lines, 137, log=tmp_path / "install.log")
    assert lines[-1] in text
    assert cause in text
    assert "install.log" in text


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_progress_in_a_log_is_a_line_a_second_with_the_time_left():
    clock, stream = Clock(), io.StringIO()
    progress = Progress("[2/6] torch", stream, clock)
    for tick in range(31):
        clock.now = tick / 10
        progress.show("fetched", left_s=9 - clock.now)
    progress.close("torch 2.13.0")
    lines = stream.getvalue().splitlines()
    assert lines[0] == "[2/6] torch  11% 1 s, about 8 s left  fetched"
    assert len(lines) == 4
    assert lines[-1] == "[2/6] torch torch 2.13.0, 3 s"


def test_time_left_follows_the_measured_rate_and_what_pip_turns_out_to_fetch(tmp_path):
    """100 of 192 MB in 4 s: 3.68 s more to fetch and 192/25 s to unpack. The CUDA packages join when one is fetched."""
    clock, stream = Clock(), io.StringIO()
    (tmp_path / "lock.txt").write_text("torch==2.13.0  # 192 MB\n")
    (tmp_path / "cuda.txt").write_text("nvidia-thing==13.0  # 400 MB\n")
    pins, cuda = read_lock(tmp_path / "lock.txt"), read_lock(tmp_path / "cuda.txt")
    phase = PipPhase(pins, cuda, tmp_path, Progress("torch", stream, clock))
    phase.line("  Downloading torch-2.13.0-cp312-cp312-manylinux_2_28_x86_64.whl (192 MB)")
    phase.line("Progress 100 of 192")
    clock.now = 4.0
    phase.tick()
    assert stream.getvalue().splitlines()[-1] == "torch  26% 4 s, about 11 s left  fetched 100 of 192 MB  torch"
    phase.line("  Downloading nvidia_thing-13.0-py3-none-any.whl (400 MB)")
    clock.now = 6.0
    phase.tick()
    assert "fetched 192 of 592 MB  nvidia-thing" in stream.getvalue()


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0 s"), (59.4, "59 s"), (187, "3:07 min"), (3723, "1:02:03 h")])
def test_durations_read_well(seconds, text):
    assert duration(seconds) == text


def test_a_bad_lock_line_is_named(tmp_path):
    (tmp_path / "lock.txt").write_text("# fine\nnumpy>=2\n")
    with pytest.raises(ValueError, match=r"lock\.txt:2: 'numpy>=2'"):
        read_lock(tmp_path / "lock.txt")


def test_an_untried_python_is_refused_with_the_way_out(tmp_path):
    program = (
        "import runpy, sys; sys.version_info = (3, 13, 0, 'final', 0); "
        "runpy.run_module('tools.install', run_name='__main__')"
    )
    command = [sys.executable, "-c", program]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={"PATH": str(tmp_path)}, timeout=60)
    assert answer.returncode == 1
    assert "3.11 and 3.12" in answer.stderr
    assert "PYTHON=/path/to/python3.12 make install" in answer.stderr


def test_both_locks_hold_the_same_versions():
    first, second = (read_lock(path) for path in LOCKS)
    assert first.keys() == second.keys()
    different = {name for name in first if first[name].version != second[name].version}
    assert different == BUILT_FOR_ONE_PYTHON


@pytest.mark.parametrize("lock", LOCKS, ids=lambda path: path.name)
def test_the_locks_satisfy_what_the_project_declares(lock):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    declared = [
        *project["project"]["dependencies"],
        *extras["cpu"],
        *extras["dev"],
        *project["build-system"]["requires"],
    ]
    pins = read_lock(lock)
    for requirement in map(Requirement, declared):
        pin = pins[requirement.name]
        assert requirement.specifier.contains(Version(pin.version)), f"{requirement}: the lock has {pin.version}"
