"""The launcher's environment and command line, and that a server does not outlive its parent."""

import importlib.util
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import psutil
import pytest

from megatron_dapo.config.root import GOVERNED, REFUSED
from rollout.config import RolloutConfig
from rollout.cpu import SWITCH, CpuMode
from rollout.errors import ServerStartError
from rollout.server import KEY_FILE, PARENT, engine, launch_server
from rollout.server.engine import LocalServer, free_port, hold_port, tail
from rollout.server.server_command import ServerSpec, server_arguments
from rollout.weights import changes
from tests.processes import ROOT


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


def test_a_cpu_server_has_room_for_every_response() -> None:
    arguments = server_arguments(RolloutConfig(max_running_requests=32), spec(), 31000)
    assert value(arguments, "--max-total-tokens") == str(32 * 1024)


def test_responses_are_streamed_only_where_the_config_says_so() -> None:
    assert value(server_arguments(RolloutConfig(), spec(), 31000), "--stream-interval") == "4096"
    for config in (RolloutConfig(stream_every=0), RolloutConfig(deterministic=True)):
        assert not [one for one in server_arguments(config, spec(), 31000) if "stream" in one]


def test_a_server_makes_the_output_layers_product_in_float32_only_where_told() -> None:
    for device in ("cpu", "cuda"):
        for told in (False, True):
            arguments = server_arguments(RolloutConfig(), spec(device=device, dtype="bfloat16", fp32_head=told), 31000)
            assert arguments.count("--enable-fp32-lm-head") == told


def test_a_server_gets_the_loader_of_changes_by_a_path_that_sglang_can_import() -> None:
    arguments = server_arguments(RolloutConfig(weight_sync="delta"), spec(), 31000)
    module, _, function = value(arguments, "--custom-weight-loader").rpartition(".")
    assert getattr(importlib.import_module(module), function) is changes.load
    assert "--custom-weight-loader" not in server_arguments(RolloutConfig(weight_sync="distributed"), spec(), 31000)


def test_nothing_of_the_cpu_support_is_in_a_gpu_server() -> None:
    arguments = server_arguments(RolloutConfig(), spec(device="cuda", dtype="bfloat16"), 31000)
    assert not [one for one in arguments if "attention" in one or "overlap" in one or "max-total" in one]
    assert launch_server.environment(arguments).keys() & {*launch_server.CPU, SWITCH} == set()


def test_the_kernels_of_fp8_are_not_compiled_for_every_shape_at_the_start() -> None:
    arguments = server_arguments(RolloutConfig(quantization="fp8"), spec(device="cuda", dtype="bfloat16"), 31000)
    assert launch_server.environment(arguments)["SGLANG_JIT_DEEPGEMM_FAST_WARMUP"] == "1"
    assert "SGLANG_JIT_DEEPGEMM_FAST_WARMUP" in sglang_text("layers/deep_gemm_wrapper/compile_utils.py")


SAVER = ("--enable-memory-saver", "--enable-weights-cpu-backup", "--cuda-graph-backend-prefill")


def test_a_colocated_gpu_server_leaves_its_cuda_graphs_too() -> None:
    arguments = server_arguments(RolloutConfig(), spec(device="cuda", dtype="bfloat16", shares_memory=True), 31000)
    assert value(arguments, "--cuda-graph-backend-prefill") == "disabled", "its default kind refuses the variable"
    assert {*SAVER} <= {*arguments}
    assert launch_server.environment(arguments)["SGLANG_MEMORY_SAVER_CUDA_GRAPH"] == "1"


@pytest.mark.parametrize("alone", [spec(device="cuda", dtype="bfloat16"), spec(shares_memory=True)])
def test_other_servers_keep_all_their_cuda_graphs(alone: ServerSpec) -> None:
    arguments = server_arguments(RolloutConfig(), alone, 31000)
    assert not {*SAVER} & {*arguments}
    assert "SGLANG_MEMORY_SAVER_CUDA_GRAPH" not in launch_server.environment(arguments)


def sglang_text(name: str) -> str:
    found = importlib.util.find_spec("sglang")
    assert found is not None
    assert found.origin is not None
    return (Path(found.origin).parent / "srt" / name).read_text()


def test_sglang_knows_what_it_is_told_and_what_the_config_refuses() -> None:
    """By its text: importing it takes long, and the names are what a new version changes."""
    variables, options = sglang_text("environ.py"), sglang_text("server_args.py")
    for name in (*launch_server.MEMORY_SAVER, launch_server.RENDEZVOUS):
        assert f"    {name} = " in variables
    for name in [*SAVER, *REFUSED, *GOVERNED]:
        field = name.removeprefix("--").replace("-", "_")
        begins = field + (r"\w*" if name.endswith("-") else "")
        known = re.search(rf"^    {begins}: A\[", options, re.MULTILINE) or f'"{name}"' in options
        assert known or name in ABBREVIATED, name


ABBREVIATED = ("--tp", "--dp", "--enable-dp-")
"""Python's argparse takes the beginning of an option for it."""


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, str]]:
    """`launched(*arguments)`: the variables with which SGLang, replaced by nothing, would run."""
    seen: dict[str, str] = {}
    replaced = {
        "sglang.srt.plugins": {"load_plugins": lambda: None},
        "sglang.launch_server": {"run_server": lambda _: seen.update(os.environ)},
        "sglang.srt.server_args": {"prepare_server_args": lambda _: SimpleNamespace()},
        "sglang.srt.utils": {"kill_process_tree": lambda *_, **__: None},
    }
    for name in ("sglang", "sglang.srt", *replaced):
        module = ModuleType(name)
        vars(module).update(replaced.get(name, {}))
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr("rollout.wire.array_frames_server.add", lambda: None)
    monkeypatch.setitem(sys.modules, "megatron", None)  # as `main` does; what stood there comes back after the test
    before = dict(os.environ)
    for name in (PARENT, KEY_FILE, launch_server.RENDEZVOUS, SWITCH):
        monkeypatch.delenv(name, raising=False)

    def launch(*arguments: str) -> dict[str, str]:
        launch_server.main(arguments)
        return seen

    yield launch
    os.environ.clear()
    os.environ.update(before)


def test_the_processes_of_a_gpu_server_meet_without_a_port(launched: Callable[..., dict[str, str]]) -> None:
    place = launched("--device", "cuda")[launch_server.RENDEZVOUS]
    assert place.startswith(f"file:///proc/{os.getpid()}/fd/")
    os.close(int(place.rpartition("/")[2]))


TITLED = """
import sys, types
from rollout.server import launch_server
from rollout.wire import array_frames_server

def serve(_):
    from setproctitle import setproctitle
    setproctitle("sglang::scheduler")
    print(open("/proc/self/cmdline").read().strip(chr(0)))

for name, what, value in (
    ("sglang", "srt", None),
    ("sglang.srt", "plugins", None),
    ("sglang.srt.plugins", "load_plugins", lambda: None),
    ("sglang.launch_server", "run_server", serve),
    ("sglang.srt.server_args", "prepare_server_args", lambda _: types.SimpleNamespace()),
    ("sglang.srt.utils", "kill_process_tree", lambda *_, **__: None),
):
    sys.modules[name] = types.ModuleType(name)
    setattr(sys.modules[name], what, value)
array_frames_server.add = lambda: None
launch_server.main(["--device", "cuda"])
"""
"""A server whose SGLang only takes its title."""


SEES_MEGATRON = '''
import importlib.util, multiprocessing
from rollout.server import launch_server

SEEN = """
from rollout.cpu import standins
standins.install()
from sglang.srt.debug_utils.dumper import _MegatronPlugin
print(_MegatronPlugin._available, flush=True)
"""
if __name__ == "__main__":
    launch_server.hide_megatron() if {hidden} else None
    exec(SEEN)
    __spec__ = importlib.util.find_spec("rollout.server.launch_server" if {hidden} else "this")
    multiprocessing.get_context("spawn").Process(target=exec, args=(SEEN,)).start()
'''


def test_megatron_is_hidden_from_whoever_imports_it_later() -> None:
    code = "from rollout.server.launch_server import hide_megatron; hide_megatron(); import megatron.core"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert "ModuleNotFoundError" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("hidden", [False, True])
def test_no_process_of_a_server_imports_megatron(hidden: bool, tmp_path: Path) -> None:
    """SGLang would, and Megatron-Core 0.19 sets `torch_memory_saver.hook_mode = "torch"` as it is imported: a colocated
    server on an H100 ended at its start, for only "preload" releases CUDA graphs. The first case: it still would."""
    script = tmp_path / "this.py"
    script.write_text(SEES_MEGATRON.format(hidden=hidden))
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{tmp_path}"}
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == [str(not hidden)] * 2, done.stderr[-2000:]


@pytest.mark.parametrize("first", ["HF_HUB_OFFLINE", "PATH"])
def test_a_servers_processes_have_titles_whichever_variable_comes_first(first: str) -> None:
    """The launcher gives HF_HUB_OFFLINE a new value, and so a new place in memory."""
    variables = {first: "", "PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", TITLED], env=variables, capture_output=True, text=True, timeout=60)
    assert done.stdout == "sglang::scheduler\n", done.stderr


@pytest.mark.parametrize("elsewhere", [("--nccl-port", "3000"), ("--dp-size=2",), ("--dist-init-addr", "a:1")])
def test_who_says_where_they_meet_is_heeded(
    launched: Callable[..., dict[str, str]], elsewhere: tuple[str, ...]
) -> None:
    assert launch_server.RENDEZVOUS not in launched("--device", "cuda", *elsewhere)


def test_a_server_that_shares_memory_says_that_it_drops_expandable_segments(
    launched: Callable[..., dict[str, str]], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:512,expandable_segments:True")
    alone = dict(launched("--device", "cuda", "--nccl-port", "3000"))
    assert alone["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    shared = launched("--device", "cuda", "--nccl-port", "3000", "--enable-memory-saver")
    assert "PYTORCH_CUDA_ALLOC_CONF is left out" in capfd.readouterr().out
    assert "PYTORCH_ALLOC_CONF" not in os.environ
    assert shared["SGLANG_MEMORY_SAVER_CUDA_GRAPH"] == "1"
    assert "PYTORCH_CUDA_ALLOC_CONF" not in os.environ


def test_a_port_that_another_program_has_is_not_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    free = free_port("127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as other:
        monkeypatch.setattr(engine, "_PORTS", [other.getsockname()[1], free])
        monkeypatch.setattr(engine, "_PORT_ATTEMPTS", 2)
        for _ in range(8):
            with hold_port(RolloutConfig(), 0) as held:
                assert held.getsockname()[1] == free


def test_a_server_on_several_machines_has_a_process_and_a_log_on_each(monkeypatch: pytest.MonkeyPatch) -> None:
    log, asked = Path("logs/server3.log"), {"--nnodes", "--node-rank", "--dist-init-addr"}
    assert not asked & set(server_arguments(RolloutConfig(), *spec(log_path=log).on_nodes(1), 31000))
    parts = [replace(part, meeting="10.0.0.7:29000") for part in spec(log_path=log, index=3).on_nodes(2)]
    assert [str(part.log_path) for part in parts] == ["logs/server3.log", "logs/server3.node1.log"]
    for rank, part in enumerate(parts):
        arguments = server_arguments(RolloutConfig(tensor_parallel=16), part, 31000)
        assert [value(arguments, flag) for flag in ("--nnodes", "--node-rank")] == ["2", str(rank)]
        assert value(arguments, "--dist-init-addr") == "10.0.0.7:29000"
        assert value(arguments, "--tensor-parallel-size") == "16", "of the whole server"
        assert value(arguments, "--random-seed") == "11", "the same noise at every rank"


def test_a_servers_port_is_its_own_before_it_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs of one machine start servers in the same minute: the second finds the first one's port taken."""
    held = hold_port(RolloutConfig(), 0)
    port = held.getsockname()[1]
    assert 20000 <= port < 32768
    monkeypatch.setattr(engine, "_PORTS", range(port, port + 2))
    monkeypatch.setattr(engine, "_PORT_ATTEMPTS", 2)
    assert {free_port("127.0.0.1") for _ in range(8)} == {port + 1}
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as every HTTP server does
        server.bind(("127.0.0.1", port))
        server.listen()
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
        with pytest.raises(ServerStartError, match=f"server 1 cannot listen on port {port}"):
            hold_port(RolloutConfig(port=port - 1), 1)
    held.close()


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
        "import time; from rollout.server import launch_server\n"
        "launch_server.end_with_parent(); print('up', flush=True); time.sleep(100)"
    )
    parent = (
        "import os, subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}], stdout=subprocess.PIPE, text=True,\n"
        f"    env=os.environ | {{'{PARENT}': str(os.getpid())}}, start_new_session=True)\n"
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
    code = "from rollout.server import launch_server; launch_server.end_with_parent()"
    gone = os.environ | {PARENT: "1"}
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


def environment_of(*extra_args: str, **settings: object) -> dict[str, str]:
    return LocalServer(RolloutConfig(extra_args=extra_args, **settings), spec())._environment()  # type: ignore[arg-type]


def test_both_ends_of_a_process_group_get_the_memory_handles_that_sglang_would_choose(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As `_set_envs_and_config` of sglang.srt.entrypoints.engine; the trainer's ranks get the same."""
    names = ("NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    assert not set(names) & environment_of().keys()
    for extra_args, wanted in {
        (): ("0", "0"),
        ("--enable-nccl-nvls",): ("0", "1"),
        ("--enable-symm-mem",): ("1", "1"),
    }.items():
        environment = environment_of(*extra_args, weight_sync="distributed")
        assert tuple(environment[name] for name in names) == wanted
    assert environment_of(weight_sync="delta").keys() >= set(names)
    for shares, wanted in ((False, "0"), (True, None)):  # by itself a group is made where servers share no GPU
        on_gpu = spec(device="cuda", dtype="bfloat16", shares_memory=shares)
        assert LocalServer(RolloutConfig(), on_gpu)._environment().get(names[0]) == wanted
    monkeypatch.setenv(names[0], "1")
    environment = environment_of(weight_sync="distributed")
    assert tuple(environment[name] for name in names) == ("1", "0"), "a user's own value stays"


def test_a_server_finds_the_programs_of_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's and flashinfer's kernels are built by a bare `ninja`; `.venv/bin/megatron-dapo` activates nothing."""
    monkeypatch.setenv("PATH", "/usr/bin")
    assert environment_of()["PATH"] == f"{Path(sys.executable).parent}{os.pathsep}/usr/bin"
