"""What a GPU run imports and compiles, on a made-up node: all there, and each thing absent or broken. The modules, the
programs and the packages are stand-ins; the processes that import and run them are real."""

import shutil
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from megatron_dapo.config import load_config
from megatron_dapo.doctor import kernels
from megatron_dapo.doctor.hardware import probe_gpus
from megatron_dapo.doctor.kernels import check_imports, check_pins, check_torch, probe_torch
from megatron_dapo.doctor.probing import Node, Status
from megatron_dapo.doctor.software import installed_versions
from megatron_dapo.plan.scenario import changed
from tests.doctor.conftest import MODULES, NO_DRIVER, TORCH
from tests.plan.conftest import RECIPES

PASS, WARNING, FAIL = Status.PASS, Status.WARNING, Status.FAIL


@pytest.fixture(scope="module")
def config():
    return load_config(RECIPES / "qwen2.5_7b_8gpu.yaml")


def imports(machine, config=None):
    parts, needed = kernels.parts_of(config)
    return [(f.status, f.found) for f in check_imports(machine.node, parts, needed) if f.status is not PASS]


def torch_of(machine, gpus):
    return [(f.status, f.check, f.found) for f in check_torch(probe_torch(machine.node), gpus, {})]


@pytest.fixture
def gpus(machine):
    return probe_gpus(machine.node)[0]


def test_on_a_good_node_everything_passes(machine, config):
    assert machine.problems(config) == []
    assert machine.problems() == []
    found = {finding.check: finding.found for finding in machine.examine(config)}
    assert found["driver"] == "580.65.06; torch 2.11.0+cu130 is built for CUDA 13.0"
    assert found["collectives"] == "NCCL 2.28.9"
    assert found["imports"] == ", ".join(module for module in MODULES if module != "torch")
    assert found["SGLang's pins"].startswith("torch 2.11.0, sglang-kernel 0.4.5")
    assert found["compilers"] == "C, C++, CUDA and ninja"


@pytest.mark.parametrize(
    ("module", "status"),
    [
        ("megatron", FAIL),
        ("sgl_kernel", FAIL),
        ("sglang", FAIL),
        ("flashinfer", WARNING),
        ("torch_memory_saver", WARNING),
        ("transformer_engine", WARNING),
    ],
)
def test_what_is_absent_is_a_failure_or_what_is_lost(module, status, machine):
    shutil.rmtree(machine.site / module)
    [(found_status, found)] = imports(machine)
    assert found_status is status
    assert f"no {module}" in found


def test_what_the_config_cannot_do_without_fails(machine, config):
    shutil.rmtree(machine.site / "torch_memory_saver")
    shutil.rmtree(machine.site / "transformer_engine")
    assert [status for status, _ in imports(machine, config)] == [WARNING, WARNING]
    colocated = changed(config, {"run.mode": "colocated"})
    assert (FAIL, "no torch_memory_saver.utils, which run.mode = colocated needs") in imports(machine, colocated)
    fp8 = changed(config, {"actor.fp8": "hybrid"})
    assert (FAIL, "no transformer_engine.pytorch, which actor.fp8 = hybrid needs") in imports(machine, fp8)


def test_servers_of_someone_else_need_no_kernels_here(machine, config):
    shutil.rmtree(machine.site / "sgl_kernel")
    (machine.cuda / "bin/nvcc").unlink()
    assert machine.problems(changed(config, {"rollout.urls": ("http://elsewhere:30000",)})) == []


@pytest.mark.parametrize(
    ("module", "code", "cause"),
    [
        (
            "transformer_engine.pytorch",
            "raise FileNotFoundError('Could not find shared object file for Transformer Engine torch lib.')",
            "FileNotFoundError: Could not find shared object file",
        ),
        ("transformer_engine.pytorch", "import transformer_engine_torch", "No module named 'transformer_engine_torch'"),
        (
            "sgl_kernel",
            "raise ImportError('\\n[sgl_kernel] CRITICAL!\\n- Compute capability: None\\n"
            "- ImportError: libcuda.so.1: cannot open shared object file\\n- ModuleNotFoundError: common_ops')",
            "broken: ImportError: libcuda.so.1: cannot open shared object file",
        ),
        ("flashinfer", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "ended by signal 11"),
        ("flashinfer", "import sys; sys.exit('a library ends the process')", "SystemExit: a library ends the process"),
        (
            "torch_memory_saver.utils",
            "def get_binary_path_from_package(stem): raise RuntimeError('expected exactly one .so')",
            "RuntimeError: expected exactly one .so",
        ),
    ],
)
def test_what_is_there_but_broken_fails_with_its_cause(module, code, cause, machine):
    machine.module(module, code)
    [(status, found)] = imports(machine)
    assert status is FAIL
    assert found.startswith(module)
    assert cause in found


def test_output_of_a_module_is_not_taken_for_its_cause(machine):
    machine.module("flashinfer", "print('hello'); raise OSError('no such file')")
    assert imports(machine) == [(FAIL, "flashinfer is there and broken: OSError: no such file")]


def test_a_broken_transformer_engine_says_how_it_is_built(machine):
    machine.module("transformer_engine.pytorch", "raise OSError('undefined symbol')")
    [finding] = [finding for finding in machine.examine() if finding.status is FAIL]
    assert "--no-build-isolation" in finding.fix


def test_an_import_that_hangs_is_ended_at_the_deadline(machine, monkeypatch):
    told = machine.root / "grandchild"
    machine.module(
        "flashinfer",
        "import subprocess, pathlib\n"
        f"child = subprocess.Popen([{shutil.which('sleep')!r}, '60'])\n"
        f"pathlib.Path({str(told)!r}).write_text(str(child.pid))\n"
        "child.wait()\n",
    )
    for deadline_s in (2, 10, 40):  # on a busy machine the import may not have begun by then
        monkeypatch.setattr(kernels, "IMPORT_DEADLINE_S", deadline_s)
        [finding] = check_imports(machine.node, [kernels.Part("flashinfer", "")], {})
        if told.exists() and told.read_text():
            break
    assert finding.status is FAIL
    assert f"no end within {deadline_s} s" in finding.found
    assert ended(int(told.read_text())), "what it has started goes with it"


def ended(pid: int) -> bool:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.05)
    return False


def test_a_driver_older_than_cuda_needs_fails(machine):
    machine.gpus("NVIDIA H100 80GB HBM3, 81559, 4, 550.54.15, Default, Disabled, 0")
    machine.module("torch", NO_DRIVER)
    [(status, check, found)] = [problem for problem in machine.problems() if problem[1] == "driver"]
    assert (status, check) == (FAIL, "driver")
    assert "550.54.15 is too old for CUDA 13.0" in found


def test_a_driver_without_a_number_is_not_taken_for_an_old_one(machine):
    machine.gpus("NVIDIA H100 80GB HBM3, 81559, 4, [N/A], Default, Disabled, 0")
    machine.module("torch", NO_DRIVER)
    [(status, check, found)] = machine.problems()
    assert (status, check) == (FAIL, "torch")
    assert "sees no GPU, nvidia-smi does" in found


def test_an_old_driver_that_works_by_compatibility_libraries_passes(machine):
    machine.gpus("NVIDIA H100 80GB HBM3, 81559, 4, 550.54.15, Default, Disabled, 0")
    assert machine.problems() == []


def test_torch_that_sees_no_gpu_says_why(machine, gpus):
    machine.module("torch", NO_DRIVER)
    status, check, found = torch_of(machine, gpus)[0]
    assert (status, check) == (FAIL, "torch")
    assert "Error 802: system not yet initialized" in found


def test_torch_that_sees_some_gpus_is_a_warning(machine, gpus):
    machine.module("torch", TORCH.replace("return 8", "return 2"))
    assert torch_of(machine, gpus)[0][::2] == (WARNING, "sees 2 of 8 GPUs")


def test_a_cpu_build_and_no_torch_fail(machine, gpus):
    machine.module("torch", "__version__ = '2.11.0+cpu'\nclass version:\n    cuda = None\nclass cuda:\n"
                            "    def is_available():\n        return False\n")  # fmt: skip
    assert torch_of(machine, gpus) == [(FAIL, "torch", "2.11.0+cpu is a build without CUDA")]
    shutil.rmtree(machine.site / "torch")
    [(status, _, found)] = torch_of(machine, gpus)
    assert status is FAIL
    assert "No module named 'torch'" in found


def test_another_nccl_than_the_installed_one_is_a_warning(machine):
    machine.package("nvidia-nccl-cu13", "2.29.7")
    assert machine.problems() == [(WARNING, "collectives", "NCCL 2.28.9 is loaded, 2.29.7 is installed")]


@pytest.mark.parametrize(
    ("package", "version", "status"),
    [
        ("sglang-kernel", "0.4.4", FAIL),
        ("sglang-kernel", "0.4.6", WARNING),
        ("sglang-kernel", None, FAIL),
        ("flashinfer-python", "0.6.14", WARNING),
        ("torch", "2.13.0", WARNING),
        ("torch-memory-saver", None, WARNING),
    ],
)
def test_packages_are_those_that_sglang_asks_for(package, version, status, machine):
    machine.package(package, version)
    [finding] = check_pins(machine.node, installed_versions(machine.node))
    assert finding.status is status
    assert finding.found.startswith(f"{package} {version or 'is not installed'}")


def test_the_installed_sglang_declares_what_is_compared():
    names = [finding.found.split()[0] for finding in check_pins(Node(), {})]
    assert sorted(names) == ["flashinfer-python", "sglang-kernel", "torch", "torch-memory-saver"]


@pytest.mark.parametrize(
    ("take", "found", "fix"),
    [
        ("bin/gcc", "no gcc or clang on PATH", "install gcc"),
        ("bin/c++", "no c++ on PATH", "install g++"),
        ("bin/ninja", "no ninja in", "pip install ninja"),
        ("include/Python.h", "cannot include Python.h", "python3-dev"),
        ("usr/local/cuda/bin/nvcc", "no nvcc that runs", "CUDA_HOME"),
        ("usr/local/cuda/include/cuda_runtime.h", "include/cuda_runtime.h is not", "CUDA_HOME"),
    ],
)
def test_a_compiler_or_header_that_is_missing_fails(take, found, fix, machine):
    (machine.root / take).unlink()
    [finding] = [finding for finding in machine.examine() if finding.status is not PASS]
    assert (finding.status, finding.check) == (FAIL, "compilers")
    assert found in finding.found
    assert fix in finding.fix


def test_ninja_of_an_environment_that_is_not_activated_is_found(machine):
    (machine.root / "bin/ninja").rename(machine.root / "venv/bin/ninja")
    assert machine.problems() == []


def test_an_empty_variable_names_no_compiler(machine):
    machine.set(CC=" ", CXX="")
    assert machine.problems() == []


def test_the_toolkit_of_the_lock_is_named_and_its_fix_fixes(machine):
    """As NVIDIA's wheels bring it: lib instead of lib64, and libcudart.so.13 alone."""
    own = machine.site / "nvidia/cu13"
    machine.write("site/nvidia/cu13/include/cuda_runtime.h", "")
    machine.write("site/nvidia/cu13/lib/libcudart.so.13", "")
    (machine.cuda / "bin/nvcc").unlink()
    [finding] = [finding for finding in machine.examine() if finding.status is not PASS]
    assert str(own) not in finding.fix, "it has no nvcc"
    machine.program("nvcc", "#!/bin/sh\necho 'release 13.0, V13.0.88'\n", own / "bin")
    [finding] = [finding for finding in machine.examine() if finding.status is not PASS]
    link = f"mkdir -p {own}/lib64 && ln -s ../lib/libcudart.so.13 {own}/lib64/libcudart.so"
    assert finding.fix.startswith(f"export CUDA_HOME={own}; {link}; or install the CUDA toolkit")
    machine.set(CUDA_HOME=str(own))
    [finding] = [finding for finding in machine.examine() if finding.status is not PASS]
    assert finding.fix.startswith(link), "all that is left to do"
    subprocess.run(link, shell=True, check=True)
    assert machine.problems() == []


def test_compilers_that_do_not_compile_fail(machine):
    machine.program("gcc", "#!/bin/sh\necho 'limits.h: fatal error: bits/libc-header-start.h: not found' >&2\nexit 1\n")
    machine.program("c++", "#!/bin/sh\necho 'fatal error: vector: No such file' >&2\nexit 1\n")
    found = [found for status, check, found in machine.problems()]
    assert len(found) == 2
    assert "bits/libc-header-start.h" in found[0]
    assert "vector" in found[1]


def test_nvcc_is_looked_for_where_the_servers_look(machine, tmp_path):
    elsewhere = tmp_path / "opt"
    shutil.move(machine.cuda, elsewhere)
    machine.set(CUDA_HOME=str(elsewhere))
    assert machine.problems() == []
    machine.set(CUDA_HOME="")
    machine.program("nvcc", f"#!/bin/sh\nexec {elsewhere}/bin/nvcc \"$@\"\n")  # fmt: skip
    [(status, _, found)] = machine.problems()
    assert status is FAIL, "a wrapper on PATH: the headers are not beside it"
    assert "cuda_runtime.h" in found


def test_a_toolkit_without_its_library_is_a_warning(machine):
    """As NVIDIA's wheels bring it: lib instead of lib64, and no libcudart.so."""
    (machine.cuda / "lib64/libcudart.so").unlink()
    [(status, _, found)] = machine.problems()
    assert status is WARNING
    assert "lib64/libcudart.so" in found


def test_nvcc_of_another_cuda_is_a_warning(machine):
    machine.program("nvcc", "#!/bin/sh\necho 'release 12.4, V12.4.1'\n", machine.cuda / "bin")
    [(status, _, found)] = machine.problems()
    assert status is WARNING
    assert "is CUDA 12, torch is built for 13.0" in found


def test_without_a_gpu_kernels_are_not_imported(machine, config):
    (machine.programs / "nvidia-smi").unlink()
    shutil.rmtree(machine.site / "sgl_kernel")
    machine.module("torch", NO_DRIVER)
    asks = changed(config, {"actor.device": "cuda"})
    assert machine.problems(asks) == []
    assert "imports: not looked at" in {f"{f.check}: {f.found[:13]}" for f in machine.examine(asks)}


def test_a_real_compiler_finds_a_header_or_not(tmp_path):
    def found(headers):
        return [one.found for one in kernels._compiler(replace(Node(), headers=headers), *kernels._COMPILERS[0])]

    if Node().which("gcc") is None:
        pytest.skip("no gcc")
    (tmp_path / "Python.h").write_text("int there;\n")
    assert found(tmp_path) == []
    (tmp_path / "Python.h").write_text("#include <no_such_header.h>\n")
    assert "no_such_header.h: No such file" in found(tmp_path)[0]
    assert "Python.h: No such file" in found(Path("nowhere"))[0]
