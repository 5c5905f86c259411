"""Writes data/: for each kind the prompts to train on and the held-out ones, and all held-out ones in one file.

    python examples/verifiers/make_verifier_data.py

The same files come out every time.
"""

import itertools
import json
from pathlib import Path

from forms import Form, Kind, Split, forms

FOLDER = Path(__file__).parent / "data"
SIZES = {Split.TRAIN: 300, Split.HELDOUT: 60}


def make_data(folder: Path) -> list[Path]:
    """Writes JSON lines with the columns `prompt`, `answer` and `source` (the kind); returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths, heldout = [], []
    for split, count in SIZES.items():
        for seed, kind in enumerate(Kind):  # a seed each: the kinds tell different stories
            lines = [_line(kind, made) for made in itertools.islice(forms(kind, split, seed=seed), count)]
            paths.append(_write(folder / f"{kind}_{split}.jsonl", lines))
            heldout += lines if split is Split.HELDOUT else []
    return [*paths, _write(folder / "all_heldout.jsonl", heldout)]


def _line(kind: Kind, made: Form) -> str:
    return json.dumps({"prompt": made.prompt, "answer": made.truth, "source": kind})


def _write(path: Path, lines: list[str]) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8", newline="\n")
    return path


if __name__ == "__main__":
    for written in make_data(FOLDER):
        print(written)
