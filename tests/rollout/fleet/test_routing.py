"""The balancer before modelled servers of which one is slow, against round-robin."""

import pytest

from tests.rollout.fleet.measure_routing import GROUP_SIZE, SERVERS, compare


def test_a_slow_server_gets_less_and_groups_stay_together():
    ours, robin = compare(4.0, seeds=2)
    assert robin.slow_share == pytest.approx(1 / SERVERS), "the reference deals out blindly"
    assert robin.prefills == min(SERVERS, GROUP_SIZE)
    assert ours.slow_share < 0.5 / SERVERS
    assert ours.prefills < 0.15 * robin.prefills
    assert ours.seconds < 0.75 * robin.seconds


def test_among_equal_servers_nobody_is_preferred():
    ours, robin = compare(1.0, seeds=2)
    assert ours.slow_share == pytest.approx(1 / SERVERS, rel=0.5)
    assert ours.seconds < 1.1 * robin.seconds
    assert ours.mean_seconds < robin.mean_seconds
