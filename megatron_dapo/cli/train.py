"""`megatron-dapo train`: one config, one run, one exit code."""

import asyncio
import logging
import os
import resource
import secrets
import shlex
from collections.abc import Sequence
from pathlib import Path

from megatron_dapo.cli.exit_codes import ExitCode, exit_code_of
from megatron_dapo.cluster.stop_signals import StoppedEarly, stop_at_once
from megatron_dapo.config import Config, ConfigError, load_config
from megatron_dapo.monitor.console import Console
from megatron_dapo.storage.run_dir import CheckpointDamaged


def train_command(path: Path, overrides: Sequence[str]) -> ExitCode:
    """Run it. Every known fault is one message and an exit code; a traceback means a fault of ours."""
    prepare_environment()
    console = Console()
    again = _resume_command(path, overrides)
    try:
        with stop_at_once():
            try:
                config = load_config(path, overrides)
            except ConfigError as error:
                console.error(str(error))
                return ExitCode.CONFIG
            _run(config, console)
    except StoppedEarly as stopped:
        console.note(f"{stopped}: stopped before the run began; continue with: {again}")
        return ExitCode.CONTINUE
    except (KeyboardInterrupt, asyncio.CancelledError):
        console.error(f"interrupted; what was not saved is lost; continue with: {again}")
        return ExitCode.INTERRUPTED
    except Exception as error:
        code = exit_code_of(error)
        if code is None:
            raise
        if code is ExitCode.CONTINUE:
            console.note(f"stopped; continue with: {again}")
        else:
            console.error(f"{type(error).__name__}: {error}")
            if isinstance(error, CheckpointDamaged) and error.intact is not None:
                console.note(f"continue with: {again} run.resume_step={error.intact}")
        return code
    return ExitCode.FINISHED


def _resume_command(path: Path, overrides: Sequence[str]) -> str:
    kept = [override for override in overrides if override.split("=")[0] not in ("run.resume", "run.resume_step")]
    return f"megatron-dapo train {shlex.join([str(path), *kept, 'run.resume=true'])}"


def _run(config: Config, console: Console) -> None:
    # What a user may have got wrong is looked at before Ray and the rest are imported, which takes seconds.
    from megatron_dapo.coordinator.inputs import read_inputs
    from megatron_dapo.storage.run_dir import RunDir, has_run

    if not config.run.resume and has_run(Path(config.run.dir)):
        RunDir(config.run.dir, resume=False).close()  # says whose run that is
    inputs = read_inputs(config)
    console.note(f"prompts: {inputs.prompts.summary()}")
    console.note(f"held-out problems: {inputs.heldout.summary()}")
    from megatron_dapo.coordinator.supervise import run_blocking

    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    run_blocking(config, inputs, console)


def prepare_environment() -> None:
    """Settings that libraries read while they are imported, for this process and those it starts."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ["HF_HUB_OFFLINE"] = "1"  # a run reads what it was given and never a hub
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    if "RAY_ADDRESS" not in os.environ:
        # Ray's name for "this machine alone". Else it takes the machine's own address, whatever address it is given,
        # and its processes listen on every interface.
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    if "RAY_ADDRESS" not in os.environ and "RAY_AUTH_MODE" not in os.environ:
        # Another user of this machine reaches the same loopback ports: only who knows the token may talk to our Ray.
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    # A connection for each running response: 64 servers with 256 each are more than the usual 1024 files.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
