"""Writes the quickstart's prompts: data/train.jsonl for the run, data/heldout.jsonl to measure it.

    python examples/quickstart/make_data.py

The same files come out every time. The instruction is part of the prompt, so any program can use them as they are.
`--out` and `--most-steps` make longer problems for another example.
"""

import itertools
import json
from pathlib import Path
from typing import Annotated

import typer

from task import FEWEST_STEPS, MOST_STEPS, Split, problems

FOLDER = Path(__file__).parent / "data"
SIZES = {Split.TRAIN: 4000, Split.HELDOUT: 1000}
SEED = 0


def make_data(folder: Path, *, most_steps: int = MOST_STEPS) -> list[Path]:
    """Writes one JSON lines file a split, with the columns `prompt` and `answer` (a text); returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for split, count in SIZES.items():
        chosen = itertools.islice(problems(split, seed=SEED, most_steps=most_steps), count)
        rows = (json.dumps({"prompt": problem.prompt, "answer": str(problem.answer)}) for problem in chosen)
        path = folder / f"{split}.jsonl"
        path.write_text("".join(f"{row}\n" for row in rows), encoding="utf-8", newline="\n")
        paths.append(path)
    return paths


def main(
    out: Annotated[Path, typer.Option(help="Folder for the files.", file_okay=False)] = FOLDER,
    most_steps: Annotated[int, typer.Option(min=FEWEST_STEPS, help="Steps of the longest problems.")] = MOST_STEPS,
) -> None:
    """Write the prompts to train on and the held-out problems."""
    for written in make_data(out, most_steps=most_steps):
        print(written)


if __name__ == "__main__":
    typer.run(main)
