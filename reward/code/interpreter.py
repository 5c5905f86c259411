"""Environment `python`: the last Python block of a turn is run, and what it prints is the tool's result.

It runs where verifier `code` runs a response: in a process that can compute and nothing else. A turn without such a
block is the answer, which the prompt's verifier judges.
"""

import signal
import tempfile
import time
from contextlib import closing

from reward.code.sandbox import Sandbox
from reward.environment import Episode, Observation
from reward.verifiers.code import CPU_S, WALL_FACTOR, last_program

OUTPUT_BYTES = 1 << 16
"""What the program may print; one that prints more is ended there."""


def run(episode: Episode) -> Observation | None:
    """The output of the newest turn's program, a traceback at its end if it failed.

    Raises:
        VerifierError: this system cannot confine a process.
    """
    source = last_program(episode.response)
    if source is None:
        return None
    with (
        tempfile.TemporaryFile() as output,
        closing(Sandbox(source, mode="program", cpu_s=CPU_S, stdout=output, stderr=output)) as sandbox,
    ):
        if not sandbox.ready(file_bytes=OUTPUT_BYTES):
            return Observation("error: this is no Python program", role="tool")
        code = sandbox.exit_code(time.monotonic() + WALL_FACTOR * CPU_S)
        output.seek(0)
        said = output.read().decode("utf-8", "replace").rstrip()
    if code is None or code == -signal.SIGKILL:
        said = f"{said}\nerror: stopped after {CPU_S} s".strip()
    return Observation(said or f"(no output, exit code {code})", role="tool")
