"""What `certify`, `bisect` and `replay` share: the exit code of a comparison, and errors that explain themselves."""

import signal
import sys
from collections.abc import Callable

from megatron_dapo.cli.exit_codes import ExitCode, exit_code_of


def comparison_command(compare: Callable[[], bool]) -> ExitCode:
    """FINISHED, or INEXACT where `compare` returns False; a known error is printed without a traceback."""
    # Like an interrupt from the keyboard: ranks are ended and files removed on the way out.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return ExitCode.FINISHED if compare() else ExitCode.INEXACT
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return ExitCode.INTERRUPTED
    except Exception as error:
        code = exit_code_of(error)
        if code is None:
            raise
        print(error, file=sys.stderr)
        return code
