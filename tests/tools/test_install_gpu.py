"""`make install-gpu` on a project of tiny packages (real pip and environments, no network), and what its lock holds."""

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name as normalised
from packaging.version import Version

from tests.tools.wheels import installed, write_check, write_source, write_wheel
from tools.install import import_check, installer
from tools.install import transformer_engine as engine
from tools.install.installer import STAMP, Installer, InstallError, read_lock

ROOT = Path(__file__).parents[2]
LOCK = ROOT / "requirements" / "gpu312.lock.txt"
TAG = f"{sys.version_info[0]}{sys.version_info[1]}"
NO_REGISTRY = r"NewConnectionError|ConnectTimeout|Temporary failure|Name or service not known|from versions: none"
KERNELS = {"sglang-kernel", "flashinfer-python", "torch", "nvidia-cutlass-dsl", "xgrammar"}
"""What SGLang declares with `==`, among that the kernels that a CUDA server cannot start without."""

BACKEND = """
import os
import torch  # only there where the build is not isolated
from wheels import write_wheel

def build_wheel(folder, config_settings=None, metadata_directory=None):
    print("[1/2] c++ one.o")
    print("[2/2] c++ two.o")
    names = ("CUDA_HOME", "NVTE_BUILD_USE_NVIDIA_WHEELS", "NVTE_PYTORCH_FORCE_BUILD", "MAX_JOBS")
    built = {name: os.environ.get(name) for name in names}
    files = {"transformer_engine_torch.py": f"built = {built}"}
    return write_wheel(folder, "transformer-engine-torch", "2.19.0", files)
"""
FAILING = """
def build_wheel(folder, config_settings=None, metadata_directory=None):
    print("csrc/one.cpp:1: fatal error: cudnn.h: No such file or directory")
    raise SystemExit(1)
"""
BUILD = '[build-system]\nrequires = []\nbuild-backend = "{}"\nbackend-path = ["."]\n'


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Installer:
    """A project for GPU nodes on a machine without a driver; TransformerEngine's extension comes as source."""
    root, wheels = tmp_path / "project", tmp_path / "packages"
    (root / "requirements").mkdir(parents=True)
    wheels.mkdir()
    write_wheel(wheels, "torch", "2.11.0", {"torch.py": ""})
    write_wheel(wheels, "kernel", "1.0", {"kernel.py": "raise ImportError('libno-driver.so.1: cannot open')"})
    write_wheel(wheels, "nvidia-thing", "13.0", {"nvidia/cu13/bin/nvcc": ""})
    write_wheel(wheels, "transformer-engine-cu13", "2.19.0", {"core.py": ""})
    module = {"__init__.py": "", "pytorch.py": "import transformer_engine_torch, core"}
    module = {f"transformer_engine/{name}": text for name, text in module.items()}
    write_wheel(wheels, "transformer-engine", "2.19.0", module)
    helper = (Path(__file__).parent / "wheels.py").read_text()
    source = {"pyproject.toml": BUILD.format("backend"), "backend.py": BACKEND, "wheels.py": helper}
    write_source(wheels, "transformer-engine-torch", "2.19.0", source)
    pins = [
        "torch==2.11.0",
        "kernel==1.0",
        "nvidia-thing==13.0",
        *(f"{name}==2.19.0" for name in engine.PACKAGES),
    ]
    (root / "requirements" / f"gpu{TAG}.lock.txt").write_text("\n".join(pins))
    (root / "requirements" / "cuda.lock.txt").write_text("")
    (root / "backend.py").write_text(helper)
    (root / "pyproject.toml").write_text(BUILD.format("backend") + '[project]\nname = "tiny-project"\nversion = "1"\n')
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv("MAX_JOBS", "3")
    monkeypatch.setattr(installer, "GPU_PYTHON", f"{sys.version_info[0]}.{sys.version_info[1]}")
    monkeypatch.setattr(engine, "missing_tools", list)
    names = {"IMPORTED": ("torch",), "SHOWN": ("torch",), "KERNELS": ("kernel",)}
    check = write_check(tmp_path, **names, NO_DRIVER="libno-driver.so.1: cannot open", GPU_SHOWN=("kernel",))
    monkeypatch.setattr(installer, "CHECK", check)
    return Installer(root, tmp_path / "venv", gpu=True)


def install(place: Installer, *, gpu: bool = True, with_engine: bool = True) -> None:
    Installer(place.root, place.venv, gpu=gpu, engine=with_engine).install()


@pytest.mark.slow
def test_the_extension_is_built_once_against_the_installed_torch_and_headers(place, capfd, monkeypatch):
    install(place)
    built = (place.site / "transformer_engine_torch.py").read_text()
    assert f"'CUDA_HOME': '{place.site}/nvidia/cu13'" in built
    assert "'NVTE_BUILD_USE_NVIDIA_WHEELS': '1', 'NVTE_PYTORCH_FORCE_BUILD': 'TRUE', 'MAX_JOBS': '3'" in built
    output = capfd.readouterr().out
    assert "this machine has no GPU driver, so a GPU node must still import:\n  kernel: ImportError" in output

    # What asks for `make install` (make test, make train) leaves an environment for GPUs as it is.
    install(place, gpu=False)
    assert "is ready" in capfd.readouterr().out
    assert json.loads((place.venv / STAMP).read_text())["gpu"]

    install(place, with_engine=False)
    assert "Python or kind" in capfd.readouterr().out
    assert not {name for name in installed(place.site) if name.startswith("transformer-engine")}

    # The wheel of the first build is taken: neither source nor compiler are there any more.
    packages = place.root.parent / "packages"
    next(packages.glob("*.tar.gz")).unlink()
    monkeypatch.setattr(engine, "missing_tools", lambda: ["a compiler"])
    install(place)
    assert set(engine.PACKAGES) <= installed(place.site).keys()


def test_what_the_build_lacks_is_said_before_it_begins(place, monkeypatch):
    monkeypatch.setattr(engine, "missing_tools", lambda: ["the C++ compiler `c++`: apt install g++"])
    with pytest.raises(
        InstallError, match=r"(?s)lacks:\n  the C\+\+ compiler.*PIP_FIND_LINKS.*FP8 are lost.*WITHOUT_TE=1"
    ):
        install(place)
    assert "torch" not in installed(place.site)


@pytest.mark.slow
def test_a_build_that_fails_is_told_in_the_compilers_words_and_a_built_wheel_needs_none(place, monkeypatch, capfd):
    packages = place.root.parent / "packages"
    source = {"pyproject.toml": BUILD.format("backend"), "backend.py": FAILING}
    write_source(packages, "transformer-engine-torch", "2.19.0", source)
    with pytest.raises(InstallError, match=r"pip wheel.* failed, see above"):
        install(place)
    said = capfd.readouterr()
    assert "MAX_JOBS=1 make install-gpu" in said.out
    assert "one.cpp:1: fatal error: cudnn.h" in said.out + said.err

    # Nothing of this is needed where a built wheel is found.
    monkeypatch.setattr(engine, "missing_tools", lambda: ["a compiler"])
    write_wheel(packages, "transformer-engine-torch", "2.19.0", {"transformer_engine_torch.py": ""})
    install(place)
    assert set(engine.PACKAGES) <= installed(place.site).keys()

    # A CPU build of torch is refused.
    (packages / "torch-2.11.0-py3-none-any.whl").unlink()
    write_wheel(packages, "torch", "2.11.0+cpu", {"torch.py": ""})
    shutil.rmtree(place.site / "torch-2.11.0.dist-info")
    (place.venv / STAMP).write_text(json.dumps(place.made_from))
    with pytest.raises(InstallError, match=r"torch is a CPU build.*pip config list"):
        install(place)


@pytest.mark.parametrize("compiler", ["env c++", " "])
def test_a_compiler_behind_another_word_is_found(compiler, monkeypatch):
    monkeypatch.setattr(engine.shutil, "which", lambda name: f"/usr/bin/{name}" if name in ("env", "c++") else None)
    monkeypatch.setattr(engine.sysconfig, "get_path", lambda name: Path(__file__).parent)
    monkeypatch.setenv("CXX", compiler)
    assert not [line for line in engine.missing_tools() if "Python.h" not in line]


def test_the_build_asks_for_a_compiler_and_pythons_headers(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(engine.sysconfig, "get_path", lambda name: str(tmp_path / name))
    compiler, headers = engine.missing_tools()
    assert compiler.startswith("the C++ compiler `no-such-compiler`: apt install g++")
    assert headers.startswith(f"{tmp_path}/include/Python.h, Python's headers: apt install")


@pytest.mark.parametrize(
    ("error", "failed"),
    [
        ("libcuda.so.1: cannot open shared object file: No such file or directory", False),
        ("undefined symbol: _ZN3c10", True),
        ("libcuda.so.1: undefined symbol: cuGetError", True),  # the driver is there
    ],
)
def test_a_broken_kernel_is_told_from_a_machine_without_a_driver(error, failed, tmp_path, monkeypatch, capsys):
    (tmp_path / "fake_kernel.py").write_text(f"raise ImportError({error!r})")
    monkeypatch.syspath_prepend(tmp_path)
    for name, value in {"IMPORTED": ("json",), "SHOWN": (), "KERNELS": ("fake_kernel",), "GPU_SHOWN": ()}.items():
        monkeypatch.setattr(import_check, name, value)
    assert import_check.main(["gpu"]) == failed
    title = "these packages do not work" if failed else "a GPU node must still import"
    assert f"{title}:\n  fake_kernel: ImportError: {error}\n" in capsys.readouterr().out


def test_another_python_is_refused_with_the_command(place, monkeypatch):
    monkeypatch.setattr(installer, "GPU_PYTHON", "3.99")
    with pytest.raises(InstallError, match=r"another Python: PYTHON=python3\.99 make install-gpu"):
        install(place)


def test_make_install_names_install_gpu_where_there_is_a_gpu(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(installer, "GPU_MARK", tmp_path)
    monkeypatch.setattr(Installer, "_clear", lambda _: sys.exit("far enough"))
    with pytest.raises(SystemExit):
        Installer(ROOT, tmp_path / "venv").install()
    assert "PYTHON=python3.12 make install-gpu" in capsys.readouterr().out


def pins_of(requirements: list[str]) -> list[Requirement]:
    """Those that hold on a GPU node's Python 3.12 without extras."""
    node = {"python_version": "3.12", "python_full_version": "3.12.3", "platform_machine": "x86_64", "extra": ""}
    node |= {"sys_platform": "linux", "platform_system": "Linux"}
    parsed = map(Requirement, requirements)
    return [r for r in parsed if r.marker is None or r.marker.evaluate(node)]


def test_the_lock_holds_what_the_project_and_sglang_declare():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    own = [*project["project"]["dependencies"], *extras["cpu"], *extras["gpu"], *extras["dev"]]
    own += project["build-system"]["requires"]
    declared = [text for text in own if not text.startswith("megatron-dapo")]
    pins = read_lock(LOCK)
    assert pins["sglang"] == importlib.metadata.version("sglang")
    for requirement in pins_of([*declared, *importlib.metadata.requires("sglang")]):
        version = pins[normalised(requirement.name)]
        assert requirement.specifier.contains(Version(version)), f"{requirement}: the lock has {version}"


def test_the_lock_holds_the_kernels_once_and_nothing_that_only_shares_a_name():
    names = [normalised(line.partition("==")[0]) for line in LOCK.read_text().splitlines() if "==" in line]
    assert len(names) == len(set(names))
    pins = read_lock(LOCK)
    assert set(engine.PACKAGES) | KERNELS | {"torch-memory-saver", "ninja", "setuptools", "pip"} <= pins.keys()
    assert len({pins[name] for name in engine.PACKAGES}) == 1
    assert "apex" not in pins, "PyPI's apex is not NVIDIA's"
    # What the build reads, and the rest of the common lock.
    assert {"nvidia-cuda-nvcc", "nvidia-cuda-runtime", "nvidia-cublas", "nvidia-cudnn-cu13"} <= pins.keys()
    assert read_lock(ROOT / "requirements" / "py312.lock.txt").keys() <= pins.keys()


@pytest.mark.slow
def test_the_registry_resolves_the_project_to_the_lock(tmp_path):
    """uv resolves the extras with every declaration of every package, and the lock is one of the answers."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--retries", "1", "--timeout", "30", "uv"]
    answer = subprocess.run([*pip, "--target", str(tmp_path / "uv")], capture_output=True, text=True, timeout=240)
    if answer.returncode != 0 and re.search(NO_REGISTRY, answer.stdout + answer.stderr):
        pytest.skip("no package registry is reachable")
    assert answer.returncode == 0, answer.stderr
    found_lock = tmp_path / "gpu312.lock.txt"
    found_lock.write_text(LOCK.read_text())
    variables = os.environ | {"PATH": f"{tmp_path / 'uv' / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    command = ["make", "relock", f"GPU_LOCK={found_lock}", f"VENV={tmp_path}"]
    answer = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=240)
    assert answer.returncode == 0, answer.stderr
    found = read_lock(found_lock)
    assert found == read_lock(LOCK)
    declared = {normalised(r.name): str(r.specifier) for r in pins_of(importlib.metadata.requires("sglang"))}
    assert "torch-memory-saver" in found
    assert {name: declared[name] for name in KERNELS} == {name: f"=={found[name]}" for name in KERNELS}
