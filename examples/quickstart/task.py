"""The quickstart's task: word problems of two to five chained steps whose answer is a whole number from 0 to 99.

    Zoe has 16 cards. Zoe loses 5. Zoe wins 2 more. How many now?   ->   16-5=11
                                                                         11+2=13
                                                                         Answer: 13

Two problems that differ only in names and things share their numbers, so the three splits are told apart by the
*signature*, the tuple of numbers and operations: its hash alone says which split a problem belongs to. The splits
therefore stay apart for every seed and every size.
"""

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

INSTRUCTION = "Solve step by step. Last line: Answer: N."
NAMES = ("Ana", "Ben", "Eva", "Leo", "Mia", "Sam", "Tom", "Zoe")
THINGS = ("apples", "books", "cards", "coins", "cups", "eggs", "nuts", "pens")
GAINS = ("buys {} more", "finds {} more", "wins {} more")
LOSSES = ("gives {} away", "loses {}", "eats {}")
LARGEST = 99
FEWEST_STEPS, MOST_STEPS = 2, 5
ATTEMPTS = 100_000


class Split(StrEnum):
    """What a problem may be used for; see `split_of`."""

    HELDOUT = "heldout"
    TRAIN = "train"
    WARM_START = "warm_start"


# Of every eight signatures one is held out, three are for reinforcement learning, four for the warm start.
_SPLIT_OF_BUCKET = (Split.HELDOUT, *[Split.TRAIN] * 3, *[Split.WARM_START] * 4)


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One line of a worked solution, such as 16-5=11."""

    left: int
    operation: str
    right: int

    @property
    def result(self) -> int:
        match self.operation:
            case "+":
                return self.left + self.right
            case "-":
                return self.left - self.right
            case "*":
                return self.left * self.right
        raise ValueError(f"operation {self.operation!r}: expected one of + - *")

    @property
    def line(self) -> str:
        return f"{self.left}{self.operation}{self.right}={self.result}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """A word problem and the steps that solve it, in the order of the text."""

    text: str
    steps: tuple[Step, ...]

    @property
    def answer(self) -> int:
        return self.steps[-1].result

    @property
    def prompt(self) -> str:
        return prompt_text(self.text)

    @property
    def worked(self) -> str:
        return "\n".join([*(step.line for step in self.steps), self.bare])

    @property
    def bare(self) -> str:
        return f"Answer: {self.answer}"


Signature = tuple[tuple[int, str, int], ...]


def prompt_text(problem: str) -> str:
    """The instruction (the paper's, shortened) and the problem. The chat template puts a line break behind it."""
    return f"{INSTRUCTION}\n{problem}"


def signature(problem: Problem) -> Signature:
    """What the problem computes, whatever its words: (left, operation, right) of every step."""
    return tuple((step.left, step.operation, step.right) for step in problem.steps)


def split_of(problem: Problem) -> Split:
    """The one split that the problem's signature belongs to."""
    digest = hashlib.sha256(repr(signature(problem)).encode()).digest()
    return _SPLIT_OF_BUCKET[digest[0] % len(_SPLIT_OF_BUCKET)]


def problems(split: Split, *, seed: int, most_steps: int = MOST_STEPS) -> Iterator[Problem]:
    """Endless problems of one split, no signature twice, with as many of two steps as of three, and of each further
    number up to `most_steps`.

    The same seed gives the same problems on every machine.

    Raises:
        ValueError: no new problem was found: the split is used up. It holds about 2500 (held out), 7900 (training) and
            10600 (warm start) signatures of two steps, a quarter of what is drawn, and many more of the longer ones.
    """
    rng, seen = random.Random(seed), set[Signature]()
    while True:
        count = rng.randint(FEWEST_STEPS, most_steps)
        for _ in range(ATTEMPTS):
            problem = _attempt(rng, count)
            if problem is not None and split_of(problem) == split and signature(problem) not in seen:
                break
        else:
            raise ValueError(f"split {split}: no new problem of {count} steps after {len(seen)} of all; ask for fewer")
        seen.add(signature(problem))
        yield problem


def rambling(problem: Problem, rng: random.Random, *, repeat: float, longest: int) -> tuple[str, bool]:
    """A worked solution that goes over its steps again and again; returns the text and whether it comes to an end.

    After each line another "wait" follows with probability `repeat`. A text of more than `longest` lines is cut there,
    without an answer: such an example teaches the model to run past the limit of length.
    """
    lines: list[str] = []
    for step in problem.steps:
        lines.append(step.line)
        while rng.random() < repeat:
            lines.append(f"wait {step.line}")
    if len(lines) > longest:
        return "\n".join(lines[:longest]) + "\n", False
    return "\n".join([*lines, problem.bare]), True


def _attempt(rng: random.Random, count: int) -> Problem | None:
    """A random problem of `count` steps, or None if a value left 0-99 on the way."""
    name, thing = rng.choice(NAMES), rng.choice(THINGS)
    if rng.random() < 0.5:
        steps = [Step(left=rng.randint(2, 9), operation="*", right=rng.randint(2, 9))]
        value = steps[0].result
        sentences = [f"{name} has {steps[0].left} bags with {steps[0].right} {thing}."]
    else:
        steps, value = [], rng.randint(2, 60)
        sentences = [f"{name} has {value} {thing}."]
    while len(steps) < count:
        words, added = _event(rng, value, room=count - len(steps))
        sentences.append(f"{name} {words}.")
        steps += added
        value = steps[-1].result
        if not 0 <= value <= LARGEST:
            return None
    return Problem(text=" ".join([*sentences, "How many now?"]), steps=tuple(steps))


def _event(rng: random.Random, value: int, *, room: int) -> tuple[str, list[Step]]:
    """What happens next: words, and the one or two steps (at most `room`) that take `value` further."""
    kind = rng.choices(("gain", "loss", "boxes", "multiple"), weights=(36, 36, 14 if room >= 2 else 0, 14))[0]
    if kind == "boxes":
        boxes, each = rng.randint(2, 9), rng.randint(2, 9)
        product = Step(left=boxes, operation="*", right=each)
        return f"gets {boxes} boxes with {each} each", [product, Step(left=value, operation="+", right=product.result)]
    if kind == "multiple":
        factor, words = rng.choices(((2, "doubles them"), (3, "triples them")), weights=(60, 40))[0]
        return words, [Step(left=value, operation="*", right=factor)]
    number = rng.randint(2, 9)
    if kind == "gain":
        return rng.choice(GAINS).format(number), [Step(left=value, operation="+", right=number)]
    return rng.choice(LOSSES).format(number), [Step(left=value, operation="-", right=number)]
