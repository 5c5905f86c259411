"""`megatron-dapo plan`: memory, seconds and GPU-hours of a config, before a GPU is asked for."""

import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from megatron_dapo.cli.exit_codes import ExitCode
from megatron_dapo.config import load_config
from megatron_dapo.plan.memory import PHASES
from megatron_dapo.plan.planner import Plan, make_plan, other_splits, remedies
from megatron_dapo.plan.rank_state import model_parameters
from megatron_dapo.plan.scenario import Changes, Scenario, load_calibration, model_dimensions, share_gpus

WIDTH = 120


def plan_command(
    path: Path, overrides: Sequence[str], calibration: Path | None, *, as_json: bool, **assumed: float | None
) -> ExitCode:
    """Print the plan. FINISHED if everything fits, else CONFIG.

    Args:
        assumed: constants that take another value than the calibration's, where one is given.

    Raises:
        ConfigError: a config or a calibration that is none, or a layout that does not divide the model.
    """
    config, constants = load_config(path, overrides), load_calibration(calibration)
    hf, source = model_dimensions(config.model.path)
    constants = replace(constants, **{name: value for name, value in assumed.items() if value is not None})
    plan = make_plan(Scenario(config, hf, constants))
    splits, ways = (other_splits(plan), []) if plan.fits else ([], remedies(plan.case))
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
    """The page of templates/plan.md.j2, its tables drawn."""
    named = {"source": source, "plan": plan, "splits": splits, "ways": ways, "case": plan.case, "step": plan.step}
    named |= {"parameters": model_parameters(plan.case.hf), "shared": share_gpus(plan.case.config)}
    pages = Environment(
        loader=PackageLoader("megatron_dapo.plan"), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    text = pages.get_template("plan.md.j2").render(named, phases=PHASES, json=json.dumps)
    console = Console(highlight=False, markup=False, emoji=False, width=None if sys.stdout.isatty() else WIDTH)
    for in_table, lines in itertools.groupby(text.splitlines(), lambda line: line.startswith("|")):
        if in_table:
            console.print(_table(lines))
            continue
        for line in lines:
            console.print(line, style="bold" if line.endswith(":") else None, soft_wrap=line.startswith(" "))


def _table(lines: Iterator[str]) -> Table:
    table = Table(box=SIMPLE_HEAD)
    first, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    for at, head in enumerate(first):
        table.add_column(head, overflow="fold", justify="left" if at == 0 or "what" in head else "right")
    for row in rows:
        if row == ["-"]:
            table.add_section()
        else:
            table.add_row(*row, style="bold" if row[0] == "all" else None)
    return table
