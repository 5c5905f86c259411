"""`megatron-dapo diff`: how two configs differ, and how one differs from the paper or another preset."""

from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from megatron_dapo.cli.command_line import wide_console
from megatron_dapo.config import ConfigError, config_diff, load_config
from megatron_dapo.config.load import PRESETS, differences, flatten_config


def diff(
    one: Annotated[str, typer.Argument(metavar="A", help="Config, run, or a preset's name.")],
    other: Annotated[str, typer.Argument(metavar="B", help="Config, run, or a preset's name.")] = config_diff.PAPER,
) -> None:
    """Say in which keys two configs differ, or one from a preset (paper, verl, ...)."""
    if one in PRESETS and other in PRESETS:
        raise ConfigError(f"diff {one} {other}: name at least one config file")
    if one in PRESETS:
        one, other = other, one
    preset = other if other in PRESETS else config_diff.PAPER
    first, known = flatten_config(load_config(one)), config_diff.stated(preset)
    second = None if other in PRESETS else flatten_config(load_config(other))
    stated_values = {key: each.value for key, each in known.items()}
    table = Table(box=SIMPLE_HEAD)
    for head in ("key", one, preset, "stated in") if second is None else ("key", one, other, "paper"):
        table.add_column(Text(head), overflow="fold")
    differing = differences(first, first if second is None else second)
    leaving = [each.key for each in config_diff.departures(first, preset) if each.key not in differing]
    for key in (*differing, *leaving):  # last: keys in which both leave the paper alike
        there = config_diff.shown_of(stated_values, key) if key in known else "not stated"
        cells = (there, known[key].where) if second is None else (config_diff.shown_of(second, key), there)
        table.add_row(*map(Text, (key, config_diff.shown_of(first, key), *cells)))
    named = "the paper" if preset == config_diff.PAPER else preset
    if table.row_count:
        wide_console().print(table)
    else:
        print(f"{one} and {other}: no difference, and as in {named} in {len(known)} settings")
    if second is None:
        print(f"Not compared: {config_diff.NOT_COMPARED}.\n{config_diff.described(preset)}")
