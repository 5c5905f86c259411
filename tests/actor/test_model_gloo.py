"""The helper of these tests: results in order, errors with their traceback, an end to every wait."""

import os
import time

import pytest

from tests.actor.gloo import RankError, RankPlace


def place_and_sum(place: RankPlace, *numbers: int) -> tuple[int, int, int]:
    return place.rank, place.world_size, sum(numbers)


def fail_on_rank_one(place: RankPlace) -> None:
    if place.rank == 1:
        raise KeyError("the reason")
    time.sleep(60)


def exit_on_rank_zero(place: RankPlace) -> None:
    if place.rank == 0:
        os._exit(7)
    time.sleep(60)


def sleep(place: RankPlace) -> None:
    time.sleep(60)


def test_results_come_in_rank_order(gloo):
    assert gloo(2, place_and_sum, 1, 2) == [(0, 2, 3), (1, 2, 3)]


def test_an_error_of_a_rank_is_raised_here_and_the_others_end(gloo):
    began = time.monotonic()
    with pytest.raises(RankError, match=r"rank 1 raised:[\s\S]*fail_on_rank_one[\s\S]*the reason"):
        gloo(2, fail_on_rank_one)
    with pytest.raises(RankError, match="rank 0 died, exit code 7"):
        gloo(2, exit_on_rank_zero)
    with pytest.raises(RankError, match=r"ranks \[0\] gave no result within 1 s"):
        gloo(1, sleep, timeout_s=1)
    assert time.monotonic() - began < 55
