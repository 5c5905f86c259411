r"""Verifier `exact`: the rule by which the paper's reproduction scored, kept for comparability with its numbers.

The rule: of the last 300 characters, what follows the last `Answer:` up to the end of its line; both sides pass the
Minerva normalisation (arXiv 2206.14858, appendix D); right if the texts are equal. It knows no boxes, and it misses
`42.`, `**Answer:** 42`, `\(42\)`, `42.0` and `042`. Later versions of the reproduction also try a box: not here.
"""

import re
import tomllib
from functools import lru_cache
from pathlib import Path

from reward.verdict import EXTRACTED_LIMIT, Judgement, VerificationRequest, check_length

RULE = "exact"
"""The rule's name in `Verdict.rule`."""

WINDOW = 300
"""Characters at the end of the response that are read."""

UNSTATED = "[INVALID]"
"""What the rule compares where a response states nothing."""

_STATED = re.compile(r"(?i)Answer\s*:\s*([^\n]+)")

_TABLE = tomllib.loads(Path(__file__).with_name("minerva.toml").read_text("ascii"))
_REMOVED = [*_TABLE["words"].split(), *_TABLE["texts"]]
_UNWRAPPED = tuple(re.compile(rf"\\{name}\{{(.*?)\}}") for name in ("text", "textbf", "overline"))
_BOX = re.compile(r"\\boxed\{(.*)\}")
_SHORT_FRACTION = re.compile(r"frac([^{])(.)")
_SHORT_ROOT = re.compile(r"sqrt([^{])")


def judge(request: VerificationRequest) -> Judgement:
    """Right if both texts are equal after normalisation.

    Raises:
        VerifierError: the ground truth is longer than `TRUTH_LIMIT`.
    """
    check_length(request.ground_truth)
    stated = _STATED.findall(request.response[-WINDOW:])
    given = normalise(stated[-1] if stated else UNSTATED)
    right = given == _truth(request.ground_truth)
    return Judgement(accuracy=right, extracted=given[:EXTRACTED_LIMIT] if stated else None, rule=RULE)


@lru_cache(maxsize=4096)
def _truth(ground_truth: str) -> str:
    return normalise(ground_truth)


def normalise(text: str) -> str:
    r"""The Minerva normalisation. Example: normalise("x = \\frac12 units") == "\\frac{1}{2}"."""
    text = text.rpartition("=")[2]
    for before, after in _TABLE["replaced"]:
        text = text.replace(before, after)
    for removed in _REMOVED:
        text = text.replace(removed, "")
    if "$" in text:
        text = "\n".join(_between_dollars(line) for line in text.split("\n"))
    for wrapper in _UNWRAPPED:
        text = wrapper.sub(r"\1", text)
    text = _BOX.sub(r"\1", text)
    text = _SHORT_FRACTION.sub(r"frac{\1}{\2}", text)
    text = _SHORT_ROOT.sub(r"sqrt{\1}", text).replace("$", "")
    digits = text.replace(",", "")
    return (digits if digits.isdigit() else text).strip()


def _between_dollars(line: str) -> str:
    """Of a line with two dollar signs, what stands between the first two."""
    parts = line.split("$", 2)
    return f"${parts[1]}$" if len(parts) == 3 else line
