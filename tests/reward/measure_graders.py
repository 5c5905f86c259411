"""Counts the mistakes of four graders on the labelled table: `python -m tests.reward.measure_graders` (a minute).

`robust`, `exact`, math-verify on the whole response, and verl's math_dapo where verl is installed. A false credit is
the worse of the two: it is trained on as if it were right. The table is ours, so our rules have been corrected by it.
"""

import argparse
import logging
from collections import Counter
from collections.abc import Callable

from reward.verdict import VerificationRequest
from reward.verifiers import exact
from tests.reward.conftest import Case, judge_robust, load_cases
from tests.reward.measure_pool import math_dapo


def graders() -> dict[str, Callable[[Case], bool]]:
    """Name -> verdict on a case."""
    from math_verify import parse, verify

    logging.disable(logging.CRITICAL)

    def by_math_verify(case: Case) -> bool:
        gold = parse(f"${case.ground_truth}$", parsing_timeout=3)
        return bool(verify(gold, parse(case.response, parsing_timeout=3), timeout_seconds=3))

    found: dict[str, Callable[[Case], bool]] = {
        "robust": lambda case: judge_robust(case.response, case.ground_truth, case.prompt).accuracy,
        "exact": lambda case: exact.judge(_request(case)).accuracy,
        "math-verify": by_math_verify,
    }
    rule = math_dapo()
    if rule is not None:
        found["verl's math_dapo"] = lambda case: rule(case.response, case.ground_truth)
    return found


def _request(case: Case) -> VerificationRequest:
    return VerificationRequest(response=case.response, ground_truth=case.ground_truth)


def main() -> None:
    """Prints a table."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    cases = load_cases()
    right = sum(case.robust for case in cases)
    print(f"{len(cases)} cases, {right} labelled right, {len(cases) - right} wrong")
    for name, judge in graders().items():
        mistakes = Counter(case.robust for case in cases if judge(case) != case.robust)
        print(f"{name}: {mistakes[False]} false credits, {mistakes[True]} false refusals")


if __name__ == "__main__":
    main()
