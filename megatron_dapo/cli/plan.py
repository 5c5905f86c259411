"""`megatron-dapo plan`: memory, seconds and GPU-hours of a config, before a GPU is asked for."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from megatron_dapo.cli.exit_codes import ExitCode
from megatron_dapo.config import ConfigError, load_config
from megatron_dapo.plan.calibration import load_calibration
from megatron_dapo.plan.memory import PHASES
from megatron_dapo.plan.planner import Plan, make_plan, other_splits, remedies
from megatron_dapo.plan.rank_state import model_parameters
from megatron_dapo.plan.scenario import Changes, Scenario, model_dimensions, share_gpus
from megatron_dapo.plan.step_plan import StepPlan

WIDTH = 120
GB = 1e9


def plan_command(
    path: Path, overrides: Sequence[str], calibration: Path | None, *, as_json: bool, **assumed: float | None
) -> ExitCode:
    """Print the plan. FINISHED if everything fits, CONFIG if not or if the config is none. `assumed`: constants that
    take another value than the calibration's, where one is given."""
    try:
        config, constants = load_config(path, overrides), load_calibration(calibration)
        hf, source = model_dimensions(config.model.path)
        constants = replace(constants, **{name: value for name, value in assumed.items() if value is not None})
        plan = make_plan(Scenario(config, hf, constants))
        splits, ways = (other_splits(plan), []) if plan.fits else ([], remedies(plan.case))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return ExitCode.CONFIG
    if as_json:
        print(json.dumps(_tree(source, plan, splits, ways), indent=2))
    else:
        _print(source, plan, splits, ways)
    return ExitCode.FINISHED if plan.fits else ExitCode.CONFIG


def _tree(source: str, plan: Plan, splits: Sequence[Plan], ways: Sequence[Changes]) -> dict[str, Any]:
    """The plan as JSON holds it: bytes, seconds, tokens."""
    derived = {name: getattr(plan.step, name, None) for name in ("seconds", "tokens_per_s_per_gpu")}
    return {
        "model": {"source": source, "parameters": model_parameters(plan.case.hf)},
        "fits": plan.fits,
        "gpu_memory": plan.case.constants.gpu_memory,
        "trainer": [asdict(rank) | {"peaks": rank.peaks} for rank in plan.ranks],
        "server": plan.server and asdict(plan.server),
        "host": plan.host,
        "misfits": [asdict(misfit) for misfit in plan.misfits],
        "remedies": [dict(way) for way in ways],
        "workload": asdict(plan.case.workload),
        "step": plan.step and asdict(plan.step) | derived | {"gpu_hours": plan.gpu_hours},
        "splits": [
            {
                "layout": asdict(split.case.config.actor.layout),
                "servers": split.case.config.rollout.servers,
                "chosen": split is plan,
                "fits": split.fits,
                "seconds": split.step and split.step.seconds,
            }
            for split in splits
        ],
    }


def _print(source: str, plan: Plan, splits: Sequence[Plan], ways: Sequence[Changes]) -> None:
    console = Console(highlight=False, markup=False, emoji=False, width=None if sys.stdout.isatty() else WIDTH)
    case, server, step, layout = plan.case, plan.server, plan.step, plan.case.config.actor.layout
    console.print(f"Model: {model_parameters(case.hf) / 1e9:.2f} billion parameters, {source}")
    generate = f"{case.server_gpus} generate ({case.servers} servers of {case.config.rollout.tensor_parallel})"
    if share_gpus(case.config):
        generate = f"which the servers share ({case.config.rollout.memory_fraction:g} of each)"
    sizes = f"TP {layout.tensor} x PP {layout.pipeline} x CP {layout.context} x DP {layout.data}"
    console.print(f"{layout.world_size} GPUs train ({sizes}), {generate}")
    console.print(_memory_table(plan))
    if server is not None:
        console.print(
            f"Server, each GPU: weights {_gb(server.weights)}, KV cache {_gb(server.kv_cache)} = {server.kv_tokens} "
            f"tokens a server, outside memory_fraction {_gb(server.rest)}"
        )
    console.print("Host memory: " + "; ".join(f"{what} {_gb(value)}" for what, value in plan.host.items()))
    if step is None:
        console.print(f"\nDoes not fit {_gb(case.constants.gpu_memory)} a GPU:", style="bold")
        for one in plan.misfits:
            console.print(f"  {one.part}, {one.what}: needs {_gb(one.needed)}, there are {_gb(one.there)}")
        keys = " ".join(f"{key}={json.dumps(value)}" for way in ways for key, value in way.items())
        console.print(f"  would fit with: {keys or 'no change that is known'}", soft_wrap=True)
        if 0 < len(ways) < len({misfit.part for misfit in plan.misfits}):
            console.print("  but for the other of trainer and server, for which no change is known")
        return
    console.print(f"\nEverything fits {_gb(case.constants.gpu_memory)} a GPU. A rollout step, modelled:")
    console.print(_time_table(step))
    steps, generated = case.config.run.rollout_steps, step.generated_tokens / step.seconds / step.gpus
    console.print(
        f"{step.tokens_per_s_per_gpu:.0f} trained and {generated:.0f} generated tokens/s a GPU. {steps} rollout steps: "
        f"{step.seconds * steps / 3600:.0f} hours on {step.gpus} GPUs, {plan.gpu_hours:.0f} GPU-hours."
    )
    if len(splits) > 1:
        console.print("\nThe same GPUs, split otherwise (* as configured):")
        console.print(_split_table(plan, splits))
    work = case.workload
    sampling = f"dynamic sampling keeps {work.pass_rate:.0%} of the groups"
    if case.config.algorithm.dynamic_sampling.filter == "off":
        sampling = "every group is trained: dynamic sampling is off"
    elif work.pass_rate < (case.constants.pass_rate or 0):
        sampling += f" (groups of {work.group_size} have both right and wrong answers no more often)"
    console.print(
        f"\nAssumed: responses lognormal, mean {work.mean_response:.0f} tokens before the cut at {work.longest}, sigma "
        f"{work.sigma:g} (of those trained: mean {step.mean_length:.0f}, longest {step.longest}, {step.cut_off:.1%} "
        f"cut off); prompts of {work.mean_prompt:.0f} tokens; {sampling}. Not counted: evaluation, checkpoints, the "
        "start, failures. docs/before_a_run.md: formulas, and how to set these."
    )


def _memory_table(plan: Plan) -> Table:
    table = _table("a trainer rank, GB", "stage", *PHASES)
    for rank in plan.ranks:
        for name in dict.fromkeys(name for items in rank.items.values() for name in items):
            values = [rank.items[phase].get(name, 0.0) for phase in PHASES]
            table.add_row(name, str(rank.stage), *(f"{value / GB:.2f}" if value else "" for value in values))
        table.add_row("all", str(rank.stage), *(f"{rank.peaks[phase] / GB:.2f}" for phase in PHASES), style="bold")
        table.add_section()
    return table


def _time_table(step: StepPlan) -> Table:
    one, during = step.update, step.log_prob_total_s - step.log_prob_s
    tokens = f"{step.generated_tokens / 1e6:.1f} million tokens in {step.generated_groups:.0f} groups"
    parts = f"arithmetic {one.compute_s:.1f} + bubble {one.bubble_s:.1f} + tensor parallel {one.tensor_s:.1f}"
    table = _table("phase", "seconds", "what it is made of")
    for phase, seconds, text in (
        ("rollout", step.rollout_s, f"{tokens}, {step.slots} responses at once"),
        ("its tail", step.tail_s, "part of the rollout with fewer than half as many responses"),
        ("log-probs", step.log_prob_s, f"{during:.0f} s more during the rollout"),
        ("update", step.update_s, f"{step.optimizer_steps:.0f} x ({parts} + gradients and Adam {one.data_s:.1f} s)"),
        ("weight sync", step.sync_s, "rollout.weight_sync"),
        ("handover", step.handover_s, "colocated: weights and optimizer state to host memory and back"),
        ("all", step.seconds, f"trainer's MFU in log-probs and updates {step.mfu:.0%}"),
    ):
        table.add_row(phase, f"{seconds:.0f}", text, style="bold" if phase == "all" else None)
    if step.overlaps:
        table.caption = "rollout (without its tail) and log-probs with update at the same time: the longer counts"
    return table


def _split_table(plan: Plan, splits: Sequence[Plan]) -> Table:
    table = _table("trainer", "layout", "servers", "rollout s", "update s", "step s", "tokens/s/GPU", "GPU-hours")
    for split in splits:
        layout, step = split.case.config.actor.layout, split.step
        gpus = f"{layout.world_size} GPUs{' *' if split is plan else ''}"
        sizes = f"TP {layout.tensor} PP {layout.pipeline} DP {layout.data}"
        cells = ["does not fit"]
        if step is not None:
            figures = (step.rollout_s, step.update_s, step.seconds, step.tokens_per_s_per_gpu, split.gpu_hours)
            cells = [f"{value:.0f}" for value in figures]
        table.add_row(gpus, sizes, str(split.case.config.rollout.servers), *cells)
    return table


def _gb(value: float) -> str:
    return f"{value / GB:.1f} GB"


def _table(*heads: str) -> Table:
    table = Table(box=SIMPLE_HEAD)
    for at, head in enumerate(heads):
        table.add_column(head, overflow="fold", justify="left" if at == 0 or "what" in head else "right")
    return table
