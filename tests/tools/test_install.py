"""`make install` on a project of tiny wheels (real uv, pip and environments, no network), and what the locks hold."""

import json
import os
import shutil
import subprocess
import sys
import threading
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests.tools.wheels import installed, write_check, write_wheel
from tools.install import installer
from tools.install.installer import LOCK, STAMP, Installer, InstallError, exclusive, read_lock, uv_options

ROOT = Path(__file__).parents[2]
LOCKS = [ROOT / "requirements" / name for name in ("py311.lock.txt", "py312.lock.txt")]
BUILT_FOR_ONE_PYTHON = {"megatron-core", "contourpy"}
"""No version of these has wheels for both Pythons."""
UV = shutil.which("uv", path=str(Path(sys.executable).parent)) or shutil.which("uv")


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Installer:
    """A project whose lock asks for `torch` and `alpha`, found in a folder by pip's own configuration."""
    by_uv = getattr(request, "param", "uv" if UV else "pip") == "uv"
    if by_uv and UV is None:
        pytest.skip("no uv on this machine")
    root, wheels = tmp_path / "project", tmp_path / "wheels"
    (root / "requirements").mkdir(parents=True)
    wheels.mkdir()
    write_wheel(wheels, "torch", "2.13.0+cpu", {"torch.py": "__version__ = '2.13.0+cpu'"})
    write_wheel(wheels, "alpha", "1.0", {"alpha/__init__.py": "", "alpha/part.py": "answer = 42"})
    if by_uv:
        script = f'#!/bin/sh\nexec "{UV}" "$@"\n'
        write_wheel(wheels, "uv", "1.0", {"uv-1.0.data/scripts/uv": script})
    lock = root / "requirements" / f"py{sys.version_info[0]}{sys.version_info[1]}.lock.txt"
    lock.write_text("torch==2.13.0\nalpha==1.0\n")
    (root / "requirements" / "cuda.lock.txt").write_text("nvidia-thing==13.0\n")
    (root / "backend.py").write_text((Path(__file__).parent / "wheels.py").read_text())
    build = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    (root / "pyproject.toml").write_text(build + '[project]\nname = "tiny-project"\nversion = "1"\n')
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv-cache"))
    monkeypatch.setattr(installer, "GPU_MARK", tmp_path / "none")
    check = write_check(tmp_path, IMPORTED=("torch", "alpha.part"), SHOWN=("torch",))
    monkeypatch.setattr(installer, "CHECK", check)
    return Installer(root, tmp_path / "venv")


def install(place: Installer) -> None:
    Installer(place.root, place.venv).install()


@pytest.mark.slow
@pytest.mark.parametrize("place", ["uv", "pip"], indirect=True)
def test_an_install_is_done_once_taken_up_again_and_follows_its_inputs(place, monkeypatch, capfd):
    install(place)
    said = capfd.readouterr().out
    assert ", torch 2.13.0+cpu\n" in said
    assert ("so pip installs" in said) is ("uv" not in installed(place.site))
    assert installed(place.site).items() >= {"torch": "2.13.0+cpu", "alpha": "1.0", "tiny-project": "1"}.items()
    assert list((place.site / "alpha" / "__pycache__").glob("part.*.pyc")), "not byte-compiled"
    stamp = (place.venv / STAMP).stat().st_mtime_ns

    install(place)
    assert capfd.readouterr().out == f"{os.path.relpath(place.venv)} is ready\n", "the second install worked again"
    assert (place.venv / STAMP).stat().st_mtime_ns == stamp

    # What a kill in the middle of a package leaves: files missing, the closing mark missing, no `ready`.
    (place.site / "alpha" / "part.py").unlink()
    (place.site / "alpha-1.0.dist-info" / "INSTALLER").unlink()
    (place.venv / STAMP).write_text(json.dumps(place.made_from))
    install(place)
    assert "alpha-1.0 was left half installed" in capfd.readouterr().out
    assert (place.site / "alpha" / "part.py").exists()

    # A lock that asks for more adds that alone; where it cannot be had, what is there stays.
    torch = place.site / "torch.py"
    torch.write_text("__version__ = 'kept'")
    place.lock.write_text(place.lock.read_text() + "beta==3.0\n")
    with pytest.raises(InstallError, match=r"(?s)failed, see above.*goes on from here.*pip config list"):
        install(place)
    assert "beta" in capfd.readouterr().err
    write_wheel(place.root.parent / "wheels", "beta", "3.0", {"beta.py": ""})
    install(place)
    assert installed(place.site)["beta"] == "3.0"
    assert torch.read_text() == "__version__ = 'kept'"


def test_a_folder_of_someone_else_is_left_alone(place):
    place.venv.mkdir()
    (place.venv / "notes.txt").write_text("mine")
    with pytest.raises(InstallError, match="not made by `make install`"):
        install(place)
    assert [path.name for path in place.venv.iterdir()] == ["notes.txt"]


@pytest.mark.slow
def test_an_environment_of_another_python_is_made_anew(place, capfd):
    place.venv.mkdir()
    (place.venv / "notes.txt").write_text("mine")
    (place.venv / LOCK).touch()
    (place.venv / STAMP).write_text(json.dumps(place.made_from | {"base": "/usr/bin/python2"}))
    install(place)
    assert "making it anew" in capfd.readouterr().out
    assert not (place.venv / "notes.txt").exists()
    # A package that does not work is named with its own words.
    (place.site / "alpha" / "part.py").write_text("1 / 0")
    (place.venv / STAMP).write_text(json.dumps(place.made_from))
    with pytest.raises(InstallError, match="see above"):
        install(place)
    assert "alpha.part: ZeroDivisionError: division by zero" in capfd.readouterr().out


def test_a_second_install_waits_for_the_first(tmp_path):
    order = []
    with exclusive(tmp_path / "lock"):
        waiting = threading.Thread(target=lambda: [order.append("second") for _ in [0] if _locked(tmp_path / "lock")])
        waiting.start()
        waiting.join(0.3)
        order.append("first")
    waiting.join(10)
    assert order == ["first", "second"]


def _locked(path: Path) -> bool:
    with exclusive(path):
        return True


def test_uv_is_told_what_pip_was_told_by_files_and_more_so_by_variables():
    config = "global.index-url='https://a/simple'\nglobal.extra-index-url='file:///b\\nfile:///c'\n:env:.no='1'\n"
    config += "install.find-links='/wheels /more'\nglobal.cert='/ca.pem'\n:env:.index-url='https://mine/simple'\n"
    assert set(uv_options(config + ":env:.no-index='1'")) == {
        "--index-strategy=unsafe-best-match",
        "--index-url=https://mine/simple",
        "--extra-index-url=file:///b",
        "--extra-index-url=file:///c",
        "--find-links=/wheels",
        "--find-links=/more",
        "--cert=/ca.pem",
        "--no-index",
    }


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
    assert {name for name in first if first[name] != second[name]} == BUILT_FOR_ONE_PYTHON


@pytest.mark.parametrize("lock", LOCKS, ids=lambda path: path.name)
def test_the_locks_satisfy_what_the_project_declares(lock):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    declared = [*project["project"]["dependencies"], *extras["cpu"], *extras["dev"]]
    declared += project["build-system"]["requires"]
    pins = read_lock(lock)
    for requirement in map(Requirement, declared):
        version = pins[requirement.name]
        assert requirement.specifier.contains(Version(version)), f"{requirement}: the lock has {version}"
