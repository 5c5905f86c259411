"""What a set of problems holds: counts, lengths, kinds of answers, as a table for a person."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from reward.answer.read import read_truth

_LATEX = re.compile(r"\\[A-Za-z]|[\^_{}]")


def answer_kind(answer: str) -> str:
    """`integer`, `negative integer`, `number` (fraction, decimal, percentage, ...), `list`, `choice`, `json`,
    `expression` or `text`.

    Example: answer_kind("\\\\frac{1}{2}") == "number", answer_kind("2\\\\sqrt{3}") == "expression".
    """
    text = answer.strip()
    if re.fullmatch(r"\(?[A-Za-z]\)?", text):
        return "choice"
    if text.startswith(("{", "[")):
        try:
            json.loads(text)
            return "json"
        except (ValueError, RecursionError):
            pass
    truth = read_truth(text)
    if truth.number is not None:
        if truth.number.value.denominator > 1 or truth.number.percent:
            return "number"
        return "integer" if truth.number.value >= 0 else "negative integer"
    if truth.items:
        return "list"
    return "expression" if _LATEX.search(text) or re.search(r"\d\s*[-+*/]|[-+*/]\s*\d", text) else "text"


def report(counts: Mapping[str, int], problems: Sequence[tuple[str, str]], lengths: Mapping[str, Iterable[int]]) -> str:
    """Markdown: the counts as they come, lengths (min, median, 95%, max), kinds of the answers.

    Args:
        problems: (prompt, answer) of those that are kept.
        lengths: what was measured -> a length for each.
    """
    lines = ["| rows | count |", "|---|---|", *(f"| {name} | {count} |" for name, count in counts.items())]
    lines += ["", "| length | min | median | 95% | max |", "|---|---|---|---|---|"]
    for name, values in lengths.items():
        found = np.array(list(values))
        if found.size:
            low, middle, high, top = np.percentile(found, [0, 50, 95, 100])
            lines.append(f"| {name} | {low:.0f} | {middle:.0f} | {high:.0f} | {top:.0f} |")
    lines += ["", "| kind of answer | count | example |", "|---|---|---|"]
    kinds: Counter[str] = Counter()
    examples: dict[str, str] = {}
    for _, answer in problems:
        kind = answer_kind(answer)
        kinds[kind] += 1
        examples.setdefault(kind, answer.replace("|", "\\|").replace("\n", " ")[:40])
    lines += [f"| {kind} | {count} | `{examples[kind]}` |" for kind, count in kinds.most_common()]
    return "\n".join(lines) + "\n"
