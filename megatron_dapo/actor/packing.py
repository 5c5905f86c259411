"""Which responses share a micro-batch, and how a micro-batch lies in memory. Numpy only.

A micro-batch is *packed*: its sequences lie one after the other in one row of tokens, and attention is told where each
begins (`thd` layout). Nothing is padded to the longest, and a sequence is never split over micro-batches. Only where
pipeline stages exchange rows have those of a rank one length: the others end in one more sequence, of padding.

Two sequences of 5 and 2 tokens, prompts of 2 and 1, without context parallel:

    input_ids          5 6 7 8 2 | 9 2
    position_ids       0 1 2 3 4 | 0 1
    predicts             7 8 2     2          the response tokens, N = 4
    rows               1 2 3       5          whose output predicts them

With context parallel of size c each sequence is padded to a multiple of 2c and cut into 2c pieces; rank r holds the
pieces r and 2c - 1 - r (Megatron's zigzag), so that causal attention costs every rank the same.

Tokens that were given within a response have no row: they are input alone.

R responses of a message, S of them in one micro-batch, N response tokens of all R.
"""

# ruff: noqa: F722  (the strings in annotations are jaxtyping shapes)

import math
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from jaxtyping import Int

from megatron_dapo.actor.step_data import MicroBatchPlan, Responses, exclusive_sum, ranges, unrouted
from megatron_dapo.config.actor_config import ActorConfig, LayoutConfig

Integers = TypeVar("Integers", int, np.ndarray)


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedMicroBatch:
    """What one rank feeds to the model for one micro-batch. T tokens on this rank, n of the micro-batch's N_mb response
    tokens predicted on this rank (all of them unless context parallel)."""

    input_ids: np.ndarray
    """int64 [T]."""

    position_ids: np.ndarray
    """int64 [T]: position inside the own sequence."""

    sequence_bounds: np.ndarray
    """int32 [S + 1], or one more with padding of its own: where each sequence starts and the last one ends, before
    cutting for context parallel."""

    rows: np.ndarray
    """int64 [n]: position (< T) whose output predicts the response token."""

    targets: np.ndarray
    """int64 [n]: the response tokens."""

    places: np.ndarray
    """int64 [n]: which of the micro-batch's response tokens (< N_mb) each is."""

    columns: np.ndarray
    """int64 [N_mb]: which of the message's N response tokens each of the micro-batch's is."""

    sequence_index: np.ndarray
    """int64 [N_mb]: which of the S sequences each response token belongs to."""

    response_lengths: np.ndarray
    """int64 [S]: response tokens of each sequence; [0] in an empty micro-batch."""

    routing: np.ndarray | None
    """uint8 [T, layers, k], as `Responses.routing`; what a sequence is rounded up by goes to experts 0 .. k-1."""

    continued: np.ndarray
    """bool [T]: tokens that another one of their sequence follows; not its last one, and no padding."""


def plan_for_actor(sequence_lengths: Int[np.ndarray, " R"], config: ActorConfig, *, hidden_size: int) -> MicroBatchPlan:
    """As few micro-batches as the budget allows, equally many on each rank, with costs as equal as can be; between
    pipeline stages, whose rows have one length, with tokens as equal as can be, and costs level over the ranks.

    Deterministic: the same lengths give the same plan on every rank and in every run. `micro_batch_tokens` counts what
    one rank holds, so the context-parallel ranks together take that many times as much. A sequence longer than that
    gets a micro-batch of its own. With virtual stages the micro-batches of a rank are a multiple of the pipeline's
    size.

    Args:
        sequence_lengths: prompt and response.
        hidden_size: the cost of a sequence of L tokens is L * (1 + L / (12 * hidden_size)).

    Example: lengths [9, 5, 4, 1], budget 10, one rank: [0, 3] and [1, 2].
    """
    layout, budget = config.layout, config.micro_batch_tokens * config.layout.context
    lengths = round_up(np.asarray(sequence_lengths, dtype=np.int64), sequence_multiple(layout))
    costs = lengths * (1.0 + 1 / (12 * hidden_size) * lengths)
    step = layout.data * (1 if layout.virtual_pipeline is None else layout.pipeline)
    # No two sequences above half the budget share a micro-batch, and one above the budget shares with none.
    full = int((lengths > budget).sum())
    least = max(full + math.ceil(int(lengths[lengths <= budget].sum()) / budget), int((2 * lengths > budget).sum()))
    bins = max(round_up(least, step), step)
    while True:
        # The last resort prefers the fullest bin with room, which fits more.
        for weights in [costs, -lengths] if layout.pipeline == 1 else [lengths, costs, -lengths]:
            if (assignment := _fill(lengths, weights, budget, bins)) is not None:
                return _deal(assignment, costs, bins, layout.data)
        bins += step


def pack_micro_batch(
    responses: Responses,
    indices: Int[np.ndarray, " S"],
    layout: LayoutConfig,
    *,
    context_rank: int = 0,
    row_multiple: int = 1,
    least: int = 0,
) -> PackedMicroBatch:
    """The micro-batch of the responses at `indices` as the given context-parallel rank sees it.

    `row_multiple`: what the tokens that a rank's layers see are rounded up to. `least`: tokens of the row of all
    context-parallel ranks, at least, as `row_length` gives them.

    No indices: one short sequence of token 0 without response tokens. The model runs on it as on any other, so that the
    ranks stay in step, and its loss is a sum over nothing.
    """
    chosen = responses.select(indices)
    columns = chosen.sequence_lengths, chosen.prompt_lengths, chosen.response_lengths
    lengths, prompts, drawn = (each.astype(np.int64) for each in columns)
    if not len(lengths):
        lengths, prompts, drawn = np.ones(1, np.int64), np.ones(1, np.int64), np.zeros(1, np.int64)
    occupied = round_up(lengths, sequence_multiple(layout))
    occupied[-1] += row_length(lengths, layout, row_multiple) - occupied.sum()
    end = int(occupied.sum())
    if end < least:  # a sequence of its own: as a part of the last one it would cost attention over that
        occupied = np.append(occupied, least - end)
    starts = exclusive_sum(occupied)[: len(lengths)]

    row = np.zeros(int(occupied.sum()), dtype=np.int64)
    is_target = np.zeros(len(row), dtype=bool)
    is_target[ranges(starts + prompts, lengths - prompts)] = True
    where = ranges(starts, lengths)
    if len(indices):
        row[where] = chosen.token_ids
        is_target[where[ranges(chosen.given_starts, chosen.given_lengths)]] = False
    routing = None
    # What pads rows to one length is tokens of responses, which spread over the experts as others do.
    like = chosen if len(indices) else responses
    row[end:] = np.resize(like.token_ids, len(row) - end)
    if like.routing is not None:
        routing = unrouted(len(row), *like.routing.shape[1:])
        routing[end:] = np.resize(like.routing, routing[end:].shape)
        if len(indices):
            routing[where] = chosen.routing
    continued = np.zeros(len(row), dtype=bool)
    continued[ranges(starts, lengths - 1)] = True
    positions = ranges(np.zeros_like(occupied), occupied)
    predictors = np.flatnonzero(is_target) - 1
    targets, places = row[predictors + 1], np.arange(len(predictors))

    if layout.context > 1:
        held = zigzag_positions(occupied, layout.context, context_rank)
        row, positions, continued = row[held], positions[held], continued[held]
        routing = None if routing is None else routing[held]
        local = np.full(int(occupied.sum()), -1, dtype=np.int64)
        local[held] = np.arange(len(held))
        here = local[predictors] >= 0
        predictors, targets, places = local[predictors[here]], targets[here], places[here]
    return PackedMicroBatch(
        input_ids=row,
        position_ids=positions,
        sequence_bounds=np.concatenate([[0], np.cumsum(occupied)]).astype(np.int32),
        rows=predictors,
        targets=targets,
        places=places,
        columns=responses.response_token_indices(indices),
        sequence_index=np.repeat(np.arange(len(lengths)), drawn),
        response_lengths=drawn,
        routing=routing,
        continued=continued,
    )


def row_length(lengths: Int[np.ndarray, " S"], layout: LayoutConfig, row_multiple: int) -> int:
    """Tokens of a micro-batch's row, all context-parallel ranks together, of sequences of these `lengths`."""
    multiple = sequence_multiple(layout)
    # Sequence parallel cuts the row into equal parts too.
    parts = layout.context * (layout.tensor if layout.sequence_parallel else 1)
    tokens = int(round_up(np.asarray(lengths, np.int64), multiple).sum())
    return round_up(max(tokens, multiple), math.lcm(multiple, parts * row_multiple))


def zigzag_positions(lengths: Int[np.ndarray, " S"], context: int, context_rank: int) -> Int[np.ndarray, " T"]:
    """Positions of the packed row that a context-parallel rank holds, in its order.

    `lengths`: each a multiple of 2 x `context`. [8] over 2 ranks: rank 0 has 0 1 6 7, rank 1 has 2 3 4 5.
    """
    piece, starts = np.asarray(lengths, dtype=np.int64) // (2 * context), exclusive_sum(lengths)
    first, last = starts + context_rank * piece, starts + (2 * context - 1 - context_rank) * piece
    return ranges(np.stack([first, last], axis=1).reshape(-1), np.repeat(piece, 2))


def round_up(value: Integers, multiple: int) -> Integers:
    """The next multiple of `multiple`, of an int or of each entry of an array."""
    return -(-value // multiple) * multiple


def sequence_multiple(layout: LayoutConfig) -> int:
    """What the length of each sequence of a micro-batch is rounded up to: two pieces for each context-parallel rank."""
    return 2 * layout.context if layout.context > 1 else 1


def _fill(lengths: np.ndarray, weights: np.ndarray, budget: int, bins: int) -> np.ndarray | None:
    """int64 [R]: the bin of each sequence, or None if they do not fit. Long ones first, each to the bin with room whose
    `weights` have the least sum."""
    room, load = np.full(bins, budget, dtype=np.int64), np.zeros(bins)
    assignment = np.empty(len(lengths), dtype=np.int64)
    for i in np.argsort(-lengths, kind="stable"):
        free = room >= min(int(lengths[i]), budget)
        chosen = int(np.where(free, load, np.inf).argmin())
        if not free[chosen]:
            return None
        assignment[i] = chosen
        room[chosen] -= lengths[i]
        load[chosen] += weights[i]
    return assignment


def _deal(assignment: np.ndarray, costs: np.ndarray, bins: int, data_parallel: int) -> MicroBatchPlan:
    """Give the bins to the ranks: neighbours in cost run at the same time, and the ranks' sums are level."""
    load = np.bincount(assignment, weights=costs, minlength=bins)
    order = np.argsort(-load, kind="stable")
    ranks: list[list[np.ndarray]] = [[] for _ in range(data_parallel)]
    sums = np.zeros(data_parallel)
    for numbers in order.reshape(-1, data_parallel):
        # The costliest bin of the round goes to the rank that has least so far.
        for number, rank in zip(numbers, np.argsort(sums, kind="stable"), strict=True):
            ranks[rank].append(np.flatnonzero(assignment == number))
            sums[rank] += load[number]
    return MicroBatchPlan(micro_batches=tuple(tuple(rank) for rank in ranks), num_responses=len(assignment))
