"""A certificate from beginning to end: reference, layouts, verdicts. Starts processes; imports no Megatron itself."""

import dataclasses
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from megatron_dapo.actor.model.hf_config import HFModelConfig
from megatron_dapo.actor.packing import MicroBatchPlan, plan_for_actor
from megatron_dapo.actor.ranks import RankPool
from megatron_dapo.actor.step_data import MiniBatch, Responses
from megatron_dapo.algorithm.aggregation import Aggregation
from megatron_dapo.config.actor_config import LayoutConfig
from megatron_dapo.diagnostics.certificate.layouts import choose_layouts, fitting_layouts
from megatron_dapo.diagnostics.certificate.measure import (
    Difference,
    Job,
    compare,
    current_log_probs,
    sampled_responses,
    write_reference,
)
from megatron_dapo.diagnostics.certificate.sample_batch import Sample, random_responses, random_sample

AGGREGATIONS: tuple[Aggregation, ...] = get_args(Aggregation)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a certificate measures."""

    job: Job
    device: Literal["cpu", "cuda"]
    processes: int
    """Most ranks of a layout."""

    layouts: int
    responses: int
    longest: int
    """Tokens of the longest response, its prompt included."""

    correction: bool
    """Whether the mini-batch has importance-correction weights."""

    constant_length: int
    """Divisor of `sequence_sum_constant`, in tokens."""

    deadline_s: float
    """Seconds that the reference, and then each layout, may take."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One mini-batch on one layout."""

    layout: LayoutConfig
    aggregation: Aggregation
    budget: int
    """Token budget of a micro-batch on one rank."""

    mini_batch: MiniBatch


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """A case and how far it is from the reference."""

    case: Case
    difference: Difference


def certify(plan: Plan, hf: HFModelConfig, say: Callable[[str], None]) -> Iterator[Measured]:
    """Every case, as soon as its layout is done; `say` gets a line about the mini-batch first.

    Raises:
        RankError: a rank died, raised, or gave no result in time (RankTimeout); no process is left.
    """
    seed = plan.job.seed
    prompts = random_responses(count=plan.responses, longest=plan.longest, vocabulary=hf.vocab_size, seed=seed)
    own = plan.job.actor.layout
    always = own if own.world_size <= plan.processes else LayoutConfig()
    layouts = choose_layouts(fitting_layouts(hf, plan.processes), plan.layouts, seed=seed, always=always)
    reference = plan.job.reference()
    one_rank = plan_for_actor(prompts.sequence_lengths, reference.actor, hidden_size=hf.hidden_size)
    with tempfile.TemporaryDirectory(prefix="certify-") as name, RankPool(plan.device) as ranks:
        folder = Path(name)
        responses = ranks.run(1, sampled_responses, reference, prompts, timeout_s=plan.deadline_s)[0]
        current = ranks.run(1, current_log_probs, reference, responses, one_rank, timeout_s=plan.deadline_s)[0]
        sample = random_sample(
            responses,
            current,
            plan.job.objective,
            dtype=plan.job.model.dtype,
            correction=plan.correction,
            seed=seed,
        )
        say(describe(responses))
        # Two responses to a micro-batch or so: then verl_legacy differs from the other aggregations.
        weights_plan = _plan_on(plan, responses, LayoutConfig(), int(responses.sequence_lengths.max()), hf.hidden_size)
        references = {
            aggregation: sample.mini_batch(
                aggregation, one_rank, constant_length=plan.constant_length, weights_plan=weights_plan
            )
            for aggregation in AGGREGATIONS
        }
        losses = ranks.run(1, write_reference, reference, references, folder, timeout_s=plan.deadline_s)[0]
        for index, layout in enumerate(layouts):
            cases = layout_cases(plan, sample, layout, hf.hidden_size, seed=[seed, 2, index], weights_plan=weights_plan)
            batches = [(case.aggregation, case.mini_batch) for case in cases]
            job = plan.job.on(layout)
            found = ranks.run(layout.world_size, compare, job, batches, losses, folder, timeout_s=plan.deadline_s)[0]
            for case, difference in zip(cases, found, strict=True):
                yield Measured(case=case, difference=difference)


def layout_cases(
    plan: Plan,
    sample: Sample,
    layout: LayoutConfig,
    hidden_size: int,
    *,
    seed: Sequence[int],
    weights_plan: MicroBatchPlan,
) -> list[Case]:
    """Each aggregation once on a layout, with a micro-batch budget drawn between one response and all of them."""
    rng = np.random.default_rng(seed)
    lengths = sample.responses.sequence_lengths
    budgets = [1, int(lengths.max()), int(1.5 * lengths.max()), int(lengths.sum())]
    cases = []
    for aggregation in AGGREGATIONS:
        budget = budgets[int(rng.integers(len(budgets)))]
        packing = _plan_on(plan, sample.responses, layout, budget, hidden_size)
        mini_batch = sample.mini_batch(
            aggregation, packing, constant_length=plan.constant_length, weights_plan=weights_plan
        )
        cases.append(Case(layout=layout, aggregation=aggregation, budget=budget, mini_batch=mini_batch))
    return cases


def describe(responses: Responses) -> str:
    """The mini-batch in one line."""
    lengths = responses.sequence_lengths
    return (
        f"mini-batch: {len(lengths)} responses of {lengths.min()} to {lengths.max()} tokens with their prompts, "
        f"{responses.num_response_tokens} response tokens"
    )


def _plan_on(plan: Plan, responses: Responses, layout: LayoutConfig, budget: int, hidden_size: int) -> MicroBatchPlan:
    actor = dataclasses.replace(plan.job.actor, layout=layout, micro_batch_tokens=budget)
    return plan_for_actor(responses.sequence_lengths, actor, hidden_size=hidden_size)
