"""Where a gap between engine and trainer begins: a few responses re-scored by every stage on the way from one to the
other. One server and a few rank processes; no Ray.

    python -m tools.bisect CONFIG.yaml | RUN [section.key=value ...]

    engine decode -> engine prefill -> Hugging Face, float32 -> Megatron, one process -> Megatron, the config's layout

Each stage scores the tokens that the engine drew, at temperature 1. Neighbours share all but one thing: decode and
prefill the kernels of one token and of many, prefill and Hugging Face the implementation (and the type), Hugging Face
and Megatron the mapping of the weights, one process and many the parallel layout.
"""

import asyncio
import itertools
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer

from megatron_dapo.actor.actor import MegatronActor
from megatron_dapo.actor.model.hf_config import HFModelConfig
from megatron_dapo.actor.step_data import LogProbs, Responses
from megatron_dapo.cli.command_line import Overrides, comparison_command, config_of
from megatron_dapo.cli.main import main
from megatron_dapo.cluster.waits import Waits
from megatron_dapo.config import Config, ConfigError
from megatron_dapo.config.actor_config import LayoutConfig
from megatron_dapo.coordinator.inputs import read_inputs, routing_shape
from megatron_dapo.diagnostics.evaluation_session import newest_weights
from megatron_dapo.diagnostics.local_jobs import local_device, local_fleet, with_own_servers
from rollout.generation import GenerationRequest, SamplingParams
from rollout.wire.client import SglangClient
from tools.actor_job import ActorJob, packing
from tools.rank_pool import RankPool

STAGES = DECODE, PREFILL, REFERENCE, ONE_RANK, LAYOUT = (
    "engine decode",
    "engine prefill",
    "Hugging Face float32",
    "Megatron TP=1",
    "Megatron, the config's layout",
)


FLOAT32_BOUND = 1e-3
"""Nats: mean gap of two implementations in float32 above which they do not hold the same model. Rounding gives 1e-5."""


class StageGap(NamedTuple):
    """Two neighbouring stages on the same tokens."""

    before: str
    after: str
    mean_abs: float
    """Mean |difference| of a token's log-prob, in nats."""
    max_abs: float
    response: int
    """Where the largest difference is."""
    token: int


def find_gaps(
    config: Config,
    prompts: Sequence[np.ndarray],
    sampling: SamplingParams,
    *,
    deadline_s: float,
    skip: Collection[str] = (),
    say: Callable[[str], None],
) -> list[StageGap]:
    """The gaps between neighbouring stages, in order. `say` gets a line before each stage.

    Args:
        prompts: int32 [P] each; one response to each is drawn.
        deadline_s: for the start of the server, and for each stage's scores.
        skip: stages to leave out, for example one whose model fits on no single GPU.

    Raises:
        RolloutError: the server did not start or answer.
        Stalled: it did not answer in time.
        RankError: a Megatron rank failed.
    """
    say(f"{DECODE}, {PREFILL}: starting a server")
    responses, scores = asyncio.run(_by_engine(config, prompts, sampling, deadline_s))
    if REFERENCE not in skip:
        say(REFERENCE)
        scores[REFERENCE] = _by_reference(Path(config.model.path), responses)
    layout = config.actor.layout
    with RankPool(local_device(config)) as ranks:
        for stage, its_layout in ((ONE_RANK, LayoutConfig()), (LAYOUT, layout)):
            if stage in skip or (stage == LAYOUT and layout == LayoutConfig() and ONE_RANK in scores):
                continue
            say(stage)
            actor = replace(config.actor, layout=its_layout, device=local_device(config))
            job = ActorJob(config=replace(config, actor=actor), deadline_s=deadline_s)
            scores[stage] = _by_megatron(ranks, job, responses)
    known = [stage for stage in STAGES if stage in scores and stage not in skip]
    return [_gap(before, after, scores, responses) for before, after in itertools.pairwise(known)]


async def _by_engine(
    config: Config, prompts: Sequence[np.ndarray], sampling: SamplingParams, deadline: float
) -> tuple[Responses, dict[str, np.ndarray]]:
    """The responses, drawn, and the engine's log-probs [N] of them, as it drew them and by prefill."""
    config, waits = with_own_servers(config, Path(config.model.path)), Waits()
    run = replace(config.run, start_deadline_s=deadline)
    config = replace(config, run=run, rollout=replace(config.rollout, servers=1, deterministic=False))
    model = HFModelConfig.load(Path(config.model.path))
    vocabulary, ask = model.vocab_size, partial(GenerationRequest, routing=routing_shape(config, model))
    asked = [
        ask(request_id=f"bisect-{at}.", group_id=str(at), prompt_ids=ids, sampling=sampling, seed=at)
        for at, ids in enumerate(prompts)
    ]
    with tempfile.TemporaryDirectory(prefix="bisect-") as folder:
        async with local_fleet(config, Path(folder), waits, vocab_size=vocabulary, report=print) as fleet:
            drawing = asyncio.gather(*map(fleet.generate, asked))
            drawn = await waits.wait_for("bisect responses", "rollout server", deadline, drawing)
            pairs = [(ids, generation.token_ids) for ids, generation in zip(prompts, drawn, strict=True)]
            ask_for_scores = partial(score, fleet.members[0].client)
            whole = [np.concatenate(pair).astype(np.int32) for pair in pairs]
            each = [ask_for_scores(f"bisect-score-{at}.", ids, prompts[at].size) for at, ids in enumerate(whole)]
            scored = await waits.wait_for("bisect scores", "rollout server", deadline, asyncio.gather(*each))
    decoded = np.concatenate([generation.log_probs for generation in drawn])
    routing = [generation.routing for generation in drawn if generation.routing is not None]
    return Responses.of(pairs, routing=routing), {DECODE: decoded, PREFILL: np.concatenate(scored)}


async def score(client: SglangClient, rid: str, token_ids: np.ndarray, start: int) -> np.ndarray:
    """The server's log-probs, at temperature 1, of token_ids[start:] given what precedes each: float32
    [len(token_ids) - start].

    Args:
        token_ids: int32 [P + T].
        start: first token to score, at least 1.

    Raises:
        RolloutError: as every call of the client; also for other tokens than those asked for.
    """
    params = {"max_new_tokens": 0, "temperature": 1.0}
    body: dict[str, Any] = {"rid": rid, "input_ids": np.ascontiguousarray(token_ids), "sampling_params": params}
    body |= {"return_logprob": True, "logprob_start_len": start - 1}
    async with client.json("/generate", body, client.request_deadline_s) as answer:
        entries = answer["meta_info"]["input_token_logprobs"][1:]
        asked, scored = token_ids[start:], np.array([entry[1] for entry in entries])
        # The last id of the vocabulary is reported as 0 (its log-prob is right): SGLang's guard is off by one.
        if scored.shape != asked.shape or not ((scored == asked) | (scored == 0)).all():
            raise ValueError(f"log-probs of {scored.size} other tokens than the {asked.size} asked for")
        return np.array([entry[0] for entry in entries], np.float32)


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


def _by_megatron(ranks: RankPool, job: ActorJob, responses: Responses) -> np.ndarray:
    scored: LogProbs = job.run(ranks, MegatronActor.log_probs, responses, packing(job.config, responses), 1.0)
    return scored.log_probs


def _gap(before: str, after: str, scores: Mapping[str, np.ndarray], responses: Responses) -> StageGap:
    gap = np.abs(scores[before].astype(np.float64) - scores[after])
    worst = int(gap.argmax())  # a NaN counts as the largest
    starts = np.concatenate([[0], np.cumsum(responses.response_lengths)])
    response = int(np.searchsorted(starts, worst, side="right")) - 1
    return StageGap(before, after, float(gap.mean()), float(gap.max()), response, worst - int(starts[response]))


@comparison_command
def bisect(
    source: Annotated[Path, typer.Argument(help="YAML config, or the directory of a run.")],
    overrides: Overrides = None,
    responses: Annotated[int, typer.Option(min=1, help="Prompts to answer, one response each.")] = 8,
    tokens: Annotated[int | None, typer.Option(min=1, help="Longest response; 256, or what the config allows.")] = None,
    bound: Annotated[float | None, typer.Option(min=0, help="Largest mean gap; 1e-3 in float32.")] = None,
    skip: Annotated[list[str] | None, typer.Option(help="A stage to leave out, by its name in the table.")] = None,
    deadline: Annotated[float, typer.Option(min=1, help="Seconds that each stage may take.")] = 1800.0,
) -> bool:
    """Re-score a few responses by every stage from engine to trainer, to see where a gap in log-probs begins."""
    config, skipped = config_of(source, overrides or []), skip or []
    if source.is_dir():
        config = replace(config, model=replace(config.model, path=str(newest_weights(source)[0].resolve())))
    if unknown := sorted(set(skipped) - set(STAGES)):
        raise ConfigError(f"--skip {unknown[0]!r}: the stages are {', '.join(map(repr, STAGES))}")
    if bound is None:
        bound = FLOAT32_BOUND if config.model.dtype == "float32" else config.monitor.mismatch_warn
    print(f"{responses} responses, weights of model.path = {config.model.path}, in {config.model.dtype}", flush=True)
    inputs, longest = read_inputs(config), min(tokens or 256, config.rollout.max_new_tokens)
    gaps = find_gaps(
        config,
        [prompt.ids for prompt in inputs.prompts.prompts[:responses]],
        SamplingParams(max_new_tokens=longest, stop_token_ids=inputs.text.stop_token_ids),
        deadline_s=deadline,
        skip=skipped,
        say=lambda text: print(f"  {text}", flush=True),
    )
    above = [gap for gap in gaps if not gap.mean_abs <= bound]  # a mean that is no number too
    print(f"{'':58} {'mean':>9} {'max':>9}   largest at")
    for gap in gaps:
        mark = "  <-" if gap in above else ""
        pair, place = f"{gap.before} -> {gap.after}", f"response {gap.response}, token {gap.token}"
        print(f"{pair:58} {gap.mean_abs:>9.2e} {gap.max_abs:>9.2e}   {place}{mark}")
    if not above:
        print(f"no gap: every mean is within {bound:g}")
        return True
    first = above[0]
    print(f"the gap begins between {first.before} and {first.after}: mean {first.mean_abs:.2e}, above {bound:g}")
    return False


if __name__ == "__main__":
    main(lambda: typer.run(bisect))
