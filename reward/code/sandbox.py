"""The sandboxed process as the judge sees it: started, asked, killed."""

import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from reward.code.landlock import readable
from reward.code.values import receive, send
from reward.verdict import VerifierError

MEMORY_BYTES = 1 << 30
"""Address space of the tested code."""

START_LIMIT_S = 60.0
"""Wall-clock limit of the start, on a loaded machine."""

_GRACE_S = 1.0
_START = "import sys; sys.path.insert(0, {!r}); from reward.code.sandbox_main import main; del sys.path[0]; main()"
_PROGRAM = _START.format(str(Path(__file__).parents[2]))


class Sandbox:
    """A process that has the tested code and nothing else: no test, no expected value, no way out but its answers."""

    def __init__(self, source: str, *, mode: str, cpu_s: int, **files: IO[bytes]) -> None:
        """Starts it; the code is not run before `ready`.

        Args:
            mode: `program` (can be run several times) or `functions`, see `reward.code.sandbox_main`.
            cpu_s: seconds of CPU, past which the kernel kills it.
            files: `stdin`, `stdout`, `stderr` of mode `program`; what it may write is limited by `ready`.
        """
        self._started, self._starts = False, mode == "program"
        requests, self.requests = os.pipe()
        self.replies, replies = os.pipe()
        streams: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL) | files
        options = "-PsSBu" if "stderr" in files else "-PsSB"  # unbuffered, so that both come in order
        self._order = {"source": source, "memory_bytes": MEMORY_BYTES, "cpu_s": cpu_s, "readable": readable()}
        try:
            self._process = subprocess.Popen(
                [sys.executable, options, "-X", "utf8", "-c", _PROGRAM, mode, str(requests), str(replies)],
                **streams,
                pass_fds=(requests, replies),
                # What an interpreter may need to start; anything else may be a secret. And a set prints in the same
                # order whenever the code is run.
                env={"LD_LIBRARY_PATH": os.environ.get("LD_LIBRARY_PATH", ""), "PYTHONHASHSEED": "0"},
                cwd="/",
            )
        finally:
            os.close(requests)
            os.close(replies)

    def ready(self, *, file_bytes: int = 0) -> bool:
        """Locks it up and lets the code run, in mode `program` once more; False if it is nothing that Python can
        compile.

        Raises:
            VerifierError: this system cannot confine a process: nothing was run.
        """
        try:
            self._started = self._started or receive(self.replies, time.monotonic() + START_LIMIT_S)
        except (EOFError, OSError) as error:
            raise VerifierError(f"verifier code: the sandbox does not start ({error!r})") from None
        try:
            answer = self.ask(self._order | {"file_bytes": file_bytes}, time.monotonic() + START_LIMIT_S)
        except (EOFError, OSError):
            return False  # the compiler itself did not survive the code
        if isinstance(answer, dict) and "open" in answer:  # an exit code: it did not survive its imports
            raise VerifierError(f"verifier code: responses cannot be run safely here: {answer['open']}")
        return answer == {"locked": ""}

    def ask(self, request: Any, deadline: float) -> Any:
        """The answer to a call. Raises EOFError, OSError (it is gone), TimeoutError."""
        send(self.requests, request)
        return receive(self.replies, deadline)

    def exit_code(self, deadline: float) -> int | None:
        """The program's (negative: the signal that killed it); None if it runs on past the deadline."""
        with suppress(TimeoutError, EOFError):
            return int(receive(self.replies, deadline))
        return None

    def ended_by(self) -> int | None:
        """Asks it to end; the signal that ended it before that, None if none did."""
        os.close(self.requests)
        self.requests = -1
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_GRACE_S)  # one that was killed has closed its pipes a moment before
        code = self._process.returncode
        return -code if code is not None and code < 0 else None

    def close(self) -> None:
        """Ends it, whatever it is doing."""
        (self._process.terminate if self._starts else self._process.kill)()  # it ends what it has started, too
        self._process.wait()
        if self.requests >= 0:
            os.close(self.requests)
        os.close(self.replies)
