"""Log-probs at a vocabulary of 152 064 take at most a quarter of the plain way's memory, and no more time."""

import pytest

from tools.benchmarks.measure_logprob import FROM_LOGITS, rounds_of


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_chunked_log_probs_take_a_quarter_of_the_memory_and_no_more_time(dtype):
    found = rounds_of(FROM_LOGITS, dtype, ["--tokens", "256", "--repeats", "1"], rounds=1)
    plain, chunked = (found[way] for way in FROM_LOGITS)
    assert plain["peak_mib"] > 4 * chunked["peak_mib"], found
    assert chunked["seconds"] < plain["seconds"], found
