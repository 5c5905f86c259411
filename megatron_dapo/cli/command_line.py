"""What commands share: arguments, and for `certify`, `bisect`, `replay` and `eval` how they end."""

import functools
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, ParamSpec

import typer

from megatron_dapo.cli.exit_codes import ExitCode, exit_code_of, named
from megatron_dapo.config import Config, ConfigError, load_config

P = ParamSpec("P")

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG.yaml", help="Config file; docs/config.md lists every key.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[section.key=value ...]", help="Override keys.")]


def config_of(source: Path, overrides: Sequence[str] = ()) -> Config:
    """The config in a file, or of a run in its directory.

    Raises:
        ConfigError: a directory without a config.
    """
    if source.is_dir() and not (source / "config.yaml").is_file():
        raise ConfigError(f"{source}: no config.yaml there; give a config file, or the directory of a run")
    return load_config(source / "config.yaml" if source.is_dir() else source, overrides)


def comparison_command(compare: Callable[P, bool]) -> Callable[P, None]:
    """A command that ends with FINISHED, or with INEXACT where `compare` returns False; a known error is printed
    without a traceback."""

    @functools.wraps(compare)
    def command(*args: P.args, **kwargs: P.kwargs) -> None:
        # Like an interrupt from the keyboard: ranks are ended and files removed on the way out.
        signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
        try:
            code = ExitCode.FINISHED if compare(*args, **kwargs) else ExitCode.INEXACT
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            code = ExitCode.INTERRUPTED
        except Exception as error:
            known = exit_code_of(error)
            if known is None:
                raise
            print(named(error), file=sys.stderr)
            code = known
        raise typer.Exit(code)

    return command
