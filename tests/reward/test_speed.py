"""The figures of measure_pool.py held to the promises. Slow, and honest only on a machine that does nothing else."""

import asyncio

import pytest

from tests.reward.measure_pool import (
    attack_pairs,
    hanging_pairs,
    math_verify_throughput,
    median_ratio,
    pool_throughput,
    responses,
)

pytestmark = pytest.mark.slow


def test_fast_verdicts_per_core():
    requests = responses(4096)
    ours = asyncio.run(pool_throughput(requests, workers=1, rounds=4))
    theirs = math_verify_throughput(requests[:100])
    assert ours.per_cpu_second >= 20_000
    assert ours.per_cpu_second >= 20 * theirs.per_cpu_second


def test_one_percent_that_hang_cost_less_than_a_tenth():
    pairs = hanging_pairs(responses(4096))
    assert median_ratio(pairs) >= 0.9, pairs


def test_one_percent_that_attack_the_algebra_cost_less_than_a_tenth():
    pairs = attack_pairs(responses(4096))
    assert median_ratio(pairs) >= 0.9, pairs
