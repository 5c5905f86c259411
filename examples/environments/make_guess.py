"""Makes the data and the base model of the guessing game.

    python -m examples.environments.make_guess

The base was first taught by a player who keeps to what it was told and picks anywhere within that, then by players most
of whom forget it. So it can use the hints and seldom does. About three minutes on two cores.
"""

import itertools
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import torch
import typer

from examples.environments.guess import TRIES, play
from examples.environments.teach import Conversation, converse, teach
from examples.environments.wordlevel import make_tokenizer
from reward.environment import End, Episode, Turn

HERE = Path(__file__).parent
WIDTH, LARGEST = 15, 49
BATCH = 64
CONTEXT = 96
FORGETFUL = 0.7
"""Share of forgetful players among the later teachers."""
SLIP = 0.8
"""How often such a one takes any number of the whole range."""
FORGETTING = 0.25
"""Share of the steps that the later teachers have."""


Game = tuple[int, int, int]
"""(lowest, highest, goal)"""


def games(held_out: bool) -> list[Game]:
    """All games of one split: every fifth range is held out, with all its goals."""
    lows = [low for low in range(1, LARGEST - WIDTH + 2) if (low % 5 == 3) == held_out]
    return [(low, low + WIDTH - 1, goal) for low in lows for goal in range(low, low + WIDTH)]


def prompt(low: int, high: int) -> str:
    return f"Guess {low}-{high}"


def played(game: Game, rng: random.Random, *, slip: float) -> Conversation:
    """One game of a player who forgets the hints with probability `slip` before each guess."""
    low, high, goal = game
    talk, least, most = [("user", prompt(low, high))], low, high
    for _ in range(TRIES):
        guess = rng.randint(low, high) if rng.random() < slip else rng.randint(least, most)
        talk.append(("assistant", str(guess)))
        if guess == goal:
            break
        talk.append(("user", "higher" if guess < goal else "lower"))
        least, most = (max(least, guess + 1), most) if guess < goal else (least, min(most, guess - 1))
    if talk[-1][0] == "user":
        talk.pop()
    return talk


def conversations(seed: int, careful: int) -> Iterator[Conversation]:
    """Endless games; the first `careful` of them forget nothing."""
    rng, every = random.Random(seed), games(held_out=False)
    for place in itertools.count():
        yield played(rng.choice(every), rng, slip=SLIP if place >= careful and rng.random() < FORGETFUL else 0.0)


def found(folder: Path, *, temperature: float, times: int = 4) -> float:
    """Share of the held-out games that the model in `folder` wins, each played so many times."""
    torch.manual_seed(0)
    chosen = games(held_out=True) * times

    def answer(place: int, turns: list[tuple[str, str]]) -> str | None:
        low, high, goal = chosen[place]
        episode = Episode(prompt(low, high), str(goal), tuple(Turn(said, seen) for said, seen in turns))
        step = play(episode)
        wins[place] = isinstance(step, End) and step.accuracy
        return None if isinstance(step, End) else step.text

    wins = [False] * len(chosen)
    converse(folder, [prompt(low, high) for low, high, _ in chosen], answer, most_turns=TRIES, temperature=temperature)
    return sum(wins) / len(wins)


def make_data(folder: Path) -> list[Path]:
    """Writes the prompts to train on and the held-out ones; the same bytes on every machine."""
    paths = []
    for name, split in (("train", False), ("heldout", True)):
        lines = [json.dumps({"prompt": prompt(low, high), "answer": str(goal)}) for low, high, goal in games(split)]
        random.Random(0).shuffle(lines)
        paths.append(folder / f"guess_{name}.jsonl")
        paths[-1].write_text("".join(f"{line}\n" for line in lines), encoding="utf-8", newline="\n")
    return paths


def main(
    out: Annotated[Path, typer.Option(help="Folder of the base.", file_okay=False)] = HERE / "guess_base",
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 800,
    seed: Annotated[int, typer.Option(help="Of the weights and of the games.")] = 0,
) -> None:
    """Write the prompts, the tokenizer and the base, and say how often it wins."""
    make_data(HERE / "data")
    shutil.rmtree(out, ignore_errors=True)
    numbers = [str(number) for number in range(10, LARGEST + 1)]
    make_tokenizer(out, ["Guess", "higher", "lower", "number", *numbers], context=CONTEXT)
    careful = int(steps * (1 - FORGETTING)) * BATCH
    teach(out, conversations(seed, careful), steps=steps, batch=BATCH, seed=seed)
    sampled, greedy = found(out, temperature=1.0), found(out, temperature=0.0)
    print(f"wins {sampled:.0%} of the held-out games sampled, {greedy:.0%} greedy")


if __name__ == "__main__":
    typer.run(main)
