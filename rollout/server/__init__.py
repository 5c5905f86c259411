"""SGLang's servers as processes. What all of them share: the kernel kills one when its parent ends, however the parent
ends."""

import ctypes
import os
import signal
import sys

PARENT = "ROLLOUT_SERVER_PARENT"
"""Environment variable: id of the process whose end also ends this one. Not set when a person starts the server."""

KEY_FILE = "ROLLOUT_SERVER_KEY_FILE"
"""Environment variable: file with the server's API key. Not the key itself, and not on the command line: other users of
the machine could read both."""

_PR_SET_PDEATHSIG = 1


def end_with(parent: int) -> None:
    """Asks the kernel to kill this process when its parent ends, and ends now if that is not `parent` any more.

    It survives an exec, so `preexec_fn` of a process without threads can call it for any program.
    """
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed; this process would outlive its parent")
    if os.getppid() != parent:
        print(f"the process {parent} that started this one has ended", file=sys.stderr, flush=True)
        os._exit(1)  # Python ignores an exception, and so sys.exit, in a child that it has just forked
