"""The quickstart's word problems, put so that each kind of verifier can judge the response.

`form(kind, problem, rng)` gives the prompt, a right response and the ground truth. Every kind comes from the same
problems, so the three splits of `examples/quickstart/task.py` stay apart here too.
"""

import json
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "quickstart"))  # its scripts are neighbours, no package

from task import LARGEST, Problem, Split, problems

LETTERS = "ABCD"
MOST_STEPS = {"programs": 4, "records": 3, "options": 3}
"""Steps of a problem, at most, where the form takes room in the prompt or the response."""
OTHER_STARTS = (3, 40)
"""Starting numbers that a program is tested with besides that of its problem."""

RECORD_SCHEMA = {
    "type": "object",
    "properties": {"work": {"type": "array", "items": {"type": "string"}}, "answer": {"type": "integer"}},
    "required": ["work", "answer"],
    "additionalProperties": False,
}


class Kind(StrEnum):
    """A source of samples. The config's `reward.by_source` gives each its verifier."""

    PROGRAMS = "programs"
    """The story with its first number unknown; the response is a function of it, judged by unit tests."""
    RECORDS = "records"
    """The calculation and the answer as one JSON object, which must be equal, and valid under a schema."""
    OPTIONS = "options"
    """Four options; the response ends with a letter."""
    WORK = "work"
    """The quickstart's prompt; right only with the calculation that leads there (`shown_work.py`)."""
    SERVICE = "service"
    """The quickstart's prompt; a service judges the number (`service.py`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """One problem in one kind."""

    prompt: str
    response: str
    """What a good response looks like."""
    truth: str | dict[str, Any]


def form(kind: Kind, problem: Problem, rng: random.Random) -> Form | None:
    """The problem in this kind; None if it does not fit in."""
    if len(problem.steps) > MOST_STEPS.get(kind, len(problem.steps)):
        return None
    match kind:
        case Kind.PROGRAMS:
            return _program(problem)
        case Kind.RECORDS:
            return _record(problem)
        case Kind.OPTIONS:
            return _option(problem, rng)
        case Kind.WORK | Kind.SERVICE:
            return Form(prompt=problem.prompt, response=problem.worked, truth=str(problem.answer))


def forms(kind: Kind, split: Split, *, seed: int) -> Iterator[Form]:
    """Endless forms of one split."""
    rng = random.Random(seed)
    for problem in problems(split, seed=seed):
        made = form(kind, problem, rng)
        if made is not None:
            yield made


def _program(problem: Problem) -> Form | None:
    words = problem.text.split()
    if words[3] == "bags":
        return None  # begins with a product: there is no one number to leave open
    start, changes = int(words[2]), _changes(problem)
    lines = [f" n=n{operation}{amount}" for operation, amount in changes]
    tests = [f"assert f({n}) == {_applied(changes, n)}" for n in sorted({start, *OTHER_STARTS})]
    story = " ".join([*words[:2], "n", *words[3:-3]])
    return Form(
        prompt=f"Write f(n).\n{story} How many now?",
        response="\n".join(["```", "def f(n):", *lines, " return n", "```"]),
        truth={"tests": "\n".join(tests)},
    )


def _changes(problem: Problem) -> list[tuple[str, str]]:
    """What is done to the starting number: ("-", "5"), ("+", "3*4"), ..."""
    changes, value, steps = [], problem.steps[0].left, list(problem.steps)
    while steps:
        step = steps.pop(0)
        if steps and (steps[0].left, steps[0].operation, steps[0].right) == (value, "+", step.result):
            changes.append(("+", f"{step.left}*{step.right}"))
            step = steps.pop(0)
            value = step.result
            continue
        changes.append((step.operation, str(step.right)))
        value = step.result
    return changes


def _applied(changes: list[tuple[str, str]], number: int) -> int:
    for operation, amount in changes:
        left, _, right = amount.partition("*")
        size = int(left) * int(right or 1)
        number = {"+": number + size, "-": number - size, "*": number * size}[operation]
    return number


def _record(problem: Problem) -> Form:
    record = {"work": [step.line for step in problem.steps], "answer": problem.answer}
    return Form(
        prompt=f"Reply in JSON.\n{problem.text}",
        response=json.dumps(record, separators=(",", ":")),
        truth={"equals": record, "schema": RECORD_SCHEMA},
    )


def _option(problem: Problem, rng: random.Random) -> Form:
    near = {problem.answer + slip for slip in (-10, -2, -1, 1, 2, 10)} & set(range(LARGEST + 1))
    numbers = [problem.answer, *rng.sample(sorted(near), len(LETTERS) - 1)]
    rng.shuffle(numbers)
    letter = LETTERS[numbers.index(problem.answer)]
    options = " ".join(f"{each} {number}" for each, number in zip(LETTERS, numbers, strict=True))
    return Form(
        prompt=f"Last line: Answer: X.\n{problem.text}\n{options}",
        response="\n".join([*(step.line for step in problem.steps), f"Answer: {letter}"]),
        truth=letter,
    )
