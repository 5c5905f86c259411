"""The exactness certificate: one mini-batch on many layouts, its loss and every parameter's gradient against one
process in float32 (law 1).

`measure_layouts` starts rank processes, the reference first; what they run stands at the end of this file. The
reference's gradients lie in files, one for each aggregation: only rank 0 of a layout reads them, one tensor at a time.
"""

import itertools
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron_dapo.actor.actor import MegatronActor
from megatron_dapo.actor.device import prepare
from megatron_dapo.actor.model.hf_config import HFModelConfig, check_layout
from megatron_dapo.actor.packing import MicroBatchPlan
from megatron_dapo.actor.step_data import LogProbs, MiniBatch, Responses
from megatron_dapo.algorithm.aggregation import Aggregation, kl_scale, token_weights
from megatron_dapo.config import Config, ConfigError
from megatron_dapo.config.actor_config import LayoutConfig
from megatron_dapo.coordinator.batch import objective_of
from megatron_dapo.diagnostics.local_jobs import local_device
from tools.actor_job import ActorJob, loss_and_gradients, packing
from tools.rank_pool import RankPlace, RankPool

LOSS = "loss"
"""Name of the loss among the reference's gradients."""

AGGREGATIONS: tuple[Aggregation, ...] = get_args(Aggregation)

GROUP = 4
"""Responses a prompt."""

RATIO_SPREAD = 0.3
"""Standard deviation of log(pi / pi_old): about a third of the tokens lie outside 0.8 .. 1.28."""

KINK_DISTANCE = {"float32": 1e-3, "bfloat16": 0.2}
"""No log-ratio is nearer to a clip bound's: there rounding, that of the type of the layouts, decides which side a token
is on, and its gradient jumps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One mini-batch on one layout."""

    layout: LayoutConfig
    aggregation: Aggregation
    budget: int
    """Token budget of a micro-batch on one rank."""

    mini_batch: MiniBatch


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """One mini-batch on one layout against the reference."""

    loss: float
    """|loss - reference| / |reference|."""

    gradient: float
    """|gradient - reference| / |reference| of all parameters together, L2 norms."""

    worst: float
    """Largest such difference of a single parameter, against that parameter's own gradient."""

    parameter: str
    """Which one, by its Hugging Face name."""


def measure_layouts(
    config: Config,
    *,
    processes: int,
    layouts: int,
    responses: int,
    longest: int,
    deadline_s: float,
    say: Callable[[str], None],
) -> Iterator[tuple[Case, Difference]]:
    """Every case with its difference, as soon as its layout is done; `say` gets a line about the mini-batch first.

    Args:
        config: with the device and the type of the layouts.
        processes: most ranks of a layout.
        layouts: how many to try.
        responses: of the mini-batch.
        longest: tokens of the longest one, its prompt included.
        deadline_s: seconds that the reference, and then each layout, may take.

    Raises:
        RankError: a rank died, raised, or gave no result in time (RankTimeout); no process is left.
    """
    seed, own, hf = config.run.seed, config.actor.layout, HFModelConfig.load(Path(config.model.path))
    always = own if own.world_size <= processes else LayoutConfig()
    chosen = choose_layouts(fitting_layouts(hf, processes), layouts, seed=seed, always=always)
    with tempfile.TemporaryDirectory(prefix="certify-") as folder, RankPool(local_device(config)) as ranks:
        # One process, in float32, every saving of memory switched off.
        actor = replace(config.actor, layout=LayoutConfig(), recompute="none", fused_linear_log_prob=False)
        model = replace(config.model, dtype="float32")
        reference = ActorJob(config=replace(config, actor=actor, model=model), deadline_s=deadline_s)
        prompts = random_responses(count=responses, longest=longest, vocabulary=hf.vocab_size, seed=seed)
        drawn = ranks.run(1, sampled_responses, reference.config, prompts, timeout_s=deadline_s)[0]
        if config.actor.routing_replay and hf.experts is not None:  # experts that no router would choose
            scores = np.random.default_rng([seed, 3]).random((drawn.token_ids.size, hf.num_layers, hf.experts.count))
            drawn = replace(drawn, routing=scores.argsort(-1)[..., : hf.experts.top_k].astype(np.uint8))
        one_rank = packing(reference.config, drawn)
        current = reference.run(ranks, current_log_probs, config, drawn, one_rank)
        # Two responses to a micro-batch or so: then verl_legacy differs from the other aggregations.
        weights_plan = _packing_on(config, drawn, LayoutConfig(), int(drawn.sequence_lengths.max()))
        references = random_mini_batches(config, drawn, current, one_rank, weights_plan)
        lengths = drawn.sequence_lengths
        say(
            f"mini-batch: {len(lengths)} responses of {lengths.min()} to {lengths.max()} tokens with their prompts, "
            f"{drawn.num_response_tokens} response tokens"
        )
        reference.run(ranks, compare, config, references, Path(folder))
        for index, layout in enumerate(chosen):
            cases = layout_cases(config, references, layout, seed=[seed, 2, index])
            job = replace(reference, config=replace(config, actor=replace(config.actor, layout=layout)))
            batches = {case.aggregation: case.mini_batch for case in cases}
            yield from zip(cases, job.run(ranks, compare, config, batches, Path(folder)), strict=True)


def layout_cases(
    config: Config, mini_batches: Mapping[Aggregation, MiniBatch], layout: LayoutConfig, *, seed: Sequence[int]
) -> list[Case]:
    """Each aggregation once on a layout, with a micro-batch budget drawn between one response and all of them."""
    rng = np.random.default_rng(seed)
    cases = []
    for aggregation, mini_batch in mini_batches.items():
        lengths = mini_batch.responses.sequence_lengths
        budgets = [1, int(lengths.max()), int(1.5 * lengths.max()), int(lengths.sum())]
        budget = budgets[int(rng.integers(len(budgets)))]
        packed = replace(mini_batch, plan=_packing_on(config, mini_batch.responses, layout, budget))
        cases.append(Case(layout=layout, aggregation=aggregation, budget=budget, mini_batch=packed))
    return cases


def _packing_on(config: Config, responses: Responses, layout: LayoutConfig, budget: int) -> MicroBatchPlan:
    return packing(replace(config, actor=replace(config.actor, layout=layout, micro_batch_tokens=budget)), responses)


def random_responses(*, count: int, longest: int, vocabulary: int, seed: int) -> Responses:
    """Lognormal lengths; the last response fills `longest` tokens (prompt included), the first has a single token."""
    rng = np.random.default_rng([seed, 0])
    prompts = rng.integers(1, max(2, longest // 4), count)
    room = longest - prompts
    lengths = np.clip(rng.lognormal(np.log(longest / 4), 0.8, count).astype(np.int64), 1, room)
    lengths[0], lengths[-1] = 1, room[-1]
    return Responses(
        token_ids=rng.integers(0, vocabulary, int((prompts + lengths).sum())).astype(np.int32),
        sequence_lengths=(prompts + lengths).astype(np.int32),
        prompt_lengths=prompts.astype(np.int32),
    )


def random_mini_batches(
    config: Config, responses: Responses, current: LogProbs, plan: MicroBatchPlan, weights_plan: MicroBatchPlan
) -> dict[Aggregation, MiniBatch]:
    """The responses under each aggregation, packed by `plan`: random advantages, and old log-probs near `current`, the
    model's own, so that the clip acts on some tokens. One response is masked, as overlong filtering does.

    Args:
        weights_plan: packing that `verl_legacy` takes its weights from: they are part of the mini-batch, so one for all
            layouts.
    """
    rng = np.random.default_rng([config.run.seed, 1])
    tokens, lengths = responses.num_response_tokens, responses.response_lengths
    columns = {
        "advantages": np.repeat(_advantages(rng, len(lengths)), lengths),
        "old_log_probs": current.log_probs - _log_ratios(rng, tokens, config),
    }
    if config.algorithm.kl.coefficient > 0:
        columns["reference_log_probs"] = current.log_probs - rng.normal(0, RATIO_SPREAD, tokens)
    if config.algorithm.importance_mode != "none":
        columns["correction"] = rng.uniform(0.5, 2.0, tokens)
    columns["rollout_log_probs"] = current.log_probs - rng.normal(0, RATIO_SPREAD, tokens)
    columns = {name: column.astype(np.float32) for name, column in columns.items()}
    response_lengths, mask = torch.from_numpy(lengths.astype(np.int64)), torch.arange(len(lengths)) != len(lengths) // 2

    def mini_batch(aggregation: Aggregation) -> MiniBatch:
        weights = token_weights(
            response_lengths,
            torch.arange(len(lengths)) // GROUP,
            aggregation,
            mask=mask,
            constant_length=config.rollout.max_new_tokens,
            micro_batch_index=torch.from_numpy(weights_plan.micro_batch_index()),
        )
        kl, scale = config.algorithm.kl, None
        if kl.coefficient > 0 and (kl.aggregation == "response_mean" or kl.aggregation == "response_sum"):
            scale = kl_scale(weights, response_lengths, kl.aggregation, mask=mask).numpy()
        return MiniBatch(responses=responses, plan=plan, weights=weights.numpy(), kl_scale=scale, **columns)

    return {aggregation: mini_batch(aggregation) for aggregation in AGGREGATIONS}


def _advantages(rng: np.random.Generator, responses: int) -> np.ndarray:
    """float64 [R]: of each prompt's responses one has a negative advantage, which is smaller.

    Were they balanced, as eq. 9 makes them, the loss would be a small difference of large terms, and a rounding of
    1e-7 of the terms could be any share of the loss.
    """
    size = rng.uniform(0.5, 2.0, responses)
    return np.where(np.arange(responses) % GROUP == 1, -size / 4, size)


def _log_ratios(rng: np.random.Generator, tokens: int, config: Config) -> np.ndarray:
    """float64 [tokens]: log(pi / pi_old), kept away from the clip bounds of the config, whatever the objective."""
    clip, distance = config.algorithm.clip, KINK_DISTANCE[config.model.dtype]
    drawn = rng.normal(0, RATIO_SPREAD, tokens)
    for bound in (1 - clip.low, 1 + clip.high, clip.dual):
        if bound:
            near = np.abs(drawn - np.log(bound)) < distance
            drawn[near] = np.log(bound) + np.copysign(distance, drawn[near] - np.log(bound))
    return drawn


def sampled_responses(place: RankPlace, config: Config, responses: Responses) -> Responses:
    """The same prompts and lengths with response tokens drawn from the model, as in training.

    Tokens at random would not do: a trained model gives some of them exp(-30), and one such token is the largest part
    of the gradient and of its rounding.
    """
    from transformers import AutoModelForCausalLM, set_seed
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    device = prepare(config.actor.device).device
    torch.set_num_threads(config.actor.threads)
    set_seed(config.run.seed)
    network = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32, local_files_only=True)
    sequences = np.split(responses.token_ids, np.cumsum(responses.sequence_lengths)[:-1])
    prompts = [ids[:length] for ids, length in zip(sequences, responses.prompt_lengths, strict=True)]
    longest = max(len(prompt) for prompt in prompts)
    # Padded on the left: all responses begin at the same place.
    padded = torch.tensor(np.stack([np.pad(prompt, (longest - len(prompt), 0)) for prompt in prompts])).long()
    mask = torch.arange(longest) >= longest - torch.tensor(responses.prompt_lengths)[:, None]
    tokens = int(responses.response_lengths.max())
    drawn = network.to(device).generate(
        padded.to(device),
        attention_mask=mask.long().to(device),
        do_sample=True,
        temperature=config.rollout.temperature,
        top_p=1.0,
        top_k=0,
        min_new_tokens=tokens,
        max_new_tokens=tokens,
        pad_token_id=0,
    )[:, longest:]
    answers = zip(drawn.cpu().numpy(), responses.response_lengths, strict=True)
    return Responses.of([(prompt, ids[:length]) for prompt, (ids, length) in zip(prompts, answers, strict=True)])


def current_log_probs(
    actor: MegatronActor, config: Config, responses: Responses, plan: MicroBatchPlan
) -> LogProbs | None:
    """On rank 0 the log-probs of the model that `compare` takes the gradients of."""
    _move_adapters(actor, config)
    return actor.log_probs(responses, plan, config.rollout.temperature)


def _move_adapters(actor: MegatronActor, config: Config) -> None:
    """LoRA begins with B = 0, where the gradient of A is 0 on any layout."""
    if actor.optimizer.adapters is not None:
        with actor.memory.resident("parameters"):
            actor.optimizer.adapters.draw(config.run.seed, both=True)


def compare(
    actor: MegatronActor, config: Config, mini_batches: Mapping[Aggregation, MiniBatch], folder: Path
) -> list[Difference]:
    """On rank 0 each mini-batch's difference from the reference; none on the other ranks. The first call, on one rank,
    finds no references there and writes them."""
    _move_adapters(actor, config)
    differences = []
    for name, mini_batch in mini_batches.items():
        found = loss_and_gradients(actor, mini_batch, objective_of(config.algorithm), config.rollout.temperature)
        if found is not None:
            tensors, file = found[1] | {LOSS: torch.tensor(found[0])}, folder / f"{name}.safetensors"
            if file.exists():
                differences.append(_difference(tensors, file))
            else:
                save_file(tensors, file)
    return differences


def _difference(tensors: Mapping[str, Tensor], file: Path) -> Difference:
    errors, distance, size = {}, 0.0, 0.0
    with safe_open(file, framework="pt") as reference:
        if one_sided := set(reference.keys()) ^ set(tensors):
            raise ValueError(f"parameters with a gradient on one side only: {', '.join(sorted(one_sided))}")
        for name in sorted(tensors):
            wanted = reference.get_tensor(name).double()
            errors[name] = relative_error(tensors[name], wanted)
            if name != LOSS:
                distance = math.hypot(distance, float((tensors[name] - wanted).norm()))
                size = math.hypot(size, float(wanted.norm()))
    loss = errors.pop(LOSS)
    parameter = max(errors, key=lambda name: (math.isnan(errors[name]), errors[name]))
    return Difference(loss=loss, gradient=distance / size, worst=errors[parameter], parameter=parameter)


def relative_error(got: Tensor, wanted: Tensor) -> float:
    """|got - wanted| / |wanted| in the L2 norm, in float64; 0 if both are 0, infinite if only `wanted` is."""
    distance, size = float((got.double() - wanted.double()).norm()), float(wanted.double().norm())
    if size == 0:
        return 0.0 if distance == 0 else math.inf
    return distance / size


def fitting_layouts(hf: HFModelConfig, processes: int) -> list[LayoutConfig]:
    """Every layout of at most `processes` ranks that divides the model, one process without any split first."""
    fitting = []
    # Bounded size by size: of 64 cores there are 17 million quadruples, and 2 thousand of so few ranks.
    upto = [range(1, processes // ranks + 1) for ranks in range(1, processes + 1)]
    sizes_of = (
        (t, p, c, d) for t in upto[0] for p in upto[t - 1] for c in upto[t * p - 1] for d in upto[t * p * c - 1]
    )
    for tensor, pipeline, context, data in sizes_of:
        plain = LayoutConfig(tensor=tensor, pipeline=pipeline, context=context, data=data)
        stages = [None, *(range(2, hf.num_layers // pipeline + 1) if pipeline > 1 else ())]
        sequences, ranks = [False, True] if tensor > 1 else [False], tensor * context * data
        cuts = [(1, 1)]
        if hf.experts is not None:
            sizes = range(1, ranks + 1)
            cuts = [(expert, width) for expert in sizes for width in sizes if ranks % (expert * width) == 0]
        for virtual, sequence, (expert, expert_tensor) in itertools.product(stages, sequences, cuts):
            split = {"expert": expert, "expert_tensor": expert_tensor}
            layout = replace(plain, virtual_pipeline=virtual, sequence_parallel=sequence, **split)
            with suppress(ConfigError):
                check_layout(hf, layout)
                fitting.append(layout)
    return fitting


def choose_layouts(
    candidates: Sequence[LayoutConfig], count: int, *, seed: int, always: LayoutConfig
) -> list[LayoutConfig]:
    """One process (other packings alone), `always`, and a random choice up to `count` in all.

    Each next one is drawn from those that bring most kinds of parallelism that are not there yet: 4 of the layouts of
    two ranks have all kinds.
    """
    rng = np.random.default_rng(seed)
    chosen = list(dict.fromkeys([LayoutConfig(), always]))[:count]
    left = [layout for layout in candidates if layout not in chosen]
    seen = {kind for layout in chosen for kind in kinds(layout)}
    while left and len(chosen) < count:
        news = [len(kinds(layout).keys() - seen) for layout in left]
        best = [layout for layout, new in zip(left, news, strict=True) if new == max(news)]
        layout = best[int(rng.integers(len(best)))]
        chosen.append(layout)
        left.remove(layout)
        seen |= kinds(layout).keys()
    return chosen


def kinds(layout: LayoutConfig) -> dict[str, int]:
    """The kinds of parallelism in a layout, of TP, SP, PP, VPP, CP, DP, EP, ETP, with their sizes."""
    sizes = {
        "TP": layout.tensor,
        "SP": layout.tensor if layout.sequence_parallel else 1,
        "PP": layout.pipeline,
        "VPP": layout.virtual_pipeline or 1,
        "CP": layout.context,
        "DP": layout.data,
        "EP": layout.expert,
        "ETP": layout.expert_tensor,
    }
    return {kind: size for kind, size in sizes.items() if size > 1}


def label(layout: LayoutConfig) -> str:
    """A layout in a table: "TP2+SP PP2 VPP2", or "one process"."""
    text = " ".join("+SP" if kind == "SP" else f"{kind}{size}" for kind, size in kinds(layout).items())
    return text.replace(" +SP", "+SP") or "one process"
