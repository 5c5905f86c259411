"""Whether a run fits on a cluster, and what it says when not."""

import asyncio
from pathlib import Path

import pytest

from megatron_dapo.cluster import placement
from megatron_dapo.cluster.placement import Bundle, PlacementError, by_node_and_gpu, check_fit, natural, needed_bundles
from megatron_dapo.config import load_config

CONFIG = Path(__file__).parents[2] / "examples" / "quickstart" / "dapo.yaml"


def bundles(*overrides, servers, nodes=1):
    config = load_config(
        CONFIG, ["actor.layout.tensor=2", "actor.layout.data=1", f"rollout.servers={max(1, servers)}", *overrides]
    )
    return needed_bundles(config, use_gpu=True, servers=servers, nodes=nodes)


def nodes(*gpus):
    return [Bundle(what=f"n{at}", cpus=64, gpus=count) for at, count in enumerate(gpus)]


def test_a_tensor_parallel_group_is_one_bundle_and_so_is_a_server():
    found = bundles("actor.layout.tensor=2", "actor.layout.data=3", "rollout.tensor_parallel=4", servers=2)
    assert [bundle.gpus for bundle in found] == [2, 2, 2, 4, 4]
    assert [bundle.cpus for bundle in found] == [2, 2, 2, 1, 1]


def test_colocated_servers_and_ranks_are_in_the_same_bundles():
    shared = ("run.mode=colocated", "actor.offload.between_phases=all", "actor.layout.data=4")
    found = bundles(*shared, "actor.layout.tensor=2", "rollout.tensor_parallel=4", servers=2)
    assert [(bundle.gpus, bundle.cpus) for bundle in found] == [(4, 5), (4, 5)], "two groups of ranks and a server"
    found = bundles(*shared, "actor.layout.tensor=4", "rollout.tensor_parallel=2", servers=8)
    assert [(bundle.gpus, bundle.cpus) for bundle in found] == [(4, 6)] * 4, "a group of ranks and two servers"
    alone = bundles(*shared, "actor.layout.tensor=2", servers=0)
    assert [bundle.gpus for bundle in alone] == [2] * 4, "servers of this machine are none of Ray's"


@pytest.mark.parametrize(
    ("gpus", "fits"), [((8, 8), True), ((8, 6), True), ((8, 5), False), ((3, 3, 3, 3), False), ((4, 4, 2, 2, 2), True)]
)
def test_bundles_fit_only_where_none_is_split(gpus, fits):
    asked = bundles("actor.layout.tensor=2", "actor.layout.data=3", "rollout.tensor_parallel=4", servers=2)
    if fits:
        check_fit(asked, nodes(*gpus))
        return
    with pytest.raises(PlacementError):
        check_fit(asked, nodes(*gpus))


def test_a_server_that_is_larger_than_a_node_has_a_bundle_on_each_of_its_nodes():
    asked = bundles("rollout.tensor_parallel=16", servers=2, nodes=2)
    assert [bundle.gpus for bundle in asked] == [2, 8, 8, 8, 8]
    check_fit(asked, nodes(2, 8, 8, 8, 8))
    with pytest.raises(PlacementError) as caught:
        check_fit(asked, nodes(2, 8, 8, 8))
    assert "4 x part of a server (TP 16 on 2 nodes): 8 GPUs, 1 CPUs on one node" in str(caught.value)


def test_a_cluster_without_a_single_cpu_is_too_small(monkeypatch):
    monkeypatch.setattr(placement, "cluster_nodes", lambda: [Bundle(what="head", cpus=0, gpus=0)])
    with pytest.raises(PlacementError):
        asyncio.run(placement.place(load_config(CONFIG), None, use_gpu=False, servers=1))


def test_the_error_says_what_is_asked_for_and_what_there_is():
    with pytest.raises(PlacementError) as caught:
        check_fit(bundles("actor.layout.tensor=2", servers=2), nodes(2, 1))
    for part in ("1 x trainer (TP group of 2): 2 GPUs", "2 x server (TP 1): 1 GPUs", "n0: 2 GPUs", "n1: 1 GPUs"):
        assert part in str(caught.value)


def test_ranks_are_numbered_by_gpu_within_a_node_and_the_nodes_keep_their_order():
    places = [("b", "7"), ("b", "10"), ("b", "2"), ("a", "GPU-8a"), ("a", "GPU-1c")]
    assert [places[at] for at in by_node_and_gpu(places)] == [
        ("b", "2"),
        ("b", "7"),
        ("b", "10"),
        ("a", "GPU-1c"),
        ("a", "GPU-8a"),
    ]
    assert by_node_and_gpu([("a", ""), ("a", ""), ("b", "")]) == [0, 1, 2], "on the CPU as they come"


def test_nodes_stand_in_the_order_of_their_addresses_and_names_behind_them() -> None:
    addresses = ["node-b", "10.0.0.10", "node-a", "10.0.0.9", "9.255.255.255"]
    assert sorted(addresses, key=natural) == ["9.255.255.255", "10.0.0.9", "10.0.0.10", "node-a", "node-b"]
