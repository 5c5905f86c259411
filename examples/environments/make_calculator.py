"""Makes the data and the base model of the calculator's word problems.

    python -m examples.environments.make_calculator

The base was first taught to call the calculator for each step, then mostly by writers who state the answer at once. So
it can use the tool and seldom does; by head it cannot calculate with such numbers. About four minutes on two cores.
"""

import hashlib
import itertools
import json
import random
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer

from examples.environments.calculator import CALL, END, calculate, result
from examples.environments.teach import Conversation, converse, teach
from examples.environments.wordlevel import make_tokenizer
from reward.environment import Episode, Turn

HERE = Path(__file__).parent
TRAIN, HELDOUT = 2000, 500
MOST_STEPS = 3
BATCH = 48
BARE = 0.8
"""Share of answers without a call among the later teachers."""
HASTY = 0.25
"""Share of the steps that the later teachers have."""
NAMES = ("Ana", "Ben", "Eva", "Leo", "Mia", "Sam", "Tom", "Zoe")
THINGS = ("apples", "books", "cards", "coins", "cups", "eggs", "nuts", "pens")


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    text: str
    sums: tuple[str, ...]
    """Such as 27*348, in the order of the text."""

    @property
    def answer(self) -> str:
        return result(self.sums[-1])


def problems(seed: int, *, held_out: bool) -> Iterator[Problem]:
    """Endless problems of one split: a hash of the calculations says which are held out."""
    rng = random.Random(seed)
    while True:
        problem = _problem(rng)
        digest = hashlib.sha256(repr(problem.sums).encode()).digest()
        if not problem.answer.startswith("-") and (digest[0] % 5 == 0) == held_out:
            yield problem


def _problem(rng: random.Random) -> Problem:
    name, things = rng.choice(NAMES), rng.choice(THINGS)
    count, each = rng.randint(12, 99), rng.randint(101, 999)
    said, sums = [f"{name} has {count} boxes with {each} {things}."], [f"{count}*{each}"]
    for _ in range(rng.randint(0, MOST_STEPS - 1)):
        verb, sign = rng.choice((("finds", "+"), ("buys", "+"), ("loses", "-"), ("sells", "-")))
        number = rng.randint(101, 9999)
        said.append(f"{name} {verb} {number}.")
        sums.append(f"{result(sums[-1])}{sign}{number}")
    return Problem(text=" ".join([*said, "How many now?"]), sums=tuple(sums))


def solved(problem: Problem, *, bare: bool) -> Conversation:
    """The conversation of a teacher who calls for each step, or for none."""
    calls = [] if bare else problem.sums
    pairs = ((("assistant", f"{CALL}{text}{END}"), ("tool", result(text))) for text in calls)
    return [("user", problem.text), *itertools.chain(*pairs), ("assistant", f"Answer: {problem.answer}")]


def conversations(seed: int, careful: int) -> Iterator[Conversation]:
    """Endless solutions; the first `careful` of them call."""
    rng = random.Random(seed)
    for place, problem in enumerate(problems(seed, held_out=False)):
        yield solved(problem, bare=place >= careful and rng.random() < BARE)


def measured(folder: Path, *, temperature: float) -> tuple[float, float, float]:
    """Share of the held-out problems that the model in `folder` solves, in which it calls, and of the latter that it
    solves."""
    torch.manual_seed(0)
    chosen = list(itertools.islice(problems(1, held_out=True), HELDOUT))

    def answer(place: int, turns: list[tuple[str, str]]) -> str | None:
        told = calculate(Episode(chosen[place].text, chosen[place].answer, tuple(Turn(*turn) for turn in turns)))
        return None if told is None else told.text

    prompts = [problem.text for problem in chosen]
    ends = (END,)
    episodes = converse(folder, prompts, answer, most_turns=MOST_STEPS + 2, temperature=temperature, ends=ends)
    right = [
        re.fullmatch(rf"Answer: {problem.answer}", turns[-1][0]) is not None
        for problem, turns in zip(chosen, episodes, strict=True)
    ]
    called = [well for well, turns in zip(right, episodes, strict=True) if len(turns) > 1]
    return sum(right) / HELDOUT, len(called) / HELDOUT, sum(called) / max(len(called), 1)


def make_data(folder: Path) -> list[Path]:
    """Writes the prompts to train on and the held-out ones; the same bytes on every machine."""
    paths = []
    for name, split, count in (("train", False, TRAIN), ("heldout", True, HELDOUT)):
        chosen = itertools.islice(problems(int(split), held_out=split), count)
        rows = (json.dumps({"prompt": problem.text, "answer": problem.answer}) for problem in chosen)
        paths.append(folder / f"calculator_{name}.jsonl")
        paths[-1].write_text("".join(f"{row}\n" for row in rows), encoding="utf-8", newline="\n")
    return paths


def main(
    out: Annotated[Path, typer.Option(help="Folder of the base.", file_okay=False)] = HERE / "calculator_base",
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 600,
    seed: Annotated[int, typer.Option(help="Of the weights and of the problems.")] = 0,
) -> None:
    """Write the prompts, the tokenizer and the base, and say what the base can do."""
    make_data(HERE / "data")
    shutil.rmtree(out, ignore_errors=True)
    words = ["has", "boxes", "with", "finds", "buys", "loses", "sells", "How", "many", "now", "Answer", "error"]
    make_tokenizer(out, [*NAMES, *THINGS, *words], ends=(CALL, END), context=192)
    careful = int(steps * (1 - HASTY)) * BATCH
    teach(out, conversations(seed, careful), steps=steps, batch=BATCH, seed=seed, ends=(END,))
    for name, temperature in (("sampled", 1.0), ("greedy", 0.0)):
        right, called, well = measured(out, temperature=temperature)
        print(f"{name}: {right:.0%} of the held-out problems right; {called:.0%} with calls, {well:.0%} of them right")


if __name__ == "__main__":
    typer.run(main)
