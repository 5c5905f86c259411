"""Each alarm fires on the history it is for, stays silent on a healthy run, and names a key that exists."""

import dataclasses

import pytest

from megatron_dapo.config.root import Config
from megatron_dapo.monitor.health import RULES, Alarm, HealthMonitor


def alarms(lines: list[dict]) -> list[Alarm]:
    return HealthMonitor(lines).alarms


def history(steps: int = 20, **columns) -> list[dict]:
    """A run that goes well; each column of `columns` is a constant, a list, or a function of the share of the way."""
    usual = {
        "accuracy/mean": lambda way: 0.3 + 0.4 * way,
        "reward_shaped/mean": lambda way: -0.4 + 0.8 * way,
        "response_length/mean": lambda way: 800 + 600 * way,
        "truncated_fraction": 0.02,
        "verdict_error_fraction": 0.005,
        "entropy": lambda way: 0.6 - 0.3 * way,
        "grad_norm": 0.1,
        "mismatch/mean_abs": 0.01,
        "sampling/kept": 32,
        "sampling/all_correct": lambda way: 2 + 20 * way,
        "sampling/all_wrong": lambda way: 15 - 10 * way,
        "sampling/pass_rate": 0.6,
    }

    def value(column, step: int):
        if callable(column):
            return column(step / (steps - 1))
        return column[step] if isinstance(column, list) else column

    renamed = {name.replace("__", "/"): column for name, column in columns.items()}
    return [
        {"rollout_step": step + 1, **{name: value(column, step) for name, column in {**usual, **renamed}.items()}}
        for step in range(steps)
    ]


SICK = {
    "mismatch": {"mismatch__mean_abs": 0.2},
    "entropy_collapse": {"entropy": lambda way: 0.6 * 0.01**way, "accuracy__mean": lambda way: min(0.5, 0.3 + way)},
    "length_explosion": {"response_length__mean": lambda way: 800 * 8**way, "accuracy__mean": 0.4},
    "length_collapse": {
        "response_length__mean": lambda way: 800 * 0.1**way,
        "accuracy__mean": lambda way: 0.4 - 0.3 * way,
        "reward_shaped__mean": -0.5,
    },
    "truncation": {"truncated_fraction": 0.4},
    "verdict_errors": {"verdict_error_fraction": 0.03},
    "reward_without_accuracy": {
        "reward_shaped__mean": lambda way: -1.2 + 0.5 * way,
        "accuracy__mean": lambda way: 0.4 - 0.2 * way,
    },
    "overfitting": {"evaluation__sampled": [None] * 9 + [0.5] + [None] * 9 + [0.4]},
    "all_correct": {"sampling__all_correct": 90, "accuracy__mean": 0.8},
    "no_signal": {"grad_norm": 0.0},
    "entropy_rise": {"entropy": lambda way: 0.1 * 20**way, "accuracy__mean": 0.4},
    "repetition": {"repetition": 0.4},
    "dead_experts": {"experts__dead": 0.02},
    "expert_imbalance": {"experts__imbalance": lambda way: 1.5 + 2 * way},
    "small_batch": {"sampling__batch_share": 1 / 32},
}


@pytest.mark.parametrize("name", SICK)
def test_fires_alone_on_its_own_sickness(name):
    assert [alarm.name for alarm in alarms(history(**SICK[name]))] == [name]


def test_few_useful_groups_are_no_signal():
    assert [alarm.name for alarm in alarms(history(sampling__pass_rate=0.05))] == ["no_signal"]


def test_a_batch_without_its_useless_groups_is_small_only_when_little_is_left():
    for share, names in ((0.5, []), (0.2, ["small_batch"])):
        monitor = HealthMonitor(history(sampling__batch_share=share), filter="drop")
        assert [alarm.name for alarm in monitor.alarms] == names


def test_verdicts_that_fail_at_once_are_not_waited_for():
    """A verifier that times out on everything shows at the first step; one bad verdict of a small batch does not."""
    assert [alarm.name for alarm in alarms(history(verdict_error_fraction=0.9)[:1])] == ["verdict_errors"]
    assert [alarm.name for alarm in alarms(history(verdict_error_fraction=0.14)[:1])] == ["verdict_errors"]
    assert alarms(history(verdict_error_fraction=0.05)[:1]) == []


def test_every_rule_is_tried_here():
    assert {rule.name for rule, _ in RULES} == {*SICK}


@pytest.mark.parametrize("steps", [0, 1, 2, 5, 9, 10, 40])
def test_a_healthy_run_is_left_in_peace(steps):
    assert alarms(history(max(2, steps))[:steps]) == []


def test_missing_values_raise_no_alarm_and_no_error():
    assert alarms([{"rollout_step": step} for step in range(1, 30)]) == []


def test_certainty_on_a_solved_task_is_no_collapse():
    """A small task learnt to the end: entropy is gone, groups are all right, and nothing is wrong."""
    lines = history(
        entropy=lambda way: 0.3 * 0.01**way,
        accuracy__mean=lambda way: min(0.97, 0.3 + way),
        sampling__all_correct=lambda way: 200 * way,
    )
    assert alarms(lines) == []


def test_low_entropy_while_accuracy_rises_is_no_collapse():
    assert alarms(history(entropy=lambda way: 0.3 * 0.1**way)) == []


def test_an_alarm_is_new_once():
    lines = history(truncated_fraction=lambda way: float(way > 0.5))
    monitor = HealthMonitor()
    names = [[alarm.name for alarm in monitor.add(line)] for line in lines]
    assert [found for found in names if found] == [["truncation"]]
    assert [alarm.name for alarm in monitor.alarms] == ["truncation"], "it still holds"


@pytest.mark.parametrize("name", SICK)
def test_a_resumed_run_raises_what_an_uninterrupted_one_raises(name):
    """Wherever it was cut: the steps before are read again, and what held at their end is not raised a second time."""
    lines = history(**SICK[name])
    whole = HealthMonitor()
    raised = [whole.add(line) for line in lines]
    for cut in range(len(lines)):
        resumed = HealthMonitor(lines[:cut])
        assert [resumed.add(line) for line in lines[cut:]] == raised[cut:]
        assert resumed.alarms == alarms(lines)


def test_limits_are_read():
    lines = history(mismatch__mean_abs=0.2)
    assert HealthMonitor(lines, mismatch_warn=0.3).alarms == []


def config_keys(section: type, prefix: str = "") -> set[str]:
    keys = set()
    for field in dataclasses.fields(section):
        below = dataclasses.is_dataclass(field.type)
        keys |= config_keys(field.type, f"{prefix}{field.name}.") if below else {prefix + field.name}
    return keys


@pytest.mark.parametrize("name", SICK)
def test_the_key_to_turn_exists(name):
    (alarm,) = alarms(history(**SICK[name]))
    assert set(alarm.key.split(" or ")) <= config_keys(Config)
    assert str(alarm).endswith(f"Look at {alarm.key}.")
