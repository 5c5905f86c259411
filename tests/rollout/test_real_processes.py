"""Real SGLang on the CPU as processes: ports, start, hang, tensor-parallel ranks, the end with their parent."""

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch

from rollout.config import RolloutConfig
from rollout.errors import ServerStartError
from rollout.fleet.fleet import RolloutFleet
from rollout.fleet.member import Timing
from rollout.server import PARENT
from rollout.server.engine import LocalServer
from rollout.server.server_command import ServerSpec, read_key
from tests.processes import ROOT
from tests.rollout.folders import CONTEXT, VOCABULARY, save_model
from tests.rollout.real_kit import (
    START_S,
    all_of,
    assert_log_probs,
    make_place,
    requests_of,
)

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(torch.cuda.is_available(), reason="these servers are started for the CPU"),
]


def test_a_taken_port_is_named_before_anything_starts(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        spec = ServerSpec(
            model_path=tmp_path, device="cpu", dtype="float32", context_length=8, seed=0, log_path=tmp_path / "log"
        )
        server = LocalServer(RolloutConfig(port=port), spec)
        with pytest.raises(ServerStartError, match=f"rollout.port = {port}"):
            asyncio.run(server.start())
        assert server.process is None
        assert not (tmp_path / "log").exists()


@pytest.mark.slow
def test_a_server_that_cannot_start_shows_its_log(tmp_path: Path) -> None:
    spec = ServerSpec(
        model_path=tmp_path, device="cpu", dtype="float32", context_length=8, seed=0, log_path=tmp_path / "log"
    )
    config = RolloutConfig(extra_args=("--no-such-flag",))
    fleet = RolloutFleet(config, [LocalServer(config, spec)], vocab_size=8, report=print)
    with pytest.raises(ServerStartError, match=r"(?s)ended while it started.*no-such-flag"):
        asyncio.run(fleet.start(START_S))


@pytest.mark.slow
def test_a_stopped_server_is_noticed_and_replaced(tmp_path: Path) -> None:
    loop = asyncio.new_event_loop()
    place = make_place(loop, tmp_path, "llama", deterministic=False)
    fleet = RolloutFleet(
        place.fleet.config,
        [place.server],
        vocab_size=VOCABULARY,
        report=place.reports.append,
        api_key=read_key(tmp_path / "llama.key"),
        timing=Timing(probe_deadline_s=2.0, failed_probes=2, scheduler_interval_s=1.0, scheduler_deadline_s=10.0),
    )
    asked = requests_of(8, seed=9, tokens=200)

    async def work(victim: Callable[[psutil.Process], psutil.Process]) -> None:
        tasks = [asyncio.ensure_future(fleet.generate(one)) for one in asked]
        await asyncio.sleep(0.2)
        assert place.server.process is not None
        main = psutil.Process(place.server.process.pid)
        everything = [main, *main.children(recursive=True)]
        victim(main).suspend()
        assert_log_probs(place.model, asked, await asyncio.gather(*tasks))
        assert psutil.wait_procs(everything, 1)[1] == []

    try:
        place.run(fleet.start(START_S))
        place.run(fleet.publish(place.folder, 1))
        place.run(work(lambda main: main))
        place.run(work(lambda main: next(child for child in main.children() if "scheduler" in child.cmdline()[0])))
        assert fleet.members[0].restarts == 2
    finally:
        place.run(fleet.close())
        loop.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "qwen3_moe"])
def test_tensor_parallel_ranks_hold_their_shares(tmp_path: Path, kind: str) -> None:
    """A vocabulary of 200 is filled up to 256 rows, an MLP of 100 to two times 64, an expert of 40 to two times 32."""
    loop = asyncio.new_event_loop()
    folder = tmp_path / "model"
    model = save_model(folder, kind, seed=4, intermediate_size=100)
    config = RolloutConfig(tensor_parallel=2, max_running_requests=8, kv_cache_tokens=8192, memory_fraction=0.5)
    spec = ServerSpec(
        model_path=folder, device="cpu", dtype="float32", context_length=CONTEXT, seed=0, log_path=tmp_path / "log"
    )
    server = LocalServer(config, spec)
    fleet = RolloutFleet(config, [server], vocab_size=VOCABULARY, report=print)

    async def work() -> None:
        await fleet.start(START_S)
        assert listening(server) == {"127.0.0.1"}
        report = await fleet.publish(folder, 1)
        assert list(report.servers.values()) == [{"qwen2": 62, "qwen3": 70, "qwen3_moe": 78}[kind]]
        asked = requests_of(8, seed=10)
        assert_log_probs(model, asked, await all_of(fleet, asked))
        await fleet.close()

    try:
        loop.run_until_complete(asyncio.wait_for(work(), START_S))
    finally:
        loop.run_until_complete(fleet.close())
        loop.close()


def _eventually(look: Callable[[], list[psutil.Process]], seconds: float = 10) -> list[psutil.Process]:
    began = time.monotonic()
    while not (found := look()):
        assert time.monotonic() - began < seconds
        time.sleep(0.01)
    return found


def listening(server: LocalServer) -> set[str]:
    """Addresses that the processes of a server listen on."""
    assert server.process is not None
    main = psutil.Process(server.process.pid)
    found = [each for process in [main, *main.children(recursive=True)] for each in process.net_connections("inet")]
    return {each.laddr.ip.removeprefix("::ffff:") for each in found if each.status == psutil.CONN_LISTEN}


@pytest.mark.slow
def test_the_server_and_its_children_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    save_model(tmp_path / "model", "qwen3", seed=1)
    script = tmp_path / "parent.py"
    script.write_text(
        "import asyncio, sys, time\n"
        "from pathlib import Path\n"
        "from rollout.server.server_command import ServerSpec\nfrom rollout.config import RolloutConfig\n"
        "from rollout.fleet.fleet import RolloutFleet\nfrom rollout.server.engine import LocalServer\n"
        "config = RolloutConfig(kv_cache_tokens=4096, memory_fraction=0.5)\n"
        "root = Path(sys.argv[1])\n"
        "spec = ServerSpec(model_path=root / 'model', device='cpu', dtype='float32', context_length=64, seed=0,\n"
        "                  log_path=root / 'log')\n"
        "server = LocalServer(config, spec)\n"
        "async def main():\n"
        f"    await RolloutFleet(config, [server], vocab_size=9, report=print).start({START_S})\n"
        "    print(server.process.pid, flush=True)\n"
        "    await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    parent = subprocess.Popen([sys.executable, script, tmp_path], stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        main = psutil.Process(int(parent.stdout.readline()))
        everything = [main, *main.children(recursive=True)]
        assert len(everything) >= 2
        parent.kill()
        began = time.monotonic()
        assert psutil.wait_procs(everything, 20)[1] == [], f"alive after {time.monotonic() - began:.0f} s"
    finally:
        parent.kill()
        parent.wait(10)


@pytest.mark.slow
def test_children_that_have_just_begun_end_with_their_server(tmp_path: Path) -> None:
    """A kill before SGLang itself would notice. On a CPU the children are forked."""
    save_model(tmp_path / "model", "qwen3", seed=1)
    arguments = ("--model-path", str(tmp_path / "model"), "--device", "cpu", "--dtype", "float32", "--port", "0")
    server = subprocess.Popen(
        [sys.executable, "-m", "rollout.server.launch_server", *arguments],
        env=os.environ | {PARENT: str(os.getpid())},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        children = _eventually(lambda: psutil.Process(server.pid).children(recursive=True), seconds=60)
    finally:
        server.kill()
        server.wait(10)
    assert psutil.wait_procs(children, 20)[1] == []


def test_a_spawned_child_ends_with_its_server(tmp_path: Path) -> None:
    """As on GPUs, by what the launcher does in each process that Python spawns for it."""
    script = tmp_path / "server.py"
    script.write_text(
        "import importlib.util, multiprocessing, os, time\n"
        "from rollout.server import PARENT, launch_server\n"
        "if __name__ == '__main__':\n"
        "    __spec__ = importlib.util.find_spec('rollout.server.launch_server')  # as `python -m` sets it\n"
        "    os.environ[PARENT] = str(os.getpid())\n"
        "    work = 'import os, time; print(os.getpid(), flush=True); time.sleep(600)'\n"
        "    multiprocessing.get_context('spawn').Process(target=exec, args=(work,)).start()\n"
        "    time.sleep(600)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    server = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert server.stdout is not None
        child = psutil.Process(int(server.stdout.readline()))
    finally:
        server.kill()
        server.wait(10)
    assert psutil.wait_procs([child], 20)[1] == []
