"""The launcher's environment and command line, and that a server does not outlive its parent."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from rollout import launch_server
from rollout.command import ServerSpec, server_arguments
from rollout.config import RolloutConfig
from rollout.cpu import SWITCH, CpuMode
from rollout.server import tail


def spec(**changes: object) -> ServerSpec:
    given = {
        "model_path": Path("/models/tiny"),
        "device": "cpu",
        "dtype": "float32",
        "context_length": 1024,
        "seed": 11,
        "log_path": Path("log"),
    }
    return ServerSpec(**(given | changes))  # type: ignore[arg-type]


def value(arguments: list[str], flag: str) -> str:
    assert arguments.count(flag) == 1
    return arguments[arguments.index(flag) + 1]


def test_a_cpu_server_gets_our_backends_and_room_for_every_response() -> None:
    arguments = server_arguments(RolloutConfig(max_running_requests=32), spec(), 31000)
    assert value(arguments, "--device") == "cpu"
    assert value(arguments, "--attention-backend") == "torch_native"
    assert value(arguments, "--decode-attention-backend") == "batched_decode"
    assert value(arguments, "--max-total-tokens") == str(32 * 1024)
    assert value(arguments, "--port") == "31000"
    assert "--enable-deterministic-inference" not in arguments
    assert value(arguments, "--stream-interval") == "4096"
    assert "--incremental-streaming-output" in arguments
    whole = server_arguments(RolloutConfig(stream_every=0), spec(), 31000)
    assert not [one for one in whole if "stream" in one]


def test_a_gpu_server_runs_as_sglang_would() -> None:
    config = RolloutConfig(tensor_parallel=4, memory_fraction=0.7)
    arguments = server_arguments(config, spec(device="cuda", dtype="bfloat16"), 31000)
    assert value(arguments, "--tensor-parallel-size") == "4"
    assert value(arguments, "--mem-fraction-static") == "0.7"
    assert not [one for one in arguments if "attention" in one or "overlap" in one or "max-total" in one]
    assert launch_server.environment(arguments).keys() & {*launch_server.CPU, SWITCH} == set()


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_float32_gpu_server_gets_kernels_that_take_32_bits(deterministic: bool) -> None:
    """SGLang's own choice, FlashAttention 3 or FlashInfer, and its RMS norm refuse float32 at the first request."""
    config = RolloutConfig(deterministic=deterministic)
    arguments = server_arguments(config, spec(device="cuda", dtype="float32"), 31000)
    assert value(arguments, "--attention-backend") == "triton"
    assert arguments.count("--enable-deterministic-inference") == 1


def test_further_arguments_come_last() -> None:
    config = RolloutConfig(deterministic=True, extra_args=("--decode-attention-backend", "torch_native"))
    arguments = server_arguments(config, spec(), 31000)
    assert arguments[-2:] == ["--decode-attention-backend", "torch_native"]
    assert "--enable-deterministic-inference" in arguments
    assert not [one for one in arguments if "stream" in one]


@pytest.mark.parametrize(
    ("arguments", "mode"),
    [
        (["--device", "cpu"], CpuMode.FAST),
        (["--device=cpu", "--enable-deterministic-inference"], CpuMode.DETERMINISTIC),
        (["--device", "cuda"], None),
        (["--model-path", "cpu"], None),
        ([], None),
    ],
)
def test_the_cpu_support_is_switched_on_by_the_device_alone(arguments: list[str], mode: CpuMode | None) -> None:
    environment = launch_server.environment(arguments)
    assert environment.get(SWITCH) == mode
    assert environment["HF_HUB_OFFLINE"] == "1"


def test_tensor_parallel_on_a_cpu_binds_a_core_to_each_process() -> None:
    environment = launch_server.environment(["--device", "cpu", "--tensor-parallel-size", "2"])
    assert len(environment["SGLANG_CPU_OMP_THREADS_BIND"].split("|")) == 2


def test_a_server_ends_with_its_parent(tmp_path: Path) -> None:
    """A stand-in for the server: what the launcher does first, then sleep. The parent is killed, not ended."""
    child = (
        "import time; from rollout import launch_server\n"
        "launch_server.end_with_parent(); print('up', flush=True); time.sleep(100)"
    )
    parent = (
        "import os, subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}], stdout=subprocess.PIPE, text=True,\n"
        f"    env=os.environ | {{'{launch_server.PARENT}': str(os.getpid())}}, start_new_session=True)\n"
        "child.stdout.readline()\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(100)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    server = psutil.Process(int(process.stdout.readline()))
    process.kill()
    process.wait(10)
    assert psutil.wait_procs([server], 10)[1] == []


def test_a_server_whose_parent_is_gone_already_does_not_start() -> None:
    code = "from rollout import launch_server; launch_server.end_with_parent()"
    gone = os.environ | {launch_server.PARENT: "1"}
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], env=gone, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "has ended" in done.stderr
    assert time.monotonic() - began < 60


def test_the_tail_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert "no log" in tail(log)
    log.write_bytes(b"".join(b"line %d \xff\n" % number for number in range(1000)))
    assert tail(log, lines=2) == "line 998 �\nline 999 �"
    assert len(tail(log, lines=500, size=100)) <= 100
