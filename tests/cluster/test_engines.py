"""Which GPUs the servers of a run get."""

import asyncio
import itertools
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from megatron_dapo.cluster import engines as servers
from megatron_dapo.cluster.engines import gpus_for_servers, own_engines, visible_gpus
from megatron_dapo.cluster.placement import PlacementError
from megatron_dapo.config import Config, ConfigError, load_config
from rollout.server.engine import LocalServer, RemoteServer

CONFIG = Path(__file__).parents[2] / "examples" / "quickstart" / "dapo.yaml"


def configured(*overrides: str) -> Config:
    """A trainer of two GPUs in a tensor-parallel group, and one server."""
    return load_config(CONFIG, ["actor.layout.tensor=2", "actor.layout.data=1", "rollout.servers=1", *overrides])


def places(tmp_path, gpus, *overrides):
    config = configured(*overrides)
    engines = own_engines(config, tmp_path, gpus=gpus_for_servers(config, gpus))
    assert all(isinstance(engine, LocalServer) for engine in engines)
    return [engine.spec.gpus for engine in engines if isinstance(engine, LocalServer)]


def test_servers_take_the_gpus_behind_the_trainers(tmp_path):
    gpus = ("0", "1", "2", "3", "4", "5")
    assert places(tmp_path, gpus, "rollout.servers=2", "rollout.tensor_parallel=2") == [("2", "3"), ("4", "5")]


COLOCATED = ("run.mode=colocated", "actor.offload.between_phases=all")


def test_colocated_servers_stand_on_the_trainers_gpus(tmp_path):
    gpus = ("0", "1", "2", "3")
    four = (*COLOCATED, "actor.layout.data=2")
    assert places(tmp_path, gpus, *four, "rollout.servers=2", "rollout.tensor_parallel=2") == [("0", "1"), ("2", "3")]
    assert places(tmp_path, gpus, *four, "rollout.servers=4") == [("0",), ("1",), ("2",), ("3",)]
    with pytest.raises(ConfigError, match=r"= 1 must be the 4 GPUs of actor\.layout; set rollout\.servers to 4"):
        places(tmp_path, gpus, *four)
    with pytest.raises(ConfigError, match=r"tensor = 2 and rollout\.tensor_parallel = 3 one must divide"):
        places(tmp_path, gpus, *COLOCATED, "actor.layout.data=3", "rollout.servers=2", "rollout.tensor_parallel=3")


def test_the_users_own_choice_of_gpus_is_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7,GPU-8a")
    assert visible_gpus(3) == ("4", "7", "GPU-8a")
    assert places(tmp_path, visible_gpus(3)) == [("GPU-8a",)]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert visible_gpus(2) == ("0", "1")


def test_too_few_gpus_are_refused_with_both_numbers(tmp_path):
    with pytest.raises(PlacementError, match=r"actor\.layout needs 2 GPUs.* 1 more.* offers 2"):
        places(tmp_path, ("0", "1"))
    with pytest.raises(PlacementError, match=r"= 2 GPUs; there are 1 for them"):
        own_engines(configured("rollout.servers=2"), tmp_path, gpus=("0",))


def test_without_gpus_servers_run_on_the_cpu_and_urls_name_others(tmp_path):
    assert places(tmp_path, ()) == [()]
    remote = own_engines(configured('rollout.urls=["http://a:1"]'), tmp_path, gpus=())
    assert [type(engine) for engine in remote] == [RemoteServer]


def test_no_two_servers_draw_the_same_noise(tmp_path):
    overrides = ["run.seed=4294967294", "rollout.servers=3"]
    engines = own_engines(configured(*overrides), tmp_path, gpus=())
    assert [engine.spec.seed for engine in engines] == [4294967294, 4294967295, 0]


@pytest.mark.parametrize(
    ("host", "heard"),
    [("127.0.0.1", "10.0.0.7"), ("0.0.0.0", "10.0.0.7"), ("::", "10.0.0.7"), ("10.1.0.7", "10.1.0.7")],
)
def test_a_server_on_a_cluster_listens_where_other_nodes_reach_it(monkeypatch, tmp_path, host, heard):
    monkeypatch.setattr(servers.ray.util, "get_node_ip_address", lambda: "10.0.0.7")
    config = configured(f"rollout.host='{host}'")
    (local,) = own_engines(config, tmp_path, gpus=())
    assert servers.ServerHost(config.rollout, local.spec).url.startswith(f"http://{heard}:")


def test_a_server_takes_as_few_nodes_as_hold_equal_parts_of_it():
    def nodes(each, size, *overrides):
        return configured(f"rollout.tensor_parallel={each}", *overrides).nodes_of_server(size)

    assert [nodes(each, 8) for each in (1, 8, 10, 16, 24, 64)] == [1, 1, 2, 2, 3, 8]
    for each, size in itertools.product(range(1, 65), (2, 7, 8)):
        if each % -(-each // size) == 0 and each > size:
            assert size < 2 * (each // nodes(each, size)) <= 2 * size, "two parts of it never share a node"
    with pytest.raises(ConfigError, match=r"tensor_parallel = 9: .* which has 8, and 2 nodes .* set it to 16"):
        nodes(9, 8)
    with pytest.raises(ConfigError, match=r"which has 8; run\.mode = colocated needs 8 or less"):
        nodes(16, 8, *COLOCATED)
    assert nodes(8, 8, *COLOCATED) == 1


def test_a_part_of_a_server_takes_no_configured_port_and_the_first_says_where_they_meet(monkeypatch, tmp_path):
    monkeypatch.setattr(servers.ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    config = configured("rollout.port=23456")
    (local,) = own_engines(config, tmp_path, gpus=())
    first, second = (servers.ServerHost(config.rollout, part) for part in local.spec.on_nodes(2))
    assert (first.url, second.url) == ("http://127.0.0.1:23456", "http://127.0.0.1:0")
    host, _, port = first.meeting().partition(":")
    assert host == "127.0.0.1"
    assert int(port) in range(20000, 32768)
    with socket.socket() as other, pytest.raises(OSError, match="Address already in use"):
        other.bind((host, int(port)))


@pytest.mark.parametrize("living", [(True, True), (True, False), (False, True)])
def test_a_server_is_lost_with_any_of_its_parts_and_its_last_words_are_those_of_all(living, monkeypatch, tmp_path):
    async def answer(alive: bool) -> bool:
        return alive

    async def looked() -> bool:
        (local,) = own_engines(configured(), tmp_path, gpus=())
        server = servers.RayServer(local.config, local.spec, None, (3, 7), None)  # type: ignore[arg-type]
        for part, alive in zip(local.spec.on_nodes(2), living, strict=True):
            part.log_path.write_text(f"last words of {part.node_rank}\n")
            server._hosts.append(SimpleNamespace(alive=SimpleNamespace(remote=partial(answer, alive))))
        assert server.log_tail() == "last words of 0\nlast words of 1"
        server._alive = True
        with suppress(TimeoutError):
            await asyncio.wait_for(server._look(), 0.2)
        return server.alive()

    monkeypatch.setattr(servers, "LOOK_INTERVAL_S", 0.01)
    assert asyncio.run(looked()) == all(living)


LIKE_SGLANG = """
import subprocess, sys, time
for title in ("sglang::scheduler_TP4", "sglang::scheduler_TP5", "other"):
    code = f"import setproctitle, time; setproctitle.setproctitle({title!r}); print(flush=True); time.sleep(600)"
    subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE).stdout.readline()
print(flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize(("rank", "ended", "lives"), [(1, 1, False), (1, 2, True), (0, 1, True)])
def test_a_further_part_is_lost_with_any_of_its_ranks_which_sglang_does_not_see(rank, ended, lives, tmp_path):
    (local,) = own_engines(configured(), tmp_path, gpus=())
    part = servers.ServerHost(replace(local.config, host="10.0.0.7"), local.spec.on_nodes(2)[rank])
    assert not part.alive(), "not started"
    command = [sys.executable, "-c", LIKE_SGLANG]
    part.process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert part.process.stdout is not None
        part.process.stdout.readline()
        assert part.alive()
        child = sorted(psutil.Process(part.process.pid).children(), key=lambda each: each.create_time())[ended]
        child.kill()
        while child.status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)
        assert part.alive() == lives
    finally:
        part.kill()
