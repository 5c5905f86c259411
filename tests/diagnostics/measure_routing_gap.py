"""`python -m tests.diagnostics.measure_routing_gap [--dtype bfloat16] [--responses 64]`: the gap between engine and
trainer on one tiny random mixture of experts (4 layers, 2 of 8 experts), without and with routing replay, on the same
tokens, at temperature 1; and the share of tokens that the trainer's own routers send elsewhere.
"""

import argparse
import asyncio
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megatron_dapo.actor.actor import MegatronActor
from megatron_dapo.actor.model.hf_config import HFModelConfig
from megatron_dapo.actor.step_data import Responses
from megatron_dapo.cluster.waits import Waits
from megatron_dapo.config import Config, load_config
from megatron_dapo.coordinator.inputs import routing_shape
from megatron_dapo.diagnostics.local_jobs import local_fleet, with_own_servers
from rollout.generation import Generation, GenerationRequest, SamplingParams
from tests.actor.tiny import MIXTURE, save_tiny
from tests.processes import ROOT
from tools.actor_job import ActorJob, packing
from tools.rank_pool import RankPool

DEADLINE_S = 300.0
KEYS = ("model.context_length=256", "rollout.max_new_tokens=120", "algorithm.overlong.buffer=1", "rollout.servers=1")


class RoutingGap(NamedTuple):
    replay: bool
    mean_abs: float
    """Nats a token."""
    max_abs: float
    elsewhere: float
    """Share of tokens with other experts than the engine's in some layer."""


def routing_gaps(folder: Path, dtype: str, responses: int) -> list[RoutingGap]:
    """Without replay, and with it."""
    save_tiny(folder / "model", MIXTURE, tied=False)
    keys = [
        *KEYS,
        f"model.path={folder / 'model'}",
        f"model.dtype={dtype}",
        "actor.routing_replay=true",
        "actor.layout.tensor=1",
        "actor.layout.data=1",
    ]
    config = load_config(ROOT / "examples" / "quickstart" / "dapo.yaml", [*keys, "rollout.deterministic=false"])
    config = replace(config, actor=replace(config.actor, device="cpu"))
    draw = np.random.default_rng(0)
    prompts = [draw.integers(0, 101, int(draw.integers(5, 40))).astype(np.int32) for _ in range(responses)]
    drawn = asyncio.run(_drawn(config, prompts))
    engine = np.concatenate([one.log_probs for one in drawn]).astype(np.float64)
    pairs = [(ids, one.token_ids) for ids, one in zip(prompts, drawn, strict=True)]
    replayed = Responses.of(pairs, routing=[one.routing for one in drawn if one.routing is not None])
    found = []
    with RankPool("cpu") as ranks:
        job = ActorJob(config=config, deadline_s=DEADLINE_S)
        for asked in (replace(replayed, routing=None), replayed):
            scored, chosen = job.run(ranks, _scored, asked, packing(config, asked))
            gap = np.abs(engine - scored)
            other = (np.sort(chosen, -1) != np.sort(replayed.routing, -1)).any((1, 2))
            told = np.ones(len(other), bool)
            told[np.cumsum(replayed.sequence_lengths) - 1] = False  # a last token is routed by nobody
            replay = asked.routing is not None
            found.append(RoutingGap(replay, float(gap.mean()), float(gap.max()), float(other[told].mean())))
    return found


async def _drawn(config: Config, prompts: Sequence[np.ndarray]) -> list[Generation]:
    config, waits = with_own_servers(config, Path(config.model.path)), Waits()
    model = HFModelConfig.load(Path(config.model.path))
    sampling, shape = SamplingParams(max_new_tokens=120), routing_shape(config, model)
    asked = [
        GenerationRequest(
            request_id=f"{at}.", group_id=str(at), prompt_ids=ids, sampling=sampling, seed=at, routing=shape
        )
        for at, ids in enumerate(prompts)
    ]
    with tempfile.TemporaryDirectory(prefix="routing-gap-") as logs:
        async with local_fleet(config, Path(logs), waits, vocab_size=model.vocab_size, report=print) as fleet:
            return list(await asyncio.wait_for(asyncio.gather(*map(fleet.generate, asked)), DEADLINE_S))


def _scored(actor: MegatronActor, responses: Responses, plan) -> tuple[np.ndarray, np.ndarray]:
    """Log-probs, and the experts of each token as its layers computed with them, uint8 [tokens, layers, k]."""
    chosen: list[list[np.ndarray]] = []
    layers = actor._chunks[0].module.decoder.layers
    for number, layer in enumerate(layers):
        take = layer.mlp.router.router_replay.get_replay_topk

        def record(*asked, take=take, number=number):
            values, ids = take(*asked)
            if number == 0:
                chosen.append([])
            chosen[-1].append(ids.numpy().astype(np.uint8))
            return values, ids

        layer.mlp.router.router_replay.get_replay_topk = record
    scored = actor.log_probs(responses, plan, 1.0)
    for layer in layers:
        del layer.mlp.router.router_replay.get_replay_topk
    assert scored is not None
    found: dict[int, np.ndarray] = {}
    for indices, rows in zip(plan.micro_batches[0], chosen, strict=True):
        ends = np.cumsum(responses.sequence_lengths[indices])
        parts = np.split(np.stack(rows, axis=1), ends)
        found |= dict(zip(indices.tolist(), parts, strict=False))
    return scored.log_probs, np.concatenate([found[at] for at in range(len(responses))])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--responses", type=int, default=64)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for gap in routing_gaps(Path(folder), given.dtype, given.responses):
            told = f"{'with' if gap.replay else 'without'} replay"
            print(f"{told:15} mean {gap.mean_abs:.2e}  max {gap.max_abs:.2e}  routed otherwise {gap.elsewhere:.2%}")


if __name__ == "__main__":
    main()
