"""`megatron-dapo bisect`: at which stage do the log-probs of engine and trainer begin to differ?"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_dapo.cli.comparison import comparison_command
from megatron_dapo.cli.exit_codes import ExitCode
from megatron_dapo.config import Config, ConfigError, load_config

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
    """Print a table of the gaps between stages; INEXACT where one is above the bound.

    Args:
        source: a config, or the directory of a run, whose newest weights in Hugging Face format are then used.
    """
    return comparison_command(lambda: _bisect(_config_of(source, overrides), options))


def _config_of(source: Path, overrides: Sequence[str]) -> Config:
    """The config, whose `model.path` names the weights."""
    if not source.is_dir():
        return load_config(source, overrides)
    from megatron_dapo.diagnostics.weight_snapshot import newest_weights

    if not (source / "config.yaml").is_file():
        raise ConfigError(f"{source}: no config.yaml there; give a config or the directory of a run")
    config, newest = load_config(source / "config.yaml", overrides), newest_weights(source)
    if newest is None:
        raise ConfigError(
            f"{source}: no weights in Hugging Face format below model/ or weights/: the run has not ended, and its "
            "servers got them without a file; convert a checkpoint with tools/convert_checkpoint.py and give a config"
        )
    return replace(config, model=replace(config.model, path=str(newest[0].resolve())))


def _bisect(config: Config, options: BisectOptions) -> bool:
    from megatron_dapo.coordinator.inputs import read_inputs
    from megatron_dapo.diagnostics.log_prob_gap import STAGES, BisectRequest, bisect, first_gap

    unknown = sorted(set(options.skip) - set(STAGES))
    if unknown:
        raise ConfigError(f"--skip {unknown[0]!r}: the stages are {', '.join(map(repr, STAGES))}")
    bound = options.bound
    if bound is None:
        bound = FLOAT32_BOUND if config.model.dtype == "float32" else config.monitor.mismatch_warn
    print(
        f"{options.responses} responses, weights of model.path = {config.model.path}, in {config.model.dtype}",
        flush=True,
    )
    inputs = read_inputs(config)
    request = BisectRequest(
        config=config,
        prompts=[prompt.ids for prompt in inputs.prompts.prompts[: options.responses]],
        stop_token_ids=inputs.text.stop_token_ids,
        max_new_tokens=min(options.tokens or 256, config.rollout.max_new_tokens),
        deadline_s=options.deadline_s,
        skip=frozenset(options.skip),
    )
    gaps = bisect(request, say=lambda text: print(f"  {text}", flush=True))
    print(f"{'':58} {'mean':>9} {'max':>9}   largest at")
    for gap in gaps:
        mark = "" if gap.mean_abs <= bound else "  <-"
        pair, place = f"{gap.before} -> {gap.after}", f"response {gap.response}, token {gap.token}"
        print(f"{pair:58} {gap.mean_abs:>9.2e} {gap.max_abs:>9.2e}   {place}{mark}")
    first = first_gap(gaps, bound)
    if first is None:
        print(f"no gap: every mean is within {bound:g}")
        return True
    print(f"the gap begins between {first.before} and {first.after}: mean {first.mean_abs:.2e}, above {bound:g}")
    return False
