"""The actor's update beside a plain loop."""

import pytest

from tools.benchmarks.measure_actor_speed import tables


@pytest.mark.slow
def test_the_actor_is_at_least_as_fast_as_a_plain_loop_and_two_ranks_report_their_efficiency():
    """On ragged lengths, where the plain loop pads; both take turns, by CPU time."""
    (against,), (efficiency,) = (
        [line for line in table.splitlines() if line.startswith("| quickstart")]
        for table in "\n".join(tables(turns=5, threads=1, only="quickstart base, ragged", rounds=1)).split("\n\n")
    )
    _, _, parameters, tokens, ours, plain, ratio, agreement, _ = against.split("|")
    assert (parameters.strip(), tokens.strip()) == ("0.9M", "4929")
    assert min(float(ours), float(plain)) > 0
    assert float(ratio.split()[0]) >= 1.0
    assert all(float(difference) < 1e-5 for difference in agreement.split(","))
    assert all(0 < float(value) < 1.5 for value in efficiency.split("|")[2:4])
