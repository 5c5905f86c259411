"""What the comparison with TRL makes of two trainings; the trainings themselves are run by hand."""

import pytest

from tests.benchmarks.measure_learning import Learning, learning_of, print_tables, reached


def test_the_goal_is_found_between_two_evaluations() -> None:
    curve = [(0, 0.0, 0.1), (2, 10.0, 0.4), (4, 18.0, 0.8), (6, 30.0, 0.5)]
    assert reached(curve, 0.6) == pytest.approx((3.0, 14.0))
    assert reached(curve, 0.4) == pytest.approx((2.0, 10.0))
    assert reached(curve, 0.9) is None
    assert reached([(0, 0.0, 0.7), (2, 9.0, 0.7)], 0.6) == (2, 9.0)  # never before the first step


def test_the_clock_stands_still_during_evaluations() -> None:
    phases = dict.fromkeys(("rollout", "reward", "logprob", "update", "weight_sync", "checkpoint"), 0.5)
    line = {f"timing/{name}": seconds for name, seconds in phases.items()} | {"timing/step": 4.0}
    evaluated = line | {"rollout_step": 2, "timing/step": 9.0, "timing/evaluation": 5.0, "evaluation/sampled": 0.3}
    heldout = {"before": {"sampled": {"accuracy": 0.1}}, "after": {"sampled": {"accuracy": 0.6}}}
    found = learning_of([line | {"rollout_step": 1}, evaluated, line | {"rollout_step": 3}], heldout)
    assert found.curve == [(0, 0.0, 0.1), (2, 8.0, 0.3), (3, 12.0, 0.6)]
    assert (found.phases["training"], found.phases["rollout"]) == (12.0, 1.5)


def test_the_table_tells_a_goal_that_was_missed(capsys: pytest.CaptureFixture[str]) -> None:
    fast = Learning(curve=[(0, 0.0, 0.0), (4, 20.0, 0.8)], phases={"training": 20.0, "update": 5.0})
    slow = Learning(curve=[(0, 0.0, 0.0), (4, 40.0, 0.8)], phases={"training": 40.0, "update": 30.0})
    never = Learning(curve=[(0, 0.0, 0.0), (4, 40.0, 0.5)], phases={"training": 40.0, "update": 10.0})
    print_tables([(fast, slow), (fast, slow), (fast, never)], 0.6, ("ours", "theirs"))
    printed = capsys.readouterr().out
    assert "| 1 | ours | 3.0 | 15.0 | 5.00 | 80.0% |" in printed
    assert "| 3 | theirs | not reached | - | 10.00 | 50.0% |" in printed
    assert "Medians: 15.0 s against 30.0 s; ratio of each round 2.00 to inf, median 2.00" in printed
    assert "theirs: 40.0 s of training; update 58%" in printed
