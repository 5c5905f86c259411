"""Problems whose answers are integers, made of problems whose answers are not, in the four steps of the paper's
appendix on data: extract the answer's format, rewrite the problem, solve the rewritten one, give the integer.

Example: the answer 11/2 has the format \\frac{m}{n}; the problem then ends "... can be written as m/n with m and n
relatively prime. Find m + n", and the answer is 13. The endpoint is believed in nothing: the format with its values
must equal the original answer, the integer is computed here from those values, and the endpoint's must be the same.
"""

import ast
import asyncio
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from reward.answer.read import read_raw
from reward.pool.pool import RewardPool
from reward.verdict import VerificationRequest
from tools.chat_endpoint import ChatEndpoint

VALUE_LIMIT = 10**12
"""Largest absolute value and integer that is accepted."""

_WORD = re.compile(r"\\[A-Za-z]+|[A-Za-z]+")
_FRACTION = re.compile(r"\\d?frac\{\s*([A-Za-z])\s*\}\{\s*([A-Za-z])\s*\}|\b([A-Za-z])\s*/\s*([A-Za-z])\b")

_ASKED: dict[str, str] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
"""The question of each step."""


class SetAside(ValueError):
    """A problem that cannot be transformed; the message begins with the step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """An answer taken apart. Form(format="\\\\frac{m}{n}", values={"m": 11, "n": 2}, integer="m + n")."""

    format: str
    values: dict[str, int]
    integer: str

    def composed(self) -> str:
        """The format with the values in it."""

        def value(found: re.Match[str]) -> str:
            number = self.values.get(found[0])
            return found[0] if number is None else f"({number})" if number < 0 else str(number)

        return _WORD.sub(value, self.format)

    def result(self) -> int:
        """The integer. Raises SetAside."""
        try:
            number = _evaluate(ast.parse(self.integer.replace("^", "**"), mode="eval").body, self.values)
        except (SyntaxError, ValueError, RecursionError) as error:
            raise SetAside(f"extract: the integer {self.integer[:80]!r} cannot be computed ({error})") from None
        if abs(number) > VALUE_LIMIT:
            raise SetAside(f"extract: the integer {self.integer[:80]!r} is beyond {VALUE_LIMIT}")
        return number


@dataclass(frozen=True, kw_only=True, slots=True)
class Transformed:
    """A problem with an integer answer."""

    problem: str
    answer: int
    form: Form
    solution: str


def integer_of(answer: str) -> int | None:
    """The integer that an answer is, however it is written, as `1,080` or `$-7$`; None if it is another thing."""
    number = read_raw(answer).number
    whole = number is not None and number.value.denominator == 1 and not number.percent and not number.unreduced
    return int(number.value) if number is not None and whole else None


async def transform(problem: str, answer: str, asker: ChatEndpoint, pool: RewardPool) -> Transformed:
    """All four steps. Raises SetAside for a problem that does not pass, EndpointError where there is no reply."""
    form = _form(await _ask(asker, _ASKED["extract"].format(problem=problem, answer=answer)), problem)
    await _check_composition(form, answer, pool)
    wanted = form.result()
    question = _ASKED["rewrite"].format(
        format=form.format, names=", ".join(form.values), integer=form.integer, problem=problem
    )
    rewritten = _rewritten(await _ask(asker, question), problem, answer, form)
    solution = await _ask(asker, _ASKED["solve"].format(format=form.format, answer=answer, problem=rewritten))
    if not solution.strip():
        raise SetAside("solve: the solution is empty")
    said = await _ask(asker, _ASKED["integer"].format(problem=rewritten, solution=solution))
    found = integer_of(said)
    if found is None:
        raise SetAside(f"integer: {said[:80]!r} is no integer")
    if found != wanted:
        raise SetAside(f"integer: the solution gives {found}, the original answer {answer[:80]!r} gives {wanted}")
    return Transformed(problem=rewritten, answer=wanted, form=form, solution=solution)


async def _ask(asker: ChatEndpoint, question: str) -> str:
    return await asker.ask([{"role": "user", "content": question}])


def _form(reply: str, problem: str) -> Form:
    fields = _json(reply, "extract")
    format_, values, integer = (fields.get(key) for key in ("format", "values", "integer"))
    if not isinstance(format_, str) or not isinstance(integer, str) or not isinstance(values, dict) or not values:
        raise SetAside('extract: needs "format" and "integer" as texts and "values" as an object')
    for name, value in values.items():
        if not re.fullmatch(r"[a-z]", name) or type(value) is not int or abs(value) > VALUE_LIMIT:
            raise SetAside(f"extract: {name[:20]} = {str(value)[:40]} is not a small letter with an integer")
        if name not in _WORD.findall(format_) or name not in re.findall(r"[A-Za-z]+", integer):
            raise SetAside(f"extract: variable {name} is not in both the format and the integer")
        if re.search(rf"\$[^$]*(?<![A-Za-z\\]){name}(?![A-Za-z])[^$]*\$", problem):
            raise SetAside(f"extract: the problem uses the letter {name} itself")
    for found in _FRACTION.finditer(format_):
        above, below = (values.get(name) for name in (found[1] or found[3], found[2] or found[4]))
        if above is not None and below is not None and (below <= 0 or math.gcd(above, below) != 1):
            raise SetAside(f"extract: {above}/{below} is not in lowest terms with a positive denominator")
    return Form(format=format_, values=values, integer=integer)


async def _check_composition(form: Form, answer: str, pool: RewardPool) -> None:
    composed = form.composed()
    request = VerificationRequest(response=f"Answer: ${composed}$", ground_truth=answer)
    (verdict,) = await pool.verify([request])
    if not verdict.accuracy:
        why = f" ({verdict.error})" if verdict.error else ""
        raise SetAside(f"extract: {composed[:80]!r} is not known to equal the answer {answer[:80]!r}{why}")


def _rewritten(reply: str, problem: str, answer: str, form: Form) -> str:
    text = _json(reply, "rewrite").get("problem")
    if not isinstance(text, str) or not text.strip() or text.strip() == problem.strip():
        raise SetAside('rewrite: "problem" is missing, empty or the original')
    if missing := [name for name in form.values if not re.search(rf"(?<![A-Za-z\\]){name}(?![A-Za-z])", text)]:
        raise SetAside(f"rewrite: does not name the variable {missing[0]}")
    for told in (answer.strip().strip("$"), form.composed()):
        if told in text and told not in problem:
            raise SetAside("rewrite: states the answer")
    return text.strip()


def _json(reply: str, step: str) -> dict[str, Any]:
    """The JSON object of a reply, with or without a fence around it."""
    text = re.sub(r"^\s*```(?:json)?\s*\n|\n\s*```\s*$", "", reply)
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        raise SetAside(f"{step}: the reply is no JSON: {reply[:80]!r}") from None
    if not isinstance(fields, dict):
        raise SetAside(f"{step}: the reply is no JSON object: {reply[:80]!r}")
    return fields


def _evaluate(node: ast.expr, values: dict[str, int]) -> int:
    """Sums, differences, products and small powers of integers. Raises ValueError for anything else."""
    match node:
        case ast.Constant(value=int() as number) if not isinstance(number, bool):
            return number
        case ast.Name(id=name) if name in values:
            return values[name]
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=inner):
            number = _evaluate(inner, values)
            return -number if isinstance(sign, ast.USub) else number
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() | ast.Mult() | ast.Pow() as operator, right=right):
            a, b = _evaluate(left, values), _evaluate(right, values)
            if isinstance(operator, ast.Pow) and not 0 <= b <= 4:
                raise ValueError("a power above 4 or below 0")
            if max(abs(a), abs(b)) > VALUE_LIMIT:
                raise ValueError("too large")
            match operator:
                case ast.Add():
                    return a + b
                case ast.Sub():
                    return a - b
                case ast.Mult():
                    return a * b
            return int(a**b)
    raise ValueError(f"{type(node).__name__} is not a sum, difference, product or power")


async def transform_all(
    problems: Sequence[tuple[str, str]], asker: ChatEndpoint, pool: RewardPool
) -> list[Transformed | SetAside]:
    """The outcome of each (problem, answer), in order. An EndpointError ends it; replies so far are kept."""

    async def one(problem: str, answer: str) -> Transformed | SetAside:
        try:
            return await transform(problem, answer, asker, pool)
        except SetAside as reason:
            return reason

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(*each)) for each in problems]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]
