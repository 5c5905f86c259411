"""Arguments that several commands have."""

from pathlib import Path
from typing import Annotated

import typer

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG.yaml", help="Config file; docs/config.md lists every key.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[section.key=value ...]", help="Override keys.")]
