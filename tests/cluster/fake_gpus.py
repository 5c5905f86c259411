"""`python -m tests.cluster.fake_gpus`: ranks and servers on a Ray cluster of this machine whose nodes claim GPUs.

Ray hands out GPUs that it was told of, whether they exist or not. What would use them is left out: a rank builds no
model, a server starts no process. Prints one line of JSON. A process of its own, since Ray reads how it authenticates
when it is imported, and pickles the classes below by value only from a main module.
"""

import asyncio
import json
import os
import random
import secrets
import tempfile
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0"}

import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import remove_placement_group

from megatron_dapo.actor.device.communicators import Communicators
from megatron_dapo.actor.step_data import MicroBatchPlan, Responses
from megatron_dapo.cluster import engines as servers
from megatron_dapo.cluster import trainer
from megatron_dapo.cluster.engines import placed_engines
from megatron_dapo.cluster.placement import place
from megatron_dapo.cluster.trainer_rank import TrainerRank
from megatron_dapo.cluster.waits import Waits
from megatron_dapo.config import Config, load_config
from rollout.errors import ServerStartError

CONFIG = Path(__file__).parents[2] / "examples" / "quickstart" / "dapo.yaml"
STORE_BYTES = 128 << 20
NODE = {"num_cpus": 8, "num_gpus": 4, "object_store_memory": STORE_BYTES}
SYSTEM = {"health_check_initial_delay_ms": 1000, "health_check_period_ms": 1000, "health_check_failure_threshold": 3}


class Actor:
    """Remembers what it is asked for."""

    def __init__(self) -> None:
        self.communicators, self.asked = Communicators(used=False), list[tuple[int, int]]()

    def log_probs(self, responses: Responses, plan: MicroBatchPlan, temperature: float) -> None:
        self.asked.append((len(plan.micro_batches), int(responses.sequence_lengths.max())))


class Rank(TrainerRank):
    """Says where it is instead of building a model."""

    def build(self, config: Config, rank: int, rendezvous: str, timeout_s: float) -> dict[str, Any]:
        self._rank, self.actor = rank, Actor()  # type: ignore[assignment]
        return {"rank": rank}

    def where(self) -> tuple[int, str, str]:
        node, gpu, *_ = self.place()
        return self._rank, node, gpu

    def asked(self) -> list[tuple[int, int]]:
        return self.actor.asked  # type: ignore[attr-defined, no-any-return]


class Host:
    """A ServerHost that starts nothing."""

    def __init__(self, config: Any, spec: Any) -> None:
        self.gpus = spec.gpus or tuple(ray.get_runtime_context().get_accelerator_ids()["GPU"])

    def meeting(self) -> str:
        return f"meeting.{ray.get_runtime_context().get_node_id()}:1"

    async def begin(self, meeting: str = "") -> str:
        place = [ray.get_runtime_context().get_node_id(), ",".join(self.gpus), *([meeting] if meeting else [])]
        self.began = f"http://{'/'.join(place)}"
        return self.began

    def where(self) -> tuple[str, int]:
        return self.began, os.getpid()

    def alive(self) -> bool:
        return True

    async def close(self) -> None:
        return None


def config_of(*overrides: str) -> Config:
    layout = "actor.layout.tensor=2", "actor.layout.data=1", "rollout.servers=1", "rollout.tensor_parallel=2"
    return load_config(CONFIG, [*layout, *overrides])


async def ranks_and_colocated_servers(folder: Path) -> dict[str, Any]:
    """Eight ranks on both nodes, whose processes Ray lets have the GPUs of a node in no order; a server a pair."""
    colocated = ("run.mode=colocated", "actor.offload.between_phases=all")
    config = config_of("actor.layout.data=4", "rollout.servers=4", *colocated)
    waits = Waits()
    placement = await place(config, waits, use_gpu=True, servers=4)
    half = len(placement.trainer) // 2
    mixed = [random.Random(3).sample(part, half) for part in (placement.trainer[:half], placement.trainer[half:])]
    shuffled = replace(placement, trainer=(*mixed[0], *mixed[1]))
    model = SimpleNamespace(vocab_size=24, hidden_size=64)
    ranks = trainer.Trainer(config, model, folder, waits, use_gpu=True)  # type: ignore[arg-type]
    await ranks.start(shuffled)
    places = await asyncio.gather(*(rank.where.remote() for rank in ranks._ranks))
    asked = await asyncio.gather(*(rank.asked.remote() for rank in ranks._ranks))
    engines = placed_engines(config, folder / "logs", placement, ranks, on_gpu=True)
    for engine in engines:
        await engine.start()
    found = {"ranks": places, "asked": asked, "servers": [engine.url for engine in engines]}
    for engine in engines:
        engine.kill()
    await ranks.close()
    remove_placement_group(placement.group)
    return found


async def a_server_whose_node_dies(cluster: Cluster, nodes: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A rank pair and two servers, three of four pairs of GPUs: the server that is alone on its node loses it."""
    config = config_of("rollout.servers=2")
    placement = await place(config, Waits(), use_gpu=True, servers=2)
    ranks = trainer.Trainer(config, None, folder, Waits(), use_gpu=True)  # type: ignore[arg-type]
    engines = placed_engines(config, folder / "logs", placement, ranks, on_gpu=True)
    for engine in engines:
        await engine.start()
    homes = [engine.url.split("/")[2] for engine in engines]
    trainers = ray.util.placement_group_table(placement.group)["bundles_to_node_id"][placement.trainer[0]]
    lost = next(at for at, home in enumerate(homes) if home != trainers)
    cluster.remove_node(nodes[homes[lost]], allow_graceful=False)
    while engines[lost].alive():
        await asyncio.sleep(0.2)
    words = ""
    for _ in range(8):  # the first ones while Ray still believes in the node
        if "no other node" in words:
            break
        try:
            await engines[lost].restart()
        except ServerStartError as error:
            words = str(error)
    other = engines[1 - lost]
    before = other.url
    other.kill()  # its actor with it
    await other.restart()
    added = cluster.add_node(**NODE)
    nodes[added.node_id] = added
    await engines[lost].restart()
    found = {"words": words, "lost": homes[lost], "added": added.node_id, "now": engines[lost].url}
    for engine in engines:
        engine.kill()
    remove_placement_group(placement.group)
    return found | {"other": [before, other.url]}


async def a_server_on_two_nodes(cluster: Cluster, nodes: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A server of TP 8 that loses its second node, with a third one for it and a fourth for the rank pair."""
    config = config_of("rollout.tensor_parallel=8")
    placement = await place(config, Waits(), use_gpu=True, servers=1)
    ranks = trainer.Trainer(config, None, folder, Waits(), use_gpu=True)  # type: ignore[arg-type]
    (engine,) = placed_engines(config, folder / "logs", placement, ranks, on_gpu=True)
    await engine.start()
    before = [await host.where.remote() for host in engine._hosts]  # type: ignore[attr-defined]
    cluster.remove_node(nodes[before[1][0].split("/")[2]], allow_graceful=False)
    while engine.alive():
        await asyncio.sleep(0.2)
    for _ in range(8):  # the first ones while Ray still believes in the node
        with suppress(ServerStartError):
            await engine.restart()
            break
    after = [await host.where.remote() for host in engine._hosts]  # type: ignore[attr-defined]
    engine.kill()
    remove_placement_group(placement.group)
    return {"before": before, "after": after, "url": engine.url}


async def main(cluster: Cluster, nodes: dict[str, Any]) -> dict[str, Any]:
    trainer.TrainerRank, servers.ServerHost = Rank, Host  # type: ignore[misc, assignment]
    servers.PLACE_DEADLINE_S, servers.START_DEADLINE_S, servers.ANSWER_DEADLINE_S = 3.0, 30.0, 10.0
    with tempfile.TemporaryDirectory() as folder:
        found = await ranks_and_colocated_servers(Path(folder))
        found |= {"replaced": await a_server_whose_node_dies(cluster, nodes, Path(folder))}
        added = [cluster.add_node(**NODE) for _ in range(2)]
        nodes |= {node.node_id: node for node in added}
        return found | {"divided": await a_server_on_two_nodes(cluster, nodes, Path(folder))}


if __name__ == "__main__":
    head = {"num_cpus": 1, "object_store_memory": STORE_BYTES, "include_dashboard": False, "_system_config": SYSTEM}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        nodes = [cluster.add_node(**NODE) for _ in range(2)]
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        print(json.dumps(asyncio.run(main(cluster, {node.node_id: node for node in nodes}))))
    finally:
        ray.shutdown()
        cluster.shutdown()
