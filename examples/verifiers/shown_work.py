"""A verifier of one's own, named in a config as `examples.verifiers.shown_work:judge`."""

import re

from reward.verdict import Judgement, VerificationRequest, VerifierError

_STEP = re.compile(r"(\d{1,4})([-+*])(\d{1,4})=(\d{1,6})")
_ANSWER = re.compile(r"Answer: (\d{1,6})")


def judge(request: VerificationRequest) -> Judgement:
    """Right if the last line states the answer, every line before it is a true calculation, and the last of them gives
    that answer. A number without work is wrong here, whatever it is.

    Raises:
        VerifierError: the ground truth is no whole number; such a sample stops the run instead of teaching something.
    """
    if not request.ground_truth.isdecimal():
        raise VerifierError(f"ground truth {request.ground_truth[:40]!r} is no whole number")
    *work, last = request.response.strip().split("\n")
    stated = _ANSWER.fullmatch(last)
    if stated is None:
        return Judgement(accuracy=False, extracted=None, rule="no-answer")
    steps = [_STEP.fullmatch(line) for line in work]
    shown = bool(steps) and all(step is not None and _holds(step) for step in steps)
    ends_there = shown and steps[-1] is not None and int(steps[-1][4]) == int(stated[1])
    right = ends_there and int(stated[1]) == int(request.ground_truth)
    return Judgement(accuracy=right, extracted=stated[1], rule="work" if shown else "no-work")


def _holds(step: re.Match[str]) -> bool:
    left, right = int(step[1]), int(step[3])
    return int(step[4]) == {"+": left + right, "-": left - right, "*": left * right}[step[2]]
