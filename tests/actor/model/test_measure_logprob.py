"""Log-probs at a vocabulary of 152 064 take at most a quarter of the plain way's memory, and no more time."""

import pytest
import torch

from tests.actor.model.measure_logprob import FROM_LOGITS, Shape, rounds_of


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], ids=str)
def test_chunked_log_probs_take_a_quarter_of_the_memory_and_no_more_time(dtype):
    found = rounds_of(FROM_LOGITS, dtype, Shape(tokens=256, repeats=1), rounds=1)
    (plain_peak, plain_seconds), (chunked_peak, chunked_seconds) = found["plain"], found["chunked"]
    assert plain_peak > 4 * chunked_peak, found
    assert chunked_seconds < plain_seconds, found
