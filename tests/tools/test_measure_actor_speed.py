"""The actor's update beside a plain loop."""

import pytest

from tests.actor.measure_actor_speed import table


@pytest.mark.slow
def test_the_actor_is_at_least_as_fast_as_a_plain_loop():
    """On ragged lengths, where the plain loop pads; both take turns, by CPU time."""
    [row] = list(table(turns=5, threads=1, only="quickstart base, ragged"))[2:]
    _, _, parameters, tokens, ours, plain, ratio, agreement, _ = row.split("|")
    assert (parameters.strip(), tokens.strip()) == ("0.9M", "4929")
    assert min(float(ours), float(plain)) > 0
    assert float(ratio.split()[0]) >= 1.0
    assert all(float(difference) < 1e-5 for difference in agreement.split(","))
