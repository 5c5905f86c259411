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
_REPLACED = [*_TABLE["replaced"], *((text, "") for text in (*_TABLE["words"].split(), *_TABLE["texts"]))]
_REWRITTEN = [(re.compile(pattern), put) for pattern, put in _TABLE["rewritten"]]


def judge(request: VerificationRequest) -> Judgement:
    """Right if both texts are equal after normalisation.

    Raises:
        VerifierError: the ground truth is longer than `TRUTH_LIMIT`.
    """
    check_length(request.ground_truth)
    stated = _STATED.findall(request.response[-WINDOW:])
    given = normalise(stated[-1] if stated else UNSTATED)
    right = given == normalise(request.ground_truth)
    return Judgement(accuracy=right, extracted=given[:EXTRACTED_LIMIT] if stated else None, rule=RULE)


@lru_cache(maxsize=4096)
def normalise(text: str) -> str:
    r"""The Minerva normalisation. Example: normalise("x = \\frac12 units") == "\\frac{1}{2}".

    Cached: a group's responses share the ground truth, and often state the same answer in the same words.
    """
    text = text.rpartition("=")[2]
    for before, after in _REPLACED:
        text = text.replace(before, after)
    for pattern, put in _REWRITTEN:
        text = pattern.sub(put, text)
    digits = text.replace(",", "")
    return (digits if digits.isdigit() else text).strip()
