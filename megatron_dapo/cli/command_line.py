"""What commands share: arguments, and for `certify`, `bisect`, `replay` and `eval` how they end."""

import functools
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, ParamSpec

import typer

from megatron_dapo.cli.exit_codes import ExitCode
from megatron_dapo.config import Config, ConfigError, load_config
from megatron_dapo.data.hub import with_local_paths

P = ParamSpec("P")

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG.yaml", help="Config file; docs/config.md lists every key.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[section.key=value ...]", help="Override keys.")]


def config_of(source: Path, overrides: Sequence[str] = ()) -> Config:
    """The config in a file, or of a run in its directory, with what `hf://` paths name fetched.

    Raises:
        ConfigError: a directory without a config; the hub does not answer.
    """
    if source.is_dir() and not (source / "config.yaml").is_file():
        raise ConfigError(f"{source}: no config.yaml there; give a config file, or the directory of a run")
    if not source.exists():
        raise ConfigError(f"{source}: is not there; give a config file, or the directory of a run")
    return with_local_paths(load_config(source / "config.yaml" if source.is_dir() else source, overrides))


def _interrupt(*_: object) -> None:
    """What SIGINT would do; a KeyboardInterrupt where it is ignored, as in a shell's background."""
    handler = signal.getsignal(signal.SIGINT)
    (handler if callable(handler) else signal.default_int_handler)(signal.SIGINT, None)


def comparison_command(compare: Callable[P, bool]) -> Callable[P, None]:
    """A command that ends with FINISHED, or with INEXACT where `compare` returns False."""

    @functools.wraps(compare)
    def command(*args: P.args, **kwargs: P.kwargs) -> None:
        # Like an interrupt from the keyboard: ranks are ended and files removed on the way out.
        signal.signal(signal.SIGTERM, _interrupt)
        try:
            same = compare(*args, **kwargs)
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            raise typer.Exit(ExitCode.INTERRUPTED) from None
        raise typer.Exit(ExitCode.FINISHED if same else ExitCode.INEXACT)

    return command
