"""Verifier `code`: the last Python block of the response, run under tests or on inputs.

The ground truth is a JSON object in one of two forms, either with an optional `cpu_s` (seconds, default 2):

    {"tests": "assert add(2, 3) == 5"}                            the tests call what the response defines
    {"tests": "def check(candidate): ...", "entry": "add"}        the same, HumanEval's way; or "Solution().add"
    {"cases": [{"input": "2 3\\n", "output": "5\\n"}]}              the response is a program; all cases must match

The code runs in a process that can compute and nothing else (`reward.code.seccomp`) and that never holds a test or an
expected output, so there is nothing to forge: printing, ending early or taking Python apart gives no credit. The price:
only the standard library; arguments and results are plain values, passed by value, and methods of objects. Tests may
import what is installed and read no other file (`reward.code_reads`).

Environment `python` runs programs in the same process: the last Python block of a turn is run, and what it prints is
the tool's result. A turn without such a block is the answer, which the prompt's verifier judges.
"""

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from io import FileIO
from textwrap import dedent
from typing import Any

from reward.code.sandbox import Sandbox
from reward.code.seccomp import hide_memory
from reward.code.suite import passes
from reward.code.suite_source import Suite, make_suite
from reward.environment import Episode, Observation
from reward.verdict import EXTRACTED_LIMIT, Judgement, Rule, VerificationRequest, VerifierError, said

RULE = "code"
"""The rule's name in `Verdict.rule` where tests or cases decided."""
RULE_TIMEOUT = "code-timeout"
"""Wrong: out of time."""

CPU_S = 2
"""Seconds of CPU for all tests, or for each case, where the ground truth names none."""
WALL_FACTOR = 2
"""Wall-clock seconds for each second of CPU, for all tests or cases together, starts not counted."""

_BLOCK = re.compile(r"^[ \t]*```[ \t]*(\w*)[^\n]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE)
_LANGUAGES = frozenset({"py", "python", "python3"})
_LEAST_BYTES = 1 << 20


@contextmanager
def _sandboxed() -> Iterator[None]:
    """Where no process, file or memory is left for a sandbox, nothing is known of the code."""
    try:
        yield
    except OSError as error:
        raise VerifierError(f"verifier code: the sandbox does not start ({error!r})") from None


@_sandboxed()
def judge(request: VerificationRequest) -> Judgement:
    """Right if the code passes every test, or gives the expected output for every input.

    Raises:
        VerifierError: the ground truth has another form, or this system cannot confine a process.
        NotPlain: the tests pass the tested code a function of their own, or the like.
    """
    cpu_s, wanted = _truth(request.ground_truth)
    source = last_program(request.response)
    if source is None:
        return Judgement(accuracy=False, extracted=None, rule=Rule.NONE)
    hide_memory()  # this process holds the ground truth
    passed = _passes_tests(source, wanted, cpu_s) if isinstance(wanted, Suite) else _passes_cases(source, wanted, cpu_s)
    rule = RULE_TIMEOUT if passed is None else RULE
    return Judgement(accuracy=bool(passed), extracted=source[:EXTRACTED_LIMIT], rule=rule)


def check_system() -> None:
    """Whether code can be confined and judged here, by doing it. Raises VerifierError."""
    truth = json.dumps({"tests": "assert add(2, 3) == 5"})
    response = "```python\ndef add(a, b):\n    return a + b\n```"
    judged = judge(VerificationRequest(response=response, ground_truth=truth))
    if not judged.accuracy:
        raise VerifierError(f"verifier code: judges a right program wrong here ({judged.rule})")


def last_program(response: str) -> str | None:
    """The last closed block of the response that is marked as Python; where none is, the last one without a mark."""
    found = [(block[1].lower(), block[2]) for block in _BLOCK.finditer(said(response))]
    # Of one in a list. Elsewhere it would empty lines of white space, which a string may hold.
    blocks = [(language, dedent(text) if text[:1] in " \t" else text) for language, text in found]
    marked = [program for language, program in blocks if language in _LANGUAGES]
    programs = marked or [program for language, program in blocks if not language]
    return programs[-1] if programs else None


def _passes_tests(source: str, suite: Suite, cpu_s: int) -> bool | None:
    with closing(Sandbox(source, mode="functions", cpu_s=cpu_s)) as sandbox:
        if not sandbox.ready():
            return False
        passed = passes(suite, sandbox, time.monotonic() + WALL_FACTOR * cpu_s)
        return None if passed is False and sandbox.ended_by() == signal.SIGKILL else passed


def _memory_file() -> FileIO:
    """Not on a disk: one that is full would make right programs wrong. Not buffered: a program shares its place."""
    return open(os.memfd_create("case"), "w+b", buffering=0)


def _passes_cases(source: str, cases: list[dict[str, str]], cpu_s: int) -> bool | None:
    left_s: float = WALL_FACTOR * cpu_s
    # Of all cases, and rounded: a program can find out what it may write, and must not learn what is expected.
    file_bytes = max(_LEAST_BYTES, 1 << (4 * max(len(case["output"]) for case in cases)).bit_length())
    with (
        _memory_file() as stdin,
        _memory_file() as stdout,
        closing(Sandbox(source, mode="program", cpu_s=cpu_s, stdin=stdin, stdout=stdout)) as sandbox,
    ):
        for case in cases:
            for file, content in ((stdin, case["input"].encode("utf-8", "surrogatepass")), (stdout, b"")):
                file.truncate(0)
                file.seek(0)
                file.write(content)
                file.seek(0)
            if not sandbox.ready(file_bytes=file_bytes):
                return False
            began = time.monotonic()
            code = sandbox.exit_code(began + left_s)
            left_s -= time.monotonic() - began
            if code is None or code == -signal.SIGKILL:
                return None
            stdout.seek(0)
            if code != 0 or _lines(stdout.read().decode("utf-8", "replace")) != _lines(case["output"]):
                return False
    return True


def _lines(text: str) -> list[str]:
    """Without spaces at the end of a line and empty lines at the end."""
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _truth(ground_truth: str) -> tuple[int, Suite | list[dict[str, str]]]:
    """(seconds of CPU, tests or cases)."""
    try:
        truth = json.loads(ground_truth)
    except (ValueError, RecursionError):
        truth = None
    cpu_s = truth.pop("cpu_s", CPU_S) if isinstance(truth, dict) else CPU_S
    if type(cpu_s) is not int or not 0 < cpu_s <= 3600:
        raise VerifierError(f"verifier code: cpu_s = {cpu_s!r} must be a whole number of seconds from 1 to 3600")
    match truth:
        case {"tests": str(tests), **more} if more.keys() <= {"entry"} and isinstance(more.get("entry", ""), str):
            entry = more.get("entry")
            try:
                return cpu_s, make_suite(tests, entry if isinstance(entry, str) else None)
            except ValueError as error:
                raise VerifierError(f"verifier code: {error}") from None
        case {"cases": [_, *_] as cases, **more} if not more and all(map(_is_case, cases)):
            return cpu_s, cases
    forms = '{"tests": Python}, with "entry" for check(candidate), or {"cases": [{"input": text, "output": text}]}'
    raise VerifierError(f"verifier code: ground truth {ground_truth[:80]!r} must be a JSON object: {forms}, not empty")


def _is_case(case: Any) -> bool:
    return isinstance(case, dict) and case.keys() == {"input", "output"} and all(type(v) is str for v in case.values())


OUTPUT_BYTES = 1 << 16
"""What the program may print; one that prints more is ended there."""


@_sandboxed()
def run(episode: Episode) -> Observation | None:
    """The output of the newest turn's program, a traceback at its end if it failed.

    Raises:
        VerifierError: this system cannot confine a process.
    """
    source = last_program(episode.response)
    if source is None:
        return None
    with (
        _memory_file() as out,
        closing(Sandbox(source, mode="program", cpu_s=CPU_S, stdout=out, stderr=out)) as sandbox,
    ):
        if not sandbox.ready(file_bytes=OUTPUT_BYTES):
            return Observation("error: this is no Python program", role="tool")
        code = sandbox.exit_code(time.monotonic() + WALL_FACTOR * CPU_S)
        out.seek(0)
        said = out.read().decode("utf-8", "replace").rstrip()
    if code is None or code == -signal.SIGKILL:
        said = f"{said}\nerror: stopped after {CPU_S} s".strip()
    return Observation(said or f"(no output, exit code {code})", role="tool")
