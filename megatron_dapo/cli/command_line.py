"""What commands share: arguments, and for `certify`, `bisect` and `replay` how a comparison ends."""

import functools
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, ParamSpec

import typer

from megatron_dapo.cli.exit_codes import ExitCode, exit_code_of

P = ParamSpec("P")

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG.yaml", help="Config file; docs/config.md lists every key.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[section.key=value ...]", help="Override keys.")]


def comparison_command(compare: Callable[P, bool]) -> Callable[P, None]:
    """A command that ends with FINISHED, or with INEXACT where `compare` returns False; a known error is printed
    without a traceback."""

    @functools.wraps(compare)
    def command(*args: P.args, **kwargs: P.kwargs) -> None:
        # Like an interrupt from the keyboard: ranks are ended and files removed on the way out.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            code = ExitCode.FINISHED if compare(*args, **kwargs) else ExitCode.INEXACT
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            code = ExitCode.INTERRUPTED
        except Exception as error:
            known = exit_code_of(error)
            if known is None:
                raise
            print(error, file=sys.stderr)
            code = known
        raise typer.Exit(code)

    return command
