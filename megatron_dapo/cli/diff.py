"""`megatron-dapo diff`: how two configs differ, and from the paper."""

import sys
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron_dapo.config import ConfigError, load_config
from megatron_dapo.config.config_diff import PAPER, departures, differences, flatten_config, shown

NAME_OF_THE_PAPER = "paper"
WIDEST = 200
"""Columns where the output is no terminal: a table in a file is not folded to eighty."""


def diff(
    one: Annotated[str, typer.Argument(metavar="A", help="Config file, or `paper`.")],
    other: Annotated[str, typer.Argument(metavar="B", help="Config file, or `paper`.")] = NAME_OF_THE_PAPER,
) -> None:
    """Say in which keys two configs differ, and in which they leave the paper's settings."""
    if one == other == NAME_OF_THE_PAPER:
        raise ConfigError("diff paper paper: name at least one config file")
    if one == NAME_OF_THE_PAPER:
        one, other = other, one
    first = flatten_config(load_config(one))
    second = None if other == NAME_OF_THE_PAPER else flatten_config(load_config(other))
    table = Table(box=SIMPLE_HEAD)
    for head in ("key", one, "paper", "stated in") if second is None else ("key", one, other, "paper"):
        table.add_column(Text(head), overflow="fold")
    stated = {setting.key: setting for setting in PAPER}
    differing = [] if second is None else [difference.key for difference in differences(first, second)]
    leaving = [departure.stated.key for departure in departures(first) if departure.stated.key not in differing]
    for keys in (differing, leaving):  # the second: keys in which all leave the paper alike
        for key in keys:
            of_paper = shown(stated[key].value) if key in stated else "not stated"
            cells = (of_paper, stated[key].where) if second is None else (shown(second[key]), of_paper)
            table.add_row(*map(Text, (key, shown(first[key]), *cells)))
        table.add_section()
    if table.row_count:
        Console(highlight=False, width=None if sys.stdout.isatty() else WIDEST).print(table)
    elif second is None:
        print(f"{one}: as in the paper, in the {len(PAPER)} settings that it states")
    else:
        print(f"{one} and {other} are the same, and as in the paper in the {len(PAPER)} settings that it states")
