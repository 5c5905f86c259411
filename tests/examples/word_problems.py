"""A reader of word problems that knows nothing of the code that writes them."""

import re
from collections.abc import Iterator

RULES = (
    (r"has (\d+) bags with (\d+) \w+", "bags"),
    (r"has (\d+) \w+", "start"),
    (r"(?:buys|finds|wins) (\d+) more", "+"),
    (r"gives (\d+) away|loses (\d+)|eats (\d+)", "-"),
    (r"gets (\d+) boxes with (\d+) each", "boxes"),
    (r"(doubles|triples) them", "*"),
)
FACTORS = {"doubles": 2, "triples": 3}


def calculation(prompt: str) -> tuple[tuple[tuple[int, str, int], ...], int]:
    """What the prompt's last line asks for: (left, operation, right) of each step, and the answer."""
    steps: list[tuple[int, str, int]] = []
    value = 0
    for kind, numbers in _events(prompt):
        match kind, numbers:
            case "start", [value]:
                continue
            case "bags", [left, right]:
                steps.append((left, "*", right))
                value = left * right
            case "boxes", [left, right]:
                steps += [(left, "*", right), (value, "+", left * right)]
                value += left * right
            case operation, [number]:
                steps.append((value, operation, number))
                value = {"+": value + number, "-": value - number, "*": value * number}[operation]
    return tuple(steps), value


def _events(prompt: str) -> Iterator[tuple[str, list[int]]]:
    *sentences, question = prompt.splitlines()[-1].split(". ")
    assert question == "How many now?"
    for sentence in sentences:
        for pattern, kind in RULES:
            found = re.fullmatch(rf"\w+ (?:{pattern})", sentence)
            if found:
                yield kind, [FACTORS.get(group) or int(group) for group in found.groups() if group]
                break
        else:
            raise AssertionError(f"no rule reads {sentence!r}")
