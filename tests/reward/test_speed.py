"""The figures of measure_pool.py held to the promises. Slow, and honest only on a machine that does nothing else."""

import asyncio

import pytest

from tests.reward.measure_pool import (
    benign_throughput,
    math_verify_throughput,
    one_call_throughput,
    pool_throughput,
    responses,
)

pytestmark = pytest.mark.slow


def test_cheap_verdicts_per_core():
    requests = responses(4096)
    ours = asyncio.run(pool_throughput(requests, workers=1, rounds=4))
    theirs = math_verify_throughput(requests[:100])
    assert ours.per_cpu_second >= 20_000
    assert ours.per_cpu_second >= 20 * theirs.per_cpu_second


def test_one_percent_that_hang_cost_less_than_a_tenth():
    requests = responses(4096)
    rates = [
        asyncio.run(benign_throughput(requests, hanging_share=share, seconds=4.0)) for share in (0.0, 0.01, 0.0, 0.01)
    ]
    assert max(rates[1::2]) >= 0.9 * max(rates[::2]), rates


def test_one_percent_that_attack_the_algebra_cost_less_than_a_tenth():
    requests = responses(4096)
    rates = [asyncio.run(one_call_throughput(requests, share)) for share in (0.0, 0.01, 0.0, 0.01)]
    assert max(rates[1::2]) >= 0.9 * max(rates[::2]), rates
