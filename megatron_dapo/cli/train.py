"""`megatron-dapo train`: one config, one run, one exit code."""

import asyncio
import logging
import os
import secrets
import shlex
from collections.abc import Sequence
from pathlib import Path

from megatron_dapo.cli.exit_codes import ExitCode
from megatron_dapo.config import ConfigError, load_config


def train_command(path: Path, overrides: Sequence[str]) -> ExitCode:
    """Run it. Every known fault is one message and an exit code; a traceback means a fault of ours."""
    prepare_environment()
    from megatron_dapo.monitor.console import Console

    console = Console()
    try:
        config = load_config(path, overrides)
    except ConfigError as error:
        console.error(str(error))
        return ExitCode.CONFIG
    from megatron_dapo.coordinator.run import run_blocking

    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    try:
        run_blocking(config, console)
    except (KeyboardInterrupt, asyncio.CancelledError):
        console.error(
            f"interrupted; continue with: megatron-dapo train {shlex.join([str(path), *overrides])} run.resume=true"
        )
        return ExitCode.INTERRUPTED
    except Exception as error:
        code = exit_code_of(error)
        if code is None:
            raise
        console.error(f"{type(error).__name__}: {error}")
        return code
    return ExitCode.FINISHED


def prepare_environment() -> None:
    """Settings that libraries read while they are imported, for this process and those it starts."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ["HF_HUB_OFFLINE"] = "1"  # a run reads what it was given and never a hub
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    if "RAY_ADDRESS" not in os.environ and "RAY_AUTH_MODE" not in os.environ:
        # Another user of this machine reaches the same loopback ports: only who knows the token may talk to our Ray.
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


def exit_code_of(error: Exception) -> ExitCode | None:
    """The exit code of a fault that has an explanation of its own; None for any other."""
    from megatron_dapo.coordinator.generator import EngineAborted
    from megatron_dapo.coordinator.run_dir import RunDirError
    from megatron_dapo.coordinator.sampler import OversamplingLimit
    from megatron_dapo.coordinator.step_metrics import MismatchStop
    from megatron_dapo.coordinator.trainer import Diverged, PlacementError, TrainerError
    from megatron_dapo.coordinator.waits import Stalled
    from megatron_dapo.data.prompts import DataError
    from megatron_dapo.data.tokenizer import TokenizerError
    from rollout.errors import RolloutError

    table: list[tuple[tuple[type[Exception], ...], ExitCode]] = [
        ((ConfigError, DataError, TokenizerError, RunDirError, PlacementError), ExitCode.CONFIG),
        ((MismatchStop, Diverged), ExitCode.DIVERGED),
        ((Stalled,), ExitCode.STALLED),
        ((RolloutError, EngineAborted), ExitCode.FLEET),
        ((TrainerError,), ExitCode.TRAINER),
        ((OversamplingLimit,), ExitCode.FAILED),
    ]
    return next((code for kinds, code in table if isinstance(error, kinds)), None)
