"""Where trainer ranks and servers stand on a Ray cluster: one placement group for all, checked before anything loads.

A tensor-parallel group of the trainer is one bundle, and so is a server, or its part on each of several nodes: a bundle
never spans two nodes. On GPUs that both share (`run.mode: colocated`) a bundle holds whole groups and whole servers, as
many as the larger one has GPUs.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from megatron_dapo.cluster.waits import Waits
from megatron_dapo.config import Config


class PlacementError(RuntimeError):
    """Trainer and servers do not fit on the cluster. The message says what they need and what there is."""

    exit_code = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Bundle:
    """What one node must offer at once, or what it has."""

    what: str
    cpus: int
    gpus: int

    @property
    def amounts(self) -> str:
        return f"{self.gpus} GPUs, {self.cpus} CPUs" if self.gpus else f"{self.cpus} CPUs"


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The places of one run, all held."""

    group: PlacementGroup
    trainer: tuple[int, ...]
    """Bundle of each trainer process; those of a node follow each other. `by_node_and_gpu` makes ranks of them."""
    servers: tuple[tuple[int, ...], ...]
    """Bundles of each server that Ray starts, one a node; none where the coordinator's machine starts them itself."""

    def at(self, bundle: int) -> dict[str, Any]:
        """Ray's options for an actor in a bundle."""
        return {"scheduling_strategy": PlacementGroupSchedulingStrategy(self.group, bundle)}

    def stands(self, bundle: int) -> bool:
        """Whether a living node has the bundle. That of a lost node gets another node as soon as one has room."""
        home = placement_group_table(self.group)["bundles_to_node_id"].get(bundle)
        return any(node["NodeID"] == home and node["Alive"] for node in ray.nodes())


def needed_bundles(config: Config, *, use_gpu: bool, servers: int, nodes: int = 1) -> list[Bundle]:
    """The trainer's tensor-parallel groups, then the servers, each in `nodes` parts; or both together.

    Raises:
        ConfigError: they cannot share GPUs.
    """
    layout, each = config.actor.layout, config.rollout.tensor_parallel
    size, ranks = layout.tensor, layout.world_size
    if config.run.mode == "colocated" and use_gpu and servers:
        config.check_shared_gpus()
        size = max(size, each)
        what = f"{size} trainer ranks and {size // each} servers (TP {each}) on the same GPUs"
        return [Bundle(what=what, cpus=size + size // each, gpus=size)] * (ranks // size)
    trainer = Bundle(what=f"trainer (TP group of {size})", cpus=size, gpus=size if use_gpu else 0)
    what = f"server (TP {each})" if nodes == 1 else f"part of a server (TP {each} on {nodes} nodes)"
    part = each // nodes
    server = Bundle(what=what, cpus=1 if use_gpu else part, gpus=part if use_gpu else 0)
    return [trainer] * (ranks // size) + [server] * servers * nodes


def check_fit(bundles: Sequence[Bundle], nodes: Sequence[Bundle]) -> None:
    """Raise PlacementError unless the bundles fit on the nodes, the largest first on the node with the least room."""
    room = {node.what: [node.gpus, node.cpus] for node in nodes}
    for bundle in sorted(bundles, key=lambda bundle: (bundle.gpus, bundle.cpus), reverse=True):
        fitting = [name for name, (gpus, cpus) in room.items() if gpus >= bundle.gpus and cpus >= bundle.cpus]
        if not fitting:
            raise PlacementError(_explain(bundle, bundles, nodes))
        tightest = min(fitting, key=lambda name: tuple(room[name]))
        room[tightest][0] -= bundle.gpus
        room[tightest][1] -= bundle.cpus


async def place(config: Config, waits: Waits, *, use_gpu: bool, servers: int) -> Placement:
    """Reserve the places of every rank and of `servers` servers.

    Raises:
        PlacementError, ConfigError: they do not fit, whatever the order, or cannot share GPUs.
        Stalled: they would fit, but somebody else holds the places.
    """
    there = cluster_nodes()
    largest = max(1, *(node.gpus if use_gpu else node.cpus for node in there))
    nodes = config.nodes_of_server(largest) if servers else 1
    bundles = needed_bundles(config, use_gpu=use_gpu, servers=servers, nodes=nodes)
    check_fit(bundles, there)
    asked = [{"CPU": bundle.cpus} | ({"GPU": bundle.gpus} if use_gpu else {}) for bundle in bundles]
    group = placement_group(asked, strategy="PACK")
    await waits.wait_for("placement", "Ray", config.run.start_deadline_s, group.ready())
    size = bundles[0].gpus or bundles[0].cpus  # ranks in a bundle
    groups = range(config.actor.layout.world_size // size)
    # Neighbouring ranks talk most: groups on one node get neighbouring numbers, and so do nodes with such addresses.
    node_of = placement_group_table(group)["bundles_to_node_id"]
    address = {node["NodeID"]: natural(node["NodeManagerAddress"]) for node in ray.nodes()}
    ordered = sorted(groups, key=lambda bundle: (address[node_of[bundle]], node_of[bundle], bundle))
    trainer = tuple(bundle for bundle in ordered for _ in range(size))
    own = tuple(tuple(range(at, at + nodes)) for at in range(len(groups), len(bundles), nodes))
    beside = tuple((bundle,) for bundle in trainer[:: config.rollout.tensor_parallel])
    return Placement(group=group, trainer=trainer, servers=beside if servers and not own else own)


def natural(name: str) -> list[Any]:
    """Sorts addresses, host names and GPUs by the numbers in them: 10.0.0.9 before 10.0.0.10, node2 before node10."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]


def by_node_and_gpu(places: Sequence[tuple[str, str]]) -> list[int]:
    """Which of the trainer's processes is rank 0, 1, ...: the nodes in the order in which they come, on a node by GPU.

    So a tensor-parallel group has neighbouring GPUs, and pipeline and data peers on full nodes the GPU of the same
    number, whose network card is on the same rail.

    Args:
        places: node and GPU of each process; the GPU is a number, a UUID, or empty on the CPU.
    """
    nodes = list(dict.fromkeys(node for node, _ in places))
    return sorted(range(len(places)), key=lambda at: (nodes.index(places[at][0]), natural(places[at][1])))


def cluster_nodes() -> list[Bundle]:
    """The living nodes of the cluster that this process has joined."""
    found = []
    for node in ray.nodes():
        if node["Alive"]:
            cpus, gpus = (int(node["Resources"].get(kind, 0)) for kind in ("CPU", "GPU"))
            found.append(Bundle(what=f"{node['NodeManagerAddress']} ({node['NodeID'][:6]})", cpus=cpus, gpus=gpus))
    return found


def _explain(first: Bundle, bundles: Sequence[Bundle], nodes: Sequence[Bundle]) -> str:
    kinds = dict.fromkeys(bundles)
    asked = "".join(f"  {bundles.count(kind)} x {kind.what}: {kind.amounts} on one node\n" for kind in kinds)
    there = "".join(f"  {node.what}: {node.amounts}\n" for node in nodes)
    told = f"no node has room for a {first.what}. Asked for by actor.layout and rollout"
    remedy = "Lower actor.layout, rollout.servers or rollout.tensor_parallel, or give the job more nodes."
    return f"{told}:\n{asked}The cluster has:\n{there}{remedy}"
