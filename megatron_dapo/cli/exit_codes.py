"""What a run's exit code means; a job script may rely on it."""

from enum import IntEnum


class ExitCode(IntEnum):
    FINISHED = 0
    FAILED = 1
    """An error that has no code of its own; the message says what."""
    CONFIG = 2
    """Config, data, model or run directory cannot be used."""
    DIVERGED = 3
    """Training stopped making sense: non-finite gradient, or engine and trainer disagree."""
    STALLED = 4
    """A deadline passed."""
    FLEET = 5
    """The rollout servers could not be started or were lost."""
    TRAINER = 6
    """Ray or a trainer rank could not be started, or was lost too often."""
    INEXACT = 7
    """`certify`, `replay`, `bisect`: numbers that should be the same differ by more than the bounds."""
    CONTINUE = 75
    """Stopped by a signal, with everything saved: the same command with `run.resume=true` goes on."""
    INTERRUPTED = 130
    """Ended at once by a second signal; `run.resume=true` goes on from the last checkpoint."""


OF_ERRORS = {
    "megatron_dapo.config.base.ConfigError": ExitCode.CONFIG,
    "megatron_dapo.data.records.DataError": ExitCode.CONFIG,
    "megatron_dapo.data.tokenizer.TokenizerError": ExitCode.CONFIG,
    "megatron_dapo.storage.ledger.LedgerError": ExitCode.CONFIG,
    "megatron_dapo.monitor.writer.MetricsError": ExitCode.CONFIG,
    "megatron_dapo.storage.run_dir.RunDirError": ExitCode.CONFIG,
    "megatron_dapo.storage.run_dir.RunDirLost": ExitCode.FAILED,
    "megatron_dapo.cluster.placement.PlacementError": ExitCode.CONFIG,
    "megatron_dapo.diagnostics.response_log.EvaluationError": ExitCode.CONFIG,
    "megatron_dapo.actor.ranks.RankTimeout": ExitCode.STALLED,
    "megatron_dapo.actor.ranks.RankError": ExitCode.TRAINER,
    "reward.verdict.VerifierError": ExitCode.CONFIG,
    "reward.lanes.PoolError": ExitCode.FAILED,
    "megatron_dapo.coordinator.step_metrics.MismatchStop": ExitCode.DIVERGED,
    "megatron_dapo.cluster.trainer.Diverged": ExitCode.DIVERGED,
    "megatron_dapo.cluster.gpu_handover.MemoryNotFree": ExitCode.CONFIG,
    "megatron_dapo.cluster.waits.Stalled": ExitCode.STALLED,
    "megatron_dapo.cluster.waits.StopRequested": ExitCode.CONTINUE,
    "rollout.errors.KeyFileError": ExitCode.CONFIG,
    "rollout.errors.RolloutError": ExitCode.FLEET,
    "megatron_dapo.experience.responder.EngineAborted": ExitCode.FLEET,
    "megatron_dapo.experience.responder.Unjudged": ExitCode.FAILED,
    "megatron_dapo.cluster.ray_cluster.ClusterError": ExitCode.TRAINER,
    "megatron_dapo.cluster.trainer.TrainerError": ExitCode.TRAINER,
    "megatron_dapo.coordinator.sampler.OversamplingLimit": ExitCode.FAILED,
    "builtins.OSError": ExitCode.FAILED,
}
"""Errors that explain themselves. By name: their modules are imported only by what raises them."""


def exit_code_of(error: BaseException) -> ExitCode | None:
    """The code of an error, or of the nearest of its base classes; None: a fault of ours, worth a traceback."""
    names = (f"{kind.__module__}.{kind.__qualname__}" for kind in type(error).__mro__)
    return next((OF_ERRORS[name] for name in names if name in OF_ERRORS), None)
