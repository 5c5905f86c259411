"""`python -m tests.diagnostics.measure_head_gap CONFIG [--responses 256] [key=value ...]`: the gap between engine and
trainer in bfloat16 with the output layer in float32 (`model.fp32_head`) on neither side, on one alone, on both.

All four numbers are of the same tokens: one engine draws them, both engines score them by prefill, at temperature 1.
"""

import argparse
import asyncio
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megatron_dapo.actor.model.hf_config import HFModelConfig
from megatron_dapo.actor.step_data import Responses
from megatron_dapo.cluster.waits import Waits
from megatron_dapo.config import Config, load_config
from megatron_dapo.coordinator.inputs import read_inputs
from megatron_dapo.diagnostics.local_jobs import local_device, local_fleet, with_own_servers
from rollout.generation import GenerationRequest, SamplingParams
from tools.actor_job import ActorJob
from tools.bisect import _by_megatron, score
from tools.rank_pool import RankPool

Pairs = list[tuple[np.ndarray, np.ndarray]]
DEADLINE_S = 300.0


class HeadGap(NamedTuple):
    engine: bool
    """Whether its output layer is in float32."""
    trainer: bool
    mean_abs: float
    """Nats a token."""
    max_abs: float


def head_gaps(config: Config, prompts: Sequence[np.ndarray], sampling: SamplingParams) -> list[HeadGap]:
    """Neither, the trainer alone, the engine alone, both."""
    engine, trainer = {}, {}
    pairs, engine[False] = asyncio.run(_score(_with(config, False), prompts, sampling, None))
    _, engine[True] = asyncio.run(_score(_with(config, True), prompts, sampling, pairs))
    with RankPool(local_device(config)) as ranks:
        for told in (False, True):
            job = ActorJob(config=_with(config, told), deadline_s=DEADLINE_S)
            trainer[told] = _by_megatron(ranks, job, Responses.of(pairs))
    gaps = {sides: np.abs(engine[sides[0]] - trainer[sides[1]]) for sides in product((False, True), repeat=2)}
    return [HeadGap(*sides, float(gap.mean()), float(gap.max())) for sides, gap in gaps.items()]


def _with(config: Config, fp32_head: bool) -> Config:
    model = replace(config.model, dtype="bfloat16", fp32_head=fp32_head)
    return replace(config, model=model, actor=replace(config.actor, device=local_device(config)))


async def _score(
    config: Config, prompts: Sequence[np.ndarray], sampling: SamplingParams, pairs: Pairs | None
) -> tuple[Pairs, np.ndarray]:
    """Responses, drawn where there are none yet, and an engine's log-probs of them, float64 [N]."""
    config, waits = with_own_servers(config, Path(config.model.path)), Waits()
    config = replace(config, rollout=replace(config.rollout, servers=1, deterministic=False))
    vocabulary = HFModelConfig.load(Path(config.model.path)).vocab_size
    with tempfile.TemporaryDirectory(prefix="head-gap-") as folder:
        async with local_fleet(config, Path(folder), waits, vocab_size=vocabulary, report=print) as fleet:
            if pairs is None:
                asked = [
                    GenerationRequest(
                        request_id=f"draw-{at}.", group_id=str(at), prompt_ids=ids, sampling=sampling, seed=at
                    )
                    for at, ids in enumerate(prompts)
                ]
                drawn = await asyncio.gather(*map(fleet.generate, asked))
                pairs = [(ids, one.token_ids) for ids, one in zip(prompts, drawn, strict=True)]
            client = fleet.members[0].client
            whole = [np.concatenate(pair).astype(np.int32) for pair in pairs]
            each = [score(client, f"score-{at}.", ids, pairs[at][0].size) for at, ids in enumerate(whole)]
            scored = await asyncio.wait_for(asyncio.gather(*each), DEADLINE_S)
    return pairs, np.concatenate(scored).astype(np.float64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--responses", type=int, default=256)
    given = parser.parse_args()
    config = load_config(given.config, given.overrides)
    inputs = read_inputs(config)
    prompts = [prompt.ids for prompt in inputs.prompts.prompts[: given.responses]]
    longest = min(256, config.rollout.max_new_tokens)
    sampling = SamplingParams(max_new_tokens=longest, stop_token_ids=inputs.text.stop_token_ids)
    for gap in head_gaps(config, prompts, sampling):
        sides = f"engine {'float32' if gap.engine else 'bfloat16'}, trainer {'float32' if gap.trainer else 'bfloat16'}"
        print(f"{sides:40} mean {gap.mean_abs:.2e}  max {gap.max_abs:.2e}")


if __name__ == "__main__":
    main()
