"""`megatron-dapo diff`: how two configs differ, and from the paper."""

import sys

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron_dapo.config import ConfigError, load_config
from megatron_dapo.config.config_diff import PAPER, departures, differences, flatten_config, shown

NAME_OF_THE_PAPER = "paper"
WIDEST = 200
"""Columns where the output is no terminal: a table in a file is not folded to eighty."""


def diff_command(one: str, other: str) -> None:
    """Print a table of every key in which they differ or leave the paper, loaded as strictly as for a run."""
    if one == other == NAME_OF_THE_PAPER:
        raise ConfigError("diff paper paper: name at least one config file")
    if one == NAME_OF_THE_PAPER:
        one, other = other, one
    first = flatten_config(load_config(one))
    second = None if other == NAME_OF_THE_PAPER else flatten_config(load_config(other))
    console = Console(highlight=False) if sys.stdout.isatty() else Console(highlight=False, width=WIDEST)
    table = _from_paper(one, first) if second is None else _between(one, first, other, second)
    if table.row_count:
        console.print(table)
    elif second is None:
        print(f"{one}: as in the paper, in the {len(PAPER)} settings that it states")
    else:
        print(f"{one} and {other} are the same, and as in the paper in the {len(PAPER)} settings that it states")


def _from_paper(name: str, flat: dict) -> Table:
    table = _table("key", name, "paper", "stated in")
    for departure in departures(flat):
        stated = departure.stated
        table.add_row(*map(Text, (stated.key, shown(departure.value), shown(stated.value), stated.where)))
    return table


def _between(one: str, first: dict, other: str, second: dict) -> Table:
    """Keys in which the two differ, then keys in which both leave the paper alike."""
    stated = {setting.key: setting for setting in PAPER}
    differing = {difference.key for difference in differences(first, second)}
    leaving = {departure.stated.key for departure in departures(first)} - differing
    table = _table("key", one, other, "paper")
    for section, keys in enumerate((differing, leaving)):
        for key in (key for key in first if key in keys):
            of_paper = shown(stated[key].value) if key in stated else "not stated"
            table.add_row(*map(Text, (key, shown(first[key]), shown(second[key]), of_paper)))
        if section == 0:
            table.add_section()
    return table


def _table(*heads: str) -> Table:
    table = Table(box=SIMPLE_HEAD)
    for head in heads:
        table.add_column(Text(head), overflow="fold")
    return table
