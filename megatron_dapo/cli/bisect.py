"""`megatron-dapo bisect`: where do the log-probs of engine and trainer part?"""

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from megatron_dapo.cli.exit_codes import ExitCode
from megatron_dapo.config import Config, ConfigError, load_config

if TYPE_CHECKING:
    from megatron_dapo.diagnostics.log_prob_gap import Link, Question

FLOAT32_BOUND = 1e-3
"""Nats: mean gap of two implementations in float32 above which they do not hold the same model. Rounding gives 1e-5."""


@dataclass(frozen=True, kw_only=True)
class BisectOptions:
    """What the command line says beside the config."""

    responses: int
    tokens: int | None
    bound: float | None
    skip: tuple[str, ...]
    deadline_s: float


def bisect_command(source: Path, overrides: Sequence[str], options: BisectOptions) -> ExitCode:
    """Print a table of the chain's links; INEXACT where one is above the bound.

    Args:
        source: a config, or the directory of a run, whose newest weights in Hugging Face format are then used.
    """
    from megatron_dapo.actor.ranks import RankError, RankTimeout
    from megatron_dapo.cluster.placement import PlacementError
    from megatron_dapo.data.tokenizer import TokenizerError
    from rollout.errors import RolloutError

    try:
        return _bisect(*_config_of(source, overrides), options)
    except (ConfigError, TokenizerError, PlacementError) as error:
        return _fail(error, ExitCode.CONFIG)
    except RankTimeout as error:
        return _fail(error, ExitCode.STALLED)
    except RankError as error:
        return _fail(error, ExitCode.TRAINER)
    except RolloutError as error:
        return _fail(error, ExitCode.FLEET)


def newest_weights(run: Path) -> Path | None:
    """The exported model of a run that has ended, else the newest version that its servers read from disk."""
    versions = sorted((run / "weights").glob("v*"), key=lambda folder: int(folder.name.removeprefix("v")))
    found = [folder for folder in (run / "model", *reversed(versions)) if (folder / "config.json").is_file()]
    return found[0] if found else None


def _config_of(source: Path, overrides: Sequence[str]) -> tuple[Config, str]:
    """The config, and which weights it names."""
    if not source.is_dir():
        config = load_config(source, overrides)
        return config, f"model.path = {config.model.path}"
    if not (source / "config.yaml").is_file():
        raise ConfigError(f"{source}: no config.yaml there; give a config or the directory of a run")
    config, weights = load_config(source / "config.yaml", overrides), newest_weights(source)
    if weights is None:
        raise ConfigError(
            f"{source}: no weights in Hugging Face format below model/ or weights/: the run has not ended, and its "
            "servers got them without a file; convert a checkpoint with tools/convert_checkpoint.py and give a config"
        )
    return replace(config, model=replace(config.model, path=str(weights.resolve()))), str(weights)


def _bisect(config: Config, weights: str, options: BisectOptions) -> ExitCode:
    from megatron_dapo.diagnostics.log_prob_gap import CHAIN, bisect, first_gap

    unknown = sorted(set(options.skip) - set(CHAIN))
    if unknown:
        raise ConfigError(f"--skip {unknown[0]!r}: the parts are {', '.join(map(repr, CHAIN))}")
    bound = options.bound
    if bound is None:
        bound = FLOAT32_BOUND if config.model.dtype == "float32" else config.monitor.mismatch_warn
    with tempfile.TemporaryDirectory(prefix="bisect-") as folder:
        print(f"{options.responses} responses, weights of {weights}, in {config.model.dtype}", flush=True)
        links = bisect(_question(config, options, Path(folder)), say=lambda text: print(f"  {text}", flush=True))
    print(f"{'':58} {'mean':>9} {'max':>9}   largest at")
    for link in links:
        print(_row(link, "" if link.mean_abs <= bound else "  <-"))
    gap = first_gap(links, bound)
    if gap is None:
        print(f"no gap: every mean is within {bound:g}")
        return ExitCode.FINISHED
    print(f"the gap begins between {gap.before} and {gap.after}: mean {gap.mean_abs:.2e}, above {bound:g}")
    return ExitCode.INEXACT


def _question(config: Config, options: BisectOptions, logs: Path) -> "Question":
    import torch

    from megatron_dapo.cluster.engines import visible_gpus
    from megatron_dapo.coordinator.inputs import read_inputs
    from megatron_dapo.diagnostics.log_prob_gap import Question

    inputs = read_inputs(config)
    cuda = config.actor.device != "cpu" and torch.cuda.is_available()
    device: Literal["cpu", "cuda"] = "cuda" if cuda else "cpu"
    return Question(
        config=config,
        prompts=[prompt.ids for prompt in inputs.prompts.prompts[: options.responses]],
        stop_token_ids=inputs.text.stop_token_ids,
        max_new_tokens=min(options.tokens or 256, config.rollout.max_new_tokens),
        device=device,
        gpus=visible_gpus(torch.cuda.device_count()) if cuda else (),
        logs=logs,
        deadline_s=options.deadline_s,
        skip=frozenset(options.skip),
    )


def _row(link: "Link", mark: str) -> str:
    place = f"response {link.response}, token {link.token}"
    return f"{link.before + ' -> ' + link.after:58} {link.mean_abs:>9.2e} {link.max_abs:>9.2e}   {place}{mark}"


def _fail(error: Exception, code: ExitCode) -> ExitCode:
    print(error, file=sys.stderr)
    return code
