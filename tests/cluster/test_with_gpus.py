"""What the cluster asks for on a machine with GPUs, with a faked CUDA and a faked Ray: nothing else here runs these
branches."""

import asyncio
import contextlib
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_dapo.cluster import engines, placement, ray_cluster
from megatron_dapo.cluster import rank_weights as module
from megatron_dapo.cluster import trainer as trainer_module
from megatron_dapo.cluster.rank_weights import RankWeights
from megatron_dapo.cluster.trainer_rank import TrainerRank
from megatron_dapo.config import load_config
from megatron_dapo.coordinator import run_context
from rollout.weights.sender import Sent
from rollout.weights.transport import SendRequest
from tests.processes import ROOT

CONFIG = ROOT / "examples" / "quickstart" / "dapo.yaml"
COLOCATED = ["run.mode=colocated", "actor.offload.between_phases=all"]


@pytest.mark.parametrize(
    ("keys", "wanted", "shared"),
    [
        (["actor.layout.tensor=2", "rollout.servers=2"], [("2",), ("3",)], False),
        (
            ["actor.layout.tensor=4", "rollout.servers=4", "run.mode=colocated", "actor.offload.between_phases=all"],
            [("0",), ("1",), ("2",), ("3",)],
            True,
        ),
    ],
)
def test_servers_of_this_machine_get_the_gpus_after_the_trainers_or_beside_its_ranks_the_same(
    monkeypatch, tmp_path, keys, wanted, shared
):
    async def both(run, building, fleet):
        building.close()
        return {"kernels": {}}

    def none(*_, **__):
        return None

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(run_context, "_start_both", both)
    monkeypatch.setattr(run_context, "manifest", none)
    monkeypatch.setattr(run_context, "RolloutFleet", lambda _, ours, **__: SimpleNamespace(ours=ours, close=none))
    config = load_config(CONFIG, ["actor.device=cuda", "actor.layout.data=1", *keys])
    home = SimpleNamespace(
        path=tmp_path, logs=tmp_path, drop_rollout=none, set_results_aside=none, write_text=none, write_json=none
    )
    inputs = SimpleNamespace(model=None, text=SimpleNamespace(vocab_size=1))
    run = SimpleNamespace(
        config=config,
        run_dir=home,
        inputs=inputs,
        console=SimpleNamespace(note=none, aside=none),
        waits=None,
        stack=AsyncExitStack(),
    )
    made, fleet, _, found = asyncio.run(run_context._services(run, SimpleNamespace(rollout_step=0), goes_on=True))
    assert (made.on_gpu, [one.spec.gpus for one in fleet.ours], found) == (True, wanted, shared)
    assert {one.spec.device for one in fleet.ours} == {"cuda"}


def test_colocated_servers_follow_the_ranks_whatever_the_order_of_the_visible_gpus():
    """Ranks are numbered by the names of their GPUs; a handle of one opens on that GPU alone."""
    config = load_config(CONFIG, ["actor.layout.tensor=4", "actor.layout.data=1", "rollout.servers=4", *COLOCATED])
    assert list(engines.gpus_for_servers(config, ("10", "9", "GPU-8a", "GPU-1c"))) == ["9", "10", "GPU-1c", "GPU-8a"]


def test_ray_is_told_of_a_gpu_for_each_rank(monkeypatch, tmp_path):
    told = {}
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(ray_cluster.ray, "init", lambda **options: told.update(options))
    monkeypatch.setattr(ray_cluster, "new_temp_dir", lambda: str(tmp_path))
    monkeypatch.setattr(ray_cluster, "RaySweeper", lambda _: SimpleNamespace(rays="/tmp/x", close=lambda: None))
    for device, gpus in (("auto", 3), ("cuda", 3), ("cpu", 0)):
        assert (ray_cluster.Cluster(processes=3, device=device).use_gpu, told["num_gpus"]) == (gpus > 0, gpus)
    with pytest.raises(placement.PlacementError, match=r"actor\.layout needs 5 GPUs; this machine offers 4"):
        ray_cluster.Cluster(processes=5, device="auto")


@pytest.mark.parametrize(
    ("gpu", "beside", "wanted"),
    [(True, None, (1, 4, ())), (True, ("5", "6", "7", "8"), (1, 0, ("5", "6", "7", "8"))), (False, None, (4, 0, ()))],
)
def test_a_server_actor_asks_for_its_gpus(monkeypatch, tmp_path, gpu, beside, wanted):
    asked = []

    class Actor:
        def options(self, **options):
            asked.append(options)
            return self

        def remote(self, config, spec):
            asked.append(spec)
            raise LookupError

    monkeypatch.setattr(engines.ray, "remote", lambda _: Actor())
    placement = SimpleNamespace(at=lambda _: {}, stands=lambda _: True, servers=((0,),))
    config = load_config(CONFIG, ["rollout.tensor_parallel=4"])
    spec = engines._spec(config, tmp_path, 0, on_gpu=gpu)
    server = engines.RayServer(config.rollout, spec, placement, (0,), beside and SimpleNamespace(gpus=beside))
    with pytest.raises(LookupError):
        asyncio.run(server.start())
    assert (asked[0]["num_cpus"], asked[0]["num_gpus"], asked[1].gpus) == wanted


@pytest.mark.parametrize("on_gpu", [True, False])
def test_a_rank_asks_for_a_gpu(monkeypatch, on_gpu):
    asked = {}

    def options(**given):
        asked.update(given)
        raise LookupError

    monkeypatch.setattr(trainer_module.ray, "remote", lambda _: SimpleNamespace(options=options))
    made = trainer_module.Trainer(load_config(CONFIG), None, Path(), None, use_gpu=on_gpu)
    with pytest.raises(LookupError):
        asyncio.run(made.start(SimpleNamespace(trainer=(0,), at=lambda _: {})))
    assert asked["num_gpus"] == int(on_gpu)


def test_a_rank_tells_its_gpus_memory(monkeypatch):
    for name, value in {
        "is_initialized": lambda: True,
        "mem_get_info": lambda: (3, 8),
        "memory_reserved": lambda: 4,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    rank = TrainerRank.__new__(TrainerRank)
    rank._rank = 5
    found = rank.device_memory()
    assert (found.rank, found.free, found.total, found.reserved) == (5, 3, 8, 4)


def test_ray_is_asked_for_the_gpus_of_every_bundle(monkeypatch):
    asked = []

    async def wait_for(*_, **__):
        return None

    def group(bundles, strategy):
        asked.extend(bundles)
        return SimpleNamespace(ready=lambda: None)

    there = [placement.Bundle(what=str(at), cpus=64, gpus=gpus) for at, gpus in enumerate((4, 4, 2))]
    monkeypatch.setattr(placement, "cluster_nodes", lambda: there)
    monkeypatch.setattr(placement, "placement_group", group)
    monkeypatch.setattr(
        placement, "placement_group_table", lambda _: {"bundles_to_node_id": dict.fromkeys(range(3), "n")}
    )
    monkeypatch.setattr(placement.ray, "nodes", lambda: [{"NodeID": "n", "NodeManagerAddress": "10.0.0.1"}])
    config = load_config(CONFIG, ["actor.layout.tensor=2", "actor.layout.data=1", "rollout.tensor_parallel=8"])
    found = asyncio.run(placement.place(config, SimpleNamespace(wait_for=wait_for), use_gpu=True, servers=1))
    assert asked == [{"CPU": 2, "GPU": 2}, {"CPU": 1, "GPU": 4}, {"CPU": 1, "GPU": 4}]
    assert (found.trainer, found.servers) == ((0, 0), ((1, 2),))


@pytest.mark.parametrize(("transport", "given_back"), [("tensor", ["ipc", "cache"]), ("distributed", [])])
def test_after_a_send_beside_the_servers_memory_is_given_back(monkeypatch, transport, given_back):
    told = []
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: told.append("ipc"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: told.append("cache"))
    monkeypatch.setattr(module, "gather_objects", lambda value, group: [value])
    store = SimpleNamespace(_get_default_store=lambda: None)
    alone = SimpleNamespace(get_global_rank=lambda *_: 0, PrefixStore=lambda *_: None, distributed_c10d=store)
    monkeypatch.setattr(module, "dist", alone)

    class Sender:
        def __init__(self, *_):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *_):
            told.append("closed")

        def report(self):
            return Sent()

    monkeypatch.setattr(module, "WeightSender", Sender)
    actor = SimpleNamespace(
        rank=0,
        device=SimpleNamespace(device=torch.device("cuda", 0)),
        stream_weights=lambda *_, **__: None,
        passes=SimpleNamespace(pipeline_group="stages"),
    )
    weights = RankWeights(actor, bucket_bytes=1)
    weights._checksums = lambda kinds: contextlib.nullcontext()
    request = SendRequest(transport=transport, targets=(), label="1", deadline_s=1, backend="gloo", api_key_file=None)
    weights.send(request, ())
    assert told == ["closed", *given_back]
