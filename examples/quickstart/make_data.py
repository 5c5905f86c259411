"""Writes the quickstart's prompts: data/train.jsonl for the run, data/heldout.jsonl to measure it.

    python examples/quickstart/make_data.py

The same files come out every time. The instruction is part of the prompt, so any program can use them as they are.
"""

import itertools
import json
from pathlib import Path

from task import Split, problems

FOLDER = Path(__file__).parent / "data"
SIZES = {Split.TRAIN: 4000, Split.HELDOUT: 1000}
SEED = 0


def make_data(folder: Path) -> list[Path]:
    """Writes one JSON lines file a split, with the columns `prompt` and `answer` (a text); returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for split, count in SIZES.items():
        chosen = itertools.islice(problems(split, seed=SEED), count)
        rows = (json.dumps({"prompt": problem.prompt, "answer": str(problem.answer)}) for problem in chosen)
        path = folder / f"{split}.jsonl"
        path.write_text("".join(f"{row}\n" for row in rows), encoding="utf-8", newline="\n")
        paths.append(path)
    return paths


if __name__ == "__main__":
    for written in make_data(FOLDER):
        print(written)
