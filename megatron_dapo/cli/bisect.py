"""`megatron-dapo bisect`: at which stage do the log-probs of engine and trainer begin to differ?"""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from megatron_dapo.cli.command_line import Overrides, comparison_command, config_of
from megatron_dapo.config import ConfigError

FLOAT32_BOUND = 1e-3
"""Nats: mean gap of two implementations in float32 above which they do not hold the same model. Rounding gives 1e-5."""


@comparison_command
def bisect(
    source: Annotated[Path, typer.Argument(help="YAML config, or the directory of a run.")],
    overrides: Overrides = None,
    responses: Annotated[int, typer.Option(min=1, help="Prompts to answer, one response each.")] = 8,
    tokens: Annotated[int | None, typer.Option(min=1, help="Longest response; 256, or what the config allows.")] = None,
    bound: Annotated[float | None, typer.Option(min=0, help="Largest mean gap; 1e-3 in float32.")] = None,
    skip: Annotated[list[str] | None, typer.Option(help="A stage to leave out, by its name in the table.")] = None,
    deadline: Annotated[float, typer.Option(min=1, help="Seconds that each stage may take.")] = 1800.0,
) -> bool:
    """Re-score a few responses by every stage from engine to trainer, to see where a gap in log-probs begins."""
    from megatron_dapo.coordinator.inputs import read_inputs
    from megatron_dapo.diagnostics.evaluation_session import newest_weights
    from megatron_dapo.diagnostics.log_prob_gap import STAGES, find_gaps
    from rollout.generation import SamplingParams

    config, skipped = config_of(source, overrides or []), skip or []
    if source.is_dir():
        config = replace(config, model=replace(config.model, path=str(newest_weights(source)[0].resolve())))
    if unknown := sorted(set(skipped) - set(STAGES)):
        raise ConfigError(f"--skip {unknown[0]!r}: the stages are {', '.join(map(repr, STAGES))}")
    if bound is None:
        bound = FLOAT32_BOUND if config.model.dtype == "float32" else config.monitor.mismatch_warn
    print(f"{responses} responses, weights of model.path = {config.model.path}, in {config.model.dtype}", flush=True)
    inputs, longest = read_inputs(config), min(tokens or 256, config.rollout.max_new_tokens)
    gaps = find_gaps(
        config,
        [prompt.ids for prompt in inputs.prompts.prompts[:responses]],
        SamplingParams(max_new_tokens=longest, stop_token_ids=inputs.text.stop_token_ids),
        deadline_s=deadline,
        skip=skipped,
        say=lambda text: print(f"  {text}", flush=True),
    )
    above = [gap for gap in gaps if not gap.mean_abs <= bound]  # a mean that is no number too
    print(f"{'':58} {'mean':>9} {'max':>9}   largest at")
    for gap in gaps:
        mark = "  <-" if gap in above else ""
        pair, place = f"{gap.before} -> {gap.after}", f"response {gap.response}, token {gap.token}"
        print(f"{pair:58} {gap.mean_abs:>9.2e} {gap.max_abs:>9.2e}   {place}{mark}")
    if not above:
        print(f"no gap: every mean is within {bound:g}")
        return True
    first = above[0]
    print(f"the gap begins between {first.before} and {first.after}: mean {first.mean_abs:.2e}, above {bound:g}")
    return False
