"""Where a gap between engine and trainer begins: a few responses re-scored by every part on the way from one to the
other. One server and a few rank processes; no Ray.

    engine decode -> engine prefill -> Hugging Face, float32 -> Megatron, one process -> Megatron, the config's layout

Each part scores the tokens that the engine drew, at temperature 1. Neighbours share all but one thing: decode and
prefill the kernels of one token and of many, prefill and Hugging Face the implementation (and the type), Hugging Face
and Megatron the mapping of the weights, one process and many the parallel layout.
"""

import asyncio
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np

from megatron_dapo.actor.model.hf_config import HFModelConfig
from megatron_dapo.actor.packing import MicroBatchPlan, plan_for_actor
from megatron_dapo.actor.ranks import RankPlace, RankPool
from megatron_dapo.actor.step_data import LogProbs, Responses
from megatron_dapo.config import Config
from megatron_dapo.config.actor_config import LayoutConfig
from rollout.fleet.fleet import RolloutFleet
from rollout.generation import GenerationRequest, SamplingParams
from rollout.server.engine import LocalServer
from rollout.server.server_command import ServerSpec

DECODE, PREFILL, REFERENCE, ONE_RANK, LAYOUT = (
    "engine decode",
    "engine prefill",
    "Hugging Face float32",
    "Megatron TP=1",
    "Megatron, the config's layout",
)
CHAIN = (DECODE, PREFILL, REFERENCE, ONE_RANK, LAYOUT)


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """Two neighbours of the chain on the same tokens."""

    before: str
    after: str
    mean_abs: float
    """Mean |difference| of a token's log-prob, in nats."""
    max_abs: float
    response: int
    """Where the largest difference is."""
    token: int


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is to be bisected."""

    config: Config
    prompts: Sequence[np.ndarray]
    """int32 [P] each; one response to each is drawn."""
    stop_token_ids: tuple[int, ...]
    max_new_tokens: int
    device: Literal["cpu", "cuda"]
    gpus: tuple[str, ...]
    """Of this machine, as CUDA_VISIBLE_DEVICES names them. The server has ended before a rank starts."""
    logs: Path
    deadline_s: float
    """For the start of the server, and for each part's scores."""
    skip: frozenset[str] = frozenset()
    """Parts of CHAIN to leave out, for example one whose model fits on no single GPU."""
    weights: Mapping[str, Path] = field(default_factory=dict)
    """By part, a folder in Hugging Face format that it loads instead of `model.path`."""

    def folder(self, part: str) -> Path:
        return self.weights.get(part, Path(self.config.model.path))


def bisect(question: Question, say: Callable[[str], None]) -> list[Link]:
    """The links of the chain, in order. `say` gets a line before each part.

    Raises:
        RolloutError: the server did not start or answer.
        RankError: a Megatron rank failed.
    """
    say(f"{DECODE}, {PREFILL}: starting a server")
    responses, scores = asyncio.run(_by_engine(question))
    if REFERENCE not in question.skip:
        say(REFERENCE)
        scores[REFERENCE] = _by_reference(question.folder(REFERENCE), responses)
    layout = question.config.actor.layout
    with RankPool(question.device) as pool:
        for part, its_layout in ((ONE_RANK, LayoutConfig()), (LAYOUT, layout)):
            if part in question.skip or (part == LAYOUT and layout == LayoutConfig() and ONE_RANK in scores):
                continue
            say(part)
            scores[part] = _by_megatron(pool, question, part, its_layout, responses)
    known = [part for part in CHAIN if part in scores and part not in question.skip]
    return [_link(before, after, scores, responses) for before, after in itertools.pairwise(known)]


def first_gap(links: Sequence[Link], bound: float) -> Link | None:
    """The first link whose mean difference is above `bound`, or is no number."""
    return next((link for link in links if not link.mean_abs <= bound), None)


async def _by_engine(question: Question) -> tuple[Responses, dict[str, np.ndarray]]:
    """The responses, drawn, and the engine's two opinions of them."""
    config = replace(question.config.rollout, servers=1, urls=(), deterministic=False)
    spec = ServerSpec(
        model_path=question.folder(DECODE).resolve(),
        device=question.device,
        dtype=question.config.model.dtype,
        context_length=question.config.model.context_length,
        seed=question.config.run.seed,
        log_path=question.logs / "server.log",
        gpus=question.gpus[: config.tensor_parallel],
    )
    vocabulary = HFModelConfig.load(spec.model_path).vocab_size
    fleet = RolloutFleet(config, [LocalServer(config, spec)], vocab_size=vocabulary, report=print)
    try:
        await fleet.start(question.deadline_s)
        sampling = SamplingParams(max_new_tokens=question.max_new_tokens, stop_token_ids=question.stop_token_ids)
        asked = [
            GenerationRequest(request_id=f"bisect-{at}.", group_id=str(at), prompt_ids=ids, sampling=sampling, seed=at)
            for at, ids in enumerate(question.prompts)
        ]
        drawn = await asyncio.wait_for(asyncio.gather(*map(fleet.generate, asked)), question.deadline_s)
        scoring = [
            fleet.score(ids, generation.token_ids) for ids, generation in zip(question.prompts, drawn, strict=True)
        ]
        scored = await asyncio.wait_for(asyncio.gather(*scoring), question.deadline_s)
    finally:
        await fleet.close()
    pairs = [(ids, generation.token_ids) for ids, generation in zip(question.prompts, drawn, strict=True)]
    responses = Responses(
        token_ids=np.concatenate([ids for pair in pairs for ids in pair]).astype(np.int32),
        sequence_lengths=np.array([ids.size + answer.size for ids, answer in pairs], np.int32),
        prompt_lengths=np.array([ids.size for ids, _ in pairs], np.int32),
    )
    decoded = np.concatenate([generation.log_probs for generation in drawn])
    return responses, {DECODE: decoded, PREFILL: np.concatenate(scored)}


def _by_reference(folder: Path, responses: Responses) -> np.ndarray:
    """Log-probs [N] by transformers' own forward, one sequence at a time, on the CPU."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    found = []
    sequences = np.split(responses.token_ids, np.cumsum(responses.sequence_lengths)[:-1])
    for ids, prompt in zip(sequences, responses.prompt_lengths, strict=True):
        tokens = torch.from_numpy(ids.astype(np.int64))
        with torch.inference_mode():
            log_probs = model(tokens[None, :-1]).logits[0, prompt - 1 :].log_softmax(-1)
        found.append(log_probs.gather(1, tokens[prompt:, None])[:, 0].numpy())
    return np.concatenate(found)


def _by_megatron(
    pool: RankPool, question: Question, part: str, layout: LayoutConfig, responses: Responses
) -> np.ndarray:
    config = replace(
        question.config,
        actor=replace(question.config.actor, layout=layout, device=question.device),
        model=replace(question.config.model, path=str(question.folder(part))),
    )
    hidden_size = HFModelConfig.load(Path(config.model.path)).hidden_size
    plan = plan_for_actor(responses.sequence_lengths, config.actor, hidden_size=hidden_size)
    results = pool.run(
        layout.world_size, _score, config, responses, plan, question.deadline_s, timeout_s=question.deadline_s
    )
    found: LogProbs = results[0]
    return found.log_probs


def _score(
    place: RankPlace, config: Config, responses: Responses, plan: MicroBatchPlan, timeout_s: float
) -> LogProbs | None:
    from megatron_dapo.actor.actor import MegatronActor

    actor = MegatronActor(
        config.actor,
        config.model,
        rank=place.rank,
        world_size=place.world_size,
        rendezvous=place.rendezvous,
        steps_per_rollout=1,
        seed=config.run.seed,
        timeout_s=timeout_s,
    )
    return actor.log_probs(responses, plan, 1.0)


def _link(before: str, after: str, scores: Mapping[str, np.ndarray], responses: Responses) -> Link:
    gap = np.abs(scores[before].astype(np.float64) - scores[after])
    worst = int(gap.argmax())  # a NaN counts as the largest
    starts = np.concatenate([[0], np.cumsum(responses.response_lengths)])
    response = int(np.searchsorted(starts, worst, side="right")) - 1
    return Link(
        before=before,
        after=after,
        mean_abs=float(gap.mean()),
        max_abs=float(gap.max()),
        response=response,
        token=worst - int(starts[response]),
    )
