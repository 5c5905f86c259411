"""Exit codes: the nearest class decides."""

from megatron_dapo.cli.exit_codes import ExitCode, exit_code_of, named


def test_the_nearest_class_decides():
    from megatron_dapo.cluster.trainer import Diverged, TrainerLost
    from rollout.errors import FleetLost

    assert exit_code_of(Diverged("x")) is ExitCode.DIVERGED
    assert exit_code_of(TrainerLost("x")) is ExitCode.TRAINER
    assert exit_code_of(FleetLost("x")) is ExitCode.FLEET
    assert exit_code_of(PermissionError("x")) is ExitCode.FAILED
    assert exit_code_of(KeyError("x")) is None, "a fault of ours keeps its traceback"


def test_an_error_is_named_as_the_runbook_lists_it():
    from megatron_dapo.cluster.trainer import TrainerLost
    from megatron_dapo.config import ConfigError
    from rollout.errors import FleetLost, RolloutError

    assert named(FleetLost("all")) == "FleetLost (RolloutError): all"
    assert named(RolloutError("one")) == "RolloutError: one"
    assert named(TrainerLost("rank 1")) == "TrainerLost (TrainerError): rank 1"
    assert named(ConfigError("a.key = 1")) == "a.key = 1"
