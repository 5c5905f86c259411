"""What a GPU run needs, on a made-up node: all there, and each thing absent or broken. The modules and programs are
stand-ins; the processes that import and run them are real. No GPU was asked."""

import resource
import shutil
import subprocess
import time
from collections import namedtuple

import psutil
import pytest

from megatron_dapo.config import load_config
from megatron_dapo.doctor import config_checks, machine_checks, probing
from megatron_dapo.doctor.config_checks import examine
from megatron_dapo.doctor.probing import NO_CONFIG, Facts, gpus_of
from megatron_dapo.plan.scenario import changed
from tests.doctor.conftest import GPU, MODULES, NO_DRIVER, TORCH
from tests.plan.conftest import RECIPES

PASS, WARNING, FAIL = "pass", "warning", "fail"


@pytest.fixture(autouse=True)
def _a_large_disk(monkeypatch):
    usage = namedtuple("usage", "free")(10**15)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)


@pytest.fixture(scope="module")
def config():
    """Four GPUs train, four generate, each for itself."""
    return load_config(RECIPES / "qwen2.5_7b_8gpu.yaml", ["rollout.tensor_parallel=1", "rollout.servers=4"])


def only(machine, config=NO_CONFIG):
    """The one problem that there is, and its fix."""
    [(name, finding)] = [(name, one) for name, one in machine.examine(config) if one.status is not PASS]
    return finding.status, name, finding.found, finding.fix


def test_on_a_good_node_everything_passes(machine, config):
    assert machine.problems(config) == []
    assert machine.problems() == []
    found = [finding.found for _, finding in machine.examine(config)]
    assert "8 x NVIDIA H100 80GB HBM3, 81559 MiB, driver 580.65.06" in found
    assert "2.11.0+cu130, CUDA 13.0" in found
    assert set(MODULES) - {"torch"} <= set(found)


# GPUs


def test_gpus_that_other_nodes_bring_are_no_failure(machine, config):
    """But a tensor-parallel group stands on one node, and a server has equal parts on several."""
    machine.program("nvidia-smi", f"#!/bin/sh\necho '{GPU}'\n")
    machine.module("torch", TORCH.replace("return 8", "return 1"))
    status, _, found, _ = only(machine, config)
    assert (status, found.partition("; ")[2]) == (FAIL, "a tensor-parallel group of 2 stands on one node")
    alone = {"actor.layout.tensor": 1, "actor.layout.sequence_parallel": False}
    status, _, found, fix = only(machine, changed(config, alone))
    assert (status, found.partition("; ")[2]) == (WARNING, "trainer and servers need 5 more, on other nodes")
    assert "srun --nodes=1 --gpus-per-node=8 megatron-dapo doctor" in fix
    assert only(machine, changed(config, alone | {"rollout.tensor_parallel": 2}))[0] == WARNING, "on two nodes"
    shared = {"run.mode": "colocated", "actor.layout.data": 4, "rollout.tensor_parallel": 4}
    status, _, found, _ = only(machine, changed(config, alone | shared))
    assert (status, found.partition("; ")[2]) == (FAIL, "run.mode = colocated needs 1 or less")
    machine.set(RAY_ADDRESS="10.0.0.1:6379")
    assert machine.problems(config) == []


def test_a_node_of_a_larger_run_passes_but_for_what_it_does_not_have(machine):
    """Four such nodes: what the guide runs by srun."""
    recipe = load_config(RECIPES / "h100_32.yaml")
    assert [(status, name) for status, name, _ in machine.problems(recipe)] == [(WARNING, "gpus")]


def test_a_login_node_checks_what_it_can_and_a_node_of_a_job_must_have_gpus(machine, monkeypatch):
    recipe = load_config(RECIPES / "h100_32.yaml")
    (machine.programs / "nvidia-smi").unlink()
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 1})
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    status, name, found, _ = only(machine, recipe)
    assert (status, name) == (WARNING, "gpus")
    assert "32 processes of trainer and servers are too many for 2 cores" in found
    assert "host memory" not in {name for name, _ in examine(machine.facts(recipe))}, "its processes run elsewhere"
    machine.set(SLURM_JOB_ID="7")
    assert only(machine, recipe)[0] is FAIL
    cpu = changed(recipe, {"actor.device": "cpu", "actor.layout.tensor": 1, "actor.layout.sequence_parallel": False})
    monkeypatch.delenv("SLURM_JOB_ID")
    assert only(machine, cpu)[0] is FAIL, "no node brings it cores"


def test_too_little_memory_is_a_warning(machine, config, monkeypatch):
    config = changed(config, {"model.path": "examples/quickstart/base"})
    for needed, status in ((1.0, PASS), (1e18, WARNING)):
        monkeypatch.setattr(config_checks, "node_memory", lambda *_, needed=needed: needed)
        assert next(config_checks.check_host_memory(machine.facts(config))).status is status


def test_servers_that_someone_else_runs_need_no_gpu_and_no_kernels_here(machine, config):
    outside = changed(config, {"rollout.urls": ("http://elsewhere:30000",)})
    machine.program("nvidia-smi", f"#!/bin/sh\nfor gpu in 0 1 2 3; do echo '{GPU}'; done\n")
    machine.module("sgl_kernel", None)
    shutil.rmtree(machine.cuda)
    assert {check for _, check, _ in machine.problems(outside)} <= {"ports"}
    assert {check for _, check, _ in machine.problems(config)} >= {"gpus", "imports", "compilers"}


def test_gpus_whose_memory_is_in_use_are_a_warning(machine):
    machine.gpus(GPU.replace(" 4,", " 60000,"))
    assert only(machine)[:3] == (WARNING, "gpus", "memory of GPU 0, 1, 2, 3, 4, 5, 6, 7 is in use")


@pytest.mark.parametrize("memory", ["[N/A]", "1.2.3", "."])
def test_a_cell_that_is_no_number_counts_as_none(memory):
    [gpu] = gpus_of(f"NVIDIA GB10, {memory}, {memory}, 580.95.05\n")
    assert (gpu.memory, gpu.used) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("script", "status", "said"),
    [
        ("echo 'NVIDIA-SMI has failed: no driver.'; exit 9", FAIL, "(exit code 9): NVIDIA-SMI has failed: no driver."),
        ("exec sleep 60", FAIL, "no end within 1 s"),
        ("echo Unknown Error", FAIL, "Unknown Error"),
        ("exit 0", FAIL, "no output"),
        ("echo 'No devices were found'; exit 6", WARNING, "finds no device"),
    ],
)
def test_a_driver_that_lists_no_gpu_is_no_pass(script, status, said, machine, monkeypatch):
    monkeypatch.setattr(probing, "ASK_DEADLINE_S", 1.0 if "sleep" in script else 30.0)
    machine.program("nvidia-smi", f"#!/bin/sh\n{script.replace('sleep', '/bin/sleep')}\n")
    found = only(machine)
    assert found[:2] == (status, "gpus")
    assert said in found[2]
    assert status is WARNING or "reload the driver" in found[3]


def test_a_run_on_the_cpu_asks_no_driver(machine, config):
    machine.program("nvidia-smi", "#!/bin/sh\nexit 9\n")
    cpu = {"actor.device": "cpu", "actor.layout.tensor": 1, "actor.layout.sequence_parallel": False}
    small = changed(config, cpu | {"rollout.servers": 1})
    assert machine.problems(small) == []


def test_without_gpus_the_cpu_takes_what_it_can_hold(machine, config, monkeypatch):
    (machine.programs / "nvidia-smi").unlink()
    assert machine.problems() == []
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 1})
    assert "too many for 2 cores" in only(machine, config)[2]
    machine.module("torch", NO_DRIVER)
    machine.module("sgl_kernel", None)
    found = only(machine, changed(config, {"actor.device": "cuda"}))
    assert found[:3] == (FAIL, "gpus", "none is visible"), "and kernels are not imported"


# torch


@pytest.mark.parametrize(
    ("code", "status", "said"),
    [
        (
            NO_DRIVER,
            FAIL,
            "sees no GPU, nvidia-smi does (driver 580.65.06): RuntimeError: Error 802: system not yet initialized",
        ),
        (TORCH.replace("return 8", "return 2"), WARNING, "sees 2 of 8 GPUs"),
        ("__version__ = '2.11.0+cpu'\nclass version:\n    cuda = None\n", FAIL, "2.11.0+cpu is a build without CUDA"),
        ("import gone", FAIL, "cannot be imported: ModuleNotFoundError: No module named 'gone'"),
    ],
)
def test_a_torch_that_cannot_use_the_gpus_says_why(code, status, said, machine):
    machine.module("torch", code)
    [(found_status, _, found)] = [one for one in machine.problems() if one[1] == "torch"]
    assert found_status is status
    assert said in found


def test_the_driver_that_a_cuda_needs_is_named(machine):
    machine.module("torch", NO_DRIVER)
    assert "CUDA 13 driver 580" in only(machine)[3]


# imports


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
    machine.module(module, None)
    assert machine.problems()[0][:2] == (status, "imports")
    assert f"no {module}" in only(machine)[2]


@pytest.mark.parametrize(
    ("module", "changes"),
    [("torch_memory_saver", {"run.mode": "colocated"}), ("transformer_engine", {"actor.fp8": "hybrid"})],
)
def test_what_the_config_cannot_do_without_fails(module, changes, machine, config):
    machine.module(module, None)
    assert only(machine, config)[0] is WARNING
    assert only(machine, changed(config, changes))[0] is FAIL


@pytest.mark.parametrize(
    ("module", "code", "cause"),
    [
        (
            "transformer_engine.pytorch",
            "raise FileNotFoundError('no torch lib')",
            "broken: FileNotFoundError: no torch lib",
        ),
        ("transformer_engine.pytorch", "import transformer_engine_torch", "No module named 'transformer_engine_torch'"),
        (
            "sgl_kernel",
            "raise ImportError('\\n[sgl_kernel] CRITICAL!\\n- Compute capability: None\\n"
            "- ImportError: libcuda.so.1: cannot open shared object file\\n- ModuleNotFoundError: common_ops')",
            "broken: ImportError: libcuda.so.1: cannot open shared object file",
        ),
        ("flashinfer", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "ended by signal 11"),
        ("flashinfer", "import sys; sys.exit('a library ends the process')", "broken: a library ends the process"),
        ("flashinfer", "print('hello'); raise OSError('no such file')", "broken: OSError: no such file"),
    ],
)
def test_what_is_there_but_broken_fails_with_its_cause(module, code, cause, machine):
    machine.module(module, code)
    status, _, found, fix = only(machine)
    assert status is FAIL
    assert found.startswith(module)
    assert cause in found
    assert "--no-build-isolation" in fix


def test_an_import_that_hangs_is_ended_at_the_deadline(machine, monkeypatch):
    told = machine.root / "grandchild"
    machine.module(
        "flashinfer",
        "import subprocess, pathlib\n"
        "child = subprocess.Popen(['/bin/sleep', '60'])\n"
        f"pathlib.Path({str(told)!r}).write_text(str(child.pid))\n"
        "child.wait()\n",
    )
    monkeypatch.setattr(machine_checks, "_SERVER", ("flashinfer",))
    monkeypatch.setattr(machine_checks, "_TRAINER", ())
    for deadline_s in (2, 10, 40):  # on a busy machine the import may not have begun by then
        monkeypatch.setattr(probing, "IMPORT_DEADLINE_S", deadline_s)
        [finding] = machine_checks.check_imports(machine.facts())
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


# compilers


@pytest.mark.parametrize(
    ("take", "found", "fix"),
    [
        ("bin/gcc", "cannot include Python.h", "install gcc"),
        ("bin/c++", "no c++ on PATH", "install g++"),
        ("bin/ninja", "no ninja on PATH", "make install-gpu"),
        ("include/Python.h", "Python.h: No such file", "python3-dev"),
        ("usr/local/cuda/bin/nvcc", "has no bin/nvcc", "CUDA_HOME"),
        ("usr/local/cuda/include/cuda_runtime.h", "has no include/cuda_runtime.h", "CUDA_HOME"),
        ("usr/local/cuda/lib64/libcudart.so", "has no lib64/libcudart.so", "CUDA_HOME"),
    ],
)
def test_a_compiler_or_header_that_is_missing_fails(take, found, fix, machine):
    (machine.root / take).unlink()
    problem = only(machine)
    assert problem[:2] == (FAIL, "compilers")
    assert found in problem[2]
    assert fix in problem[3]


def test_what_servers_find_is_found(machine, tmp_path):
    """ninja of an environment that is not activated, a toolkit that CUDA_HOME names, an empty CC."""
    (machine.root / "bin/ninja").rename(machine.root / "venv/bin/ninja")
    shutil.move(machine.cuda, tmp_path / "opt")
    machine.set(CUDA_HOME=str(tmp_path / "opt"), CC=" ")
    assert machine.problems() == []


def test_the_toolkit_of_the_lock_is_named_and_its_fix_fixes(machine):
    """As NVIDIA's wheels bring it: lib instead of lib64, and libcudart.so.13 alone."""
    own = machine.site / "nvidia/cu13"
    shutil.rmtree(machine.cuda)
    machine.write("site/nvidia/cu13/include/cuda_runtime.h", "")
    machine.write("site/nvidia/cu13/lib/libcudart.so.13", "")
    assert str(own) not in only(machine)[3], "it has no nvcc"
    machine.write("site/nvidia/cu13/bin/nvcc", "")
    export, _, rest = only(machine)[3].partition("; ")
    assert export == f"export CUDA_HOME={own}"
    subprocess.run(rest.partition("; or")[0], shell=True, check=True, env={"PATH": "/bin:/usr/bin"})
    machine.set(CUDA_HOME=str(own))
    assert machine.problems() == []


def test_a_real_compiler_finds_a_header_or_not(monkeypatch, tmp_path):
    if shutil.which("gcc") is None:
        pytest.skip("no gcc")

    def found() -> str:
        monkeypatch.setattr("sysconfig.get_paths", lambda: {"include": str(tmp_path), "purelib": str(tmp_path)})
        first = next(machine_checks.check_compilers(Facts()))
        return first.found if "Python.h" in first.found else ""

    assert "Python.h: No such file" in found()
    (tmp_path / "Python.h").write_text("#include <no_such_header.h>\n")
    assert "no_such_header.h: No such file" in found()
    (tmp_path / "Python.h").write_text("int there;\n")
    assert found() == ""


# network


@pytest.mark.parametrize("address", ["127.0.1.1", "::1"])
@pytest.mark.parametrize(
    ("variables", "status"),
    [
        ({}, WARNING),
        ({"SLURM_NNODES": ""}, WARNING),
        ({"SLURM_NNODES": "4"}, FAIL),
        ({"RAY_ADDRESS": "10.0.0.1:6379"}, FAIL),
        ({"RAY_ADDRESS": "10.0.0.1:6379", "GLOO_SOCKET_IFNAME": "eth0"}, WARNING),
    ],
)
def test_a_name_that_is_loopback_fails_where_nodes_must_meet(address, variables, status, machine):
    machine.address(address)
    machine.set(**variables)
    found = only(machine)
    assert found[:2] == (status, "network")
    assert f"node7 resolves to {address}" in found[2]


def test_a_run_on_more_gpus_than_this_node_has_is_on_several_nodes(machine, config):
    machine.address("127.0.1.1")
    for more, status in ({}, WARNING), ({"actor.layout.data": 16}, FAIL):
        facts = machine.facts(changed(config, more))
        assert [found.status for found in config_checks.findings_of(machine_checks.check_network(facts))] == [status]


def test_adapters_that_are_down_or_absent_or_not_in_the_container_are_a_warning(machine):
    machine.write("sys/class/infiniband/mlx5_0/ports/1/state", "2: INIT\n")
    assert "(mlx5_0:1 2: INIT, mlx5_1:1 1: DOWN)" in only(machine)[2]
    shutil.rmtree(machine.root / "sys/class/infiniband")
    assert "no adapter" in only(machine)[2]
    machine.write("sys/class/infiniband/mlx5_0/ports/1/state", "4: ACTIVE\n")
    (machine.root / "dev/infiniband/uverbs0").unlink()
    assert "uverbs" in only(machine)[2]


def test_limits_that_are_too_low_are_warnings(machine, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda name: (65536, 65536))
    assert only(machine)[2] == "at most 64 KiB of locked memory for NCCL over InfiniBand"
    shutil.rmtree(machine.root / "dev/shm")
    assert machine.problems()[0][2].startswith("0.0 GB of shared memory free")


def test_gpu_nodes_need_more_shared_memory(machine, monkeypatch):
    usage = namedtuple("usage", "free")(5e9)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    assert only(machine)[1] == "limits"
    (machine.programs / "nvidia-smi").unlink()
    assert machine.problems() == []
