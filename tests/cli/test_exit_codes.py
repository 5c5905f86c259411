"""Exit codes: the nearest class decides."""

from megatron_dapo.cli.exit_codes import ExitCode, exit_code_of


def test_the_nearest_class_decides():
    from megatron_dapo.cluster.trainer import Diverged, TrainerLost
    from rollout.errors import FleetLost

    assert exit_code_of(Diverged("x")) is ExitCode.DIVERGED
    assert exit_code_of(TrainerLost("x")) is ExitCode.TRAINER
    assert exit_code_of(FleetLost("x")) is ExitCode.FLEET
    assert exit_code_of(PermissionError("x")) is ExitCode.FAILED
    assert exit_code_of(KeyError("x")) is None, "a fault of ours keeps its traceback"
