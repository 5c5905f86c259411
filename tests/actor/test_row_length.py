"""Rows of one length, as pipeline stages exchange them."""

from dataclasses import replace

import numpy as np
import pytest

from megatron_dapo.actor.packing import pack_micro_batch, plan_for_actor, row_length
from megatron_dapo.config.actor_config import ActorConfig, LayoutConfig
from tests.actor.test_packing import ONE_RANK, responses_of


def test_rows_of_one_length_end_in_a_sequence_of_padding():
    responses = responses_of(([5, 6], [7, 8, 2]), ([1], [1]), ([9], [2]))
    packed = pack_micro_batch(responses, np.array([0, 2]), ONE_RANK, least=12)
    assert packed.input_ids.tolist() == [5, 6, 7, 8, 2, 9, 2, 5, 6, 7, 8, 2]
    assert packed.position_ids.tolist() == [0, 1, 2, 3, 4, 0, 1, 0, 1, 2, 3, 4]
    assert packed.sequence_bounds.tolist() == [0, 5, 7, 12]
    assert packed.rows.tolist() == [1, 2, 3, 5]
    assert packed.continued.tolist() == [True] * 4 + [False, True, False] + [False] * 5
    empty = pack_micro_batch(responses, np.zeros(0, np.int64), ONE_RANK, least=12)
    assert empty.sequence_bounds.tolist() == [0, 1, 12]
    assert empty.rows.size == empty.targets.size == 0
    assert empty.input_ids.tolist() == [0, 5, 6, 7, 8, 2, 1, 1, 9, 2, 5, 6], "tokens of the message"


def test_padding_goes_to_the_experts_of_the_tokens_that_it_repeats():
    responses = responses_of(([5, 6], [7, 8, 2]), ([9], [2]))
    routing = np.arange(7 * 3 * 2, dtype=np.uint8).reshape(7, 3, 2)
    packed = pack_micro_batch(replace(responses, routing=routing), np.array([0, 1]), ONE_RANK, least=16)
    assert np.array_equal(packed.routing, np.concatenate([routing, routing, routing[:2]]))


@pytest.mark.parametrize(
    ("data", "most", "slowest"),
    [(1, 0.01, 0.01), (2, 0.02, 0.02), (3, 0.025, 0.025), (4, 0.02, 0.02), (8, 0.02, 0.02), (16, 0.02, 0.025)],
)
def test_rows_of_one_length_cost_little_at_the_papers_lengths(data, most, slowest):
    """Responses lognormal, mean 4700, cut at 20480; 512 of a mini-batch, rows of 22528 tokens, TP 8 PP 2: tokens of
    padding, and how far the rank with most to do, attention and padding included, is above the mean without padding."""
    layout = LayoutConfig(tensor=8, pipeline=2, data=data, sequence_parallel=True)
    shares, excess = [], []
    for seed in range(8):
        random = np.random.default_rng(seed)
        lengths = np.minimum(random.lognormal(np.log(4700) - 0.9**2 / 2, 0.9, 512), 20480).astype(int) + 200
        plan = plan_for_actor(lengths, ActorConfig(layout=layout, micro_batch_tokens=22528), hidden_size=5120)
        padding, cost = 0, []
        for rank in plan.micro_batches:
            rows = np.array([row_length(lengths[each], layout, 1) for each in rank])
            more = rows.max() - np.array([lengths[each].sum() for each in rank])
            padding += more.sum()
            cost.append(cost_of(lengths[np.concatenate(rank)]) + cost_of(more))
        shares.append(padding / lengths.sum())
        excess.append(max(cost) * data / cost_of(lengths) - 1)
    assert np.mean(shares) < most
    assert np.mean(excess) < slowest


def cost_of(lengths: np.ndarray) -> float:
    """Of sequences, in tokens without attention."""
    return float((lengths * (1 + lengths / (12 * 5120))).sum())
