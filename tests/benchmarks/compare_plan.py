"""`python -m tests.benchmarks.compare_plan`: the planner's step times beside published ones, as Markdown.

compare_plan.yaml holds them. What a publication does not state is assumed there, and each row says what: the error is
that of model and assumptions together.
"""

import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import yaml

from megatron_dapo.config import load_config
from megatron_dapo.plan.memory import server_memory
from megatron_dapo.plan.scenario import BUILT_IN, Calibration, Scenario, changed, load_calibration
from megatron_dapo.plan.step_plan import plan_step, rollouts

RECIPE = Path(__file__).parents[2] / "examples" / "qwen2.5_32b" / "paper.yaml"
SIGMA = 0.9
SHARED_MEMORY_FRACTION = 0.6


@dataclass(frozen=True, kw_only=True, slots=True)
class Published:
    """One published step, on GPUs that trainer and servers share, and what is assumed of it."""

    name: str
    seconds: tuple[float, float]
    """From, to; equal where one figure is published."""

    model: str
    gpus: int
    prompts: int
    """Generated; all at once."""

    group: int
    trained_responses: int
    optimizer_steps: int
    longest: int
    mean: float
    """Response tokens, cut at `longest`."""

    tensor: int
    pipeline: int
    assumed: str
    expert: int = 1
    constants: dict[str, float] = dataclasses.field(default_factory=dict)


STEPS = tuple(Published(**step) for step in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text()))


def modelled_seconds(published: Published, constants: Calibration) -> tuple[float, float, float]:
    """Rollout, log-probs, updates. Without weight sync: the published systems move weights in memory."""
    mean = uncut_mean(published.mean, published.longest)
    constants = dataclasses.replace(constants, mean_response=mean, response_sigma=SIGMA, pass_rate=0.5)
    constants = dataclasses.replace(constants, **published.constants)
    data = published.gpus // (published.tensor * published.pipeline)
    config = changed(
        load_config(RECIPE),
        {
            "actor.layout.tensor": published.tensor,
            "actor.layout.pipeline": published.pipeline,
            "actor.layout.data": data,
            "actor.layout.expert": published.expert,
            "actor.layout.sequence_parallel": True,
            "actor.recompute": "full",
            "run.mode": "colocated",
            "rollout.servers": published.gpus // 4,
            "rollout.tensor_parallel": 4,
            "rollout.max_new_tokens": published.longest,
            "rollout.memory_fraction": SHARED_MEMORY_FRACTION,
            "algorithm.dynamic_sampling.filter": "off",
            "algorithm.group_size": published.group,
            "algorithm.mini_batch_responses": published.trained_responses // published.optimizer_steps,
        },
    )
    case = Scenario(config, BUILT_IN[published.model], constants)
    memory = server_memory(case)
    generated = case.changed({"algorithm.prompts_per_step": published.prompts})
    trained = case.changed({"algorithm.prompts_per_step": published.trained_responses // published.group})
    [rollout] = rollouts(generated, memory, steps=1)
    train = plan_step(trained, rollouts(trained, memory, steps=1))
    return rollout.seconds, train.log_prob_s, train.update_s


def uncut_mean(mean: float, longest: int) -> float:
    """Mean of a lognormal whose values, cut at `longest`, have the mean `mean`."""
    draws = np.random.default_rng(0).standard_normal(20000)
    low, high = 1.0, 100.0 * longest
    for _ in range(60):
        middle = (low + high) / 2
        cut = np.minimum(np.exp(np.log(middle) - SIGMA**2 / 2 + SIGMA * draws), longest).mean()
        low, high = (middle, high) if cut < mean else (low, middle)
    return low


def table() -> str:
    """All of `STEPS` as a Markdown table."""
    constants = load_calibration()
    lines = [
        "| published | s | modelled: rollout + log-probs + update | s | error | assumed, since not stated |",
        "|---|---|---|---|---|---|",
    ]
    for published in STEPS:
        parts = modelled_seconds(published, constants)
        low, high = published.seconds
        shown = f"{low:.0f}" if low == high else f"{low:.0f} to {high:.0f}"
        error = sum(parts) / ((low + high) / 2) - 1
        parts_shown = " + ".join(f"{part:.0f}" for part in parts)
        lines.append(
            f"| {published.name} | {shown} | {parts_shown} | {sum(parts):.0f} | {error:+.0%} | {published.assumed} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(print(table()))
