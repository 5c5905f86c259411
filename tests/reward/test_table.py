"""Both rules against the labelled table.

The `robust` column was labelled by hand. The `exact` column is what the reference scorer itself says (verl's math_dapo,
the version of the published runs, before it knew boxes): the rule must agree with it in its mistakes too.
"""

import asyncio
from collections import Counter

import pytest

from reward.verdict import VerificationRequest
from reward.verifiers import exact
from tests.reward.conftest import Case, judge_robust, load_cases

CASES = load_cases()
GROUPS = sorted({case.group for case in CASES})


def test_the_table_is_large_and_balanced():
    right = Counter(case.group for case in CASES if case.robust)
    wrong = Counter(case.group for case in CASES if not case.robust)
    assert len(CASES) >= 600
    assert sum(right.values()) >= 250
    assert sum(wrong.values()) >= 250
    assert all(right[group] + wrong[group] >= 5 for group in GROUPS)
    assert len({(case.response, case.ground_truth, case.prompt) for case in CASES}) == len(CASES)


@pytest.mark.parametrize("group", GROUPS)
def test_robust(group):
    differing = []
    for case in (case for case in CASES if case.group == group):
        judged = judge_robust(case.response, case.ground_truth, case.prompt)
        if judged.accuracy != case.robust:
            differing.append((case.response[:80], case.ground_truth, judged.rule, judged.extracted))
    assert not differing


@pytest.mark.parametrize("group", GROUPS)
def test_exact(group):
    differing = []
    for case in (case for case in CASES if case.group == group):
        request = VerificationRequest(response=case.response, ground_truth=case.ground_truth)
        if exact.judge(request).accuracy != case.exact:
            differing.append((case.response[:80], case.ground_truth, exact.judge(request)))
    assert not differing


def test_the_known_false_negatives_of_the_reference_are_right_under_robust():
    said = ["42.", "$42$.", "\\(42\\)", "42.0", "042"]
    responses = [f"Answer: {text}" for text in said] + ["**Answer:** 42", "**Answer: 42**", "\\boxed{42}"]
    responses.append("Answer: 42" + " " * 301)
    for response in responses:
        assert judge_robust(response, "42").accuracy, response
    # the reference takes `$42$.` and misses the rest
    right = [exact.judge(VerificationRequest(response=each, ground_truth="42")).accuracy for each in responses]
    assert right == [False, True, False, False, False, False, False, False, False]


@pytest.mark.parametrize("every", [16, pytest.param(1, marks=pytest.mark.slow)])
def test_the_table_through_the_pool_in_order(make_pool, every):
    """Also shows that no hostile case of the table needs the pool's knife: these are never left out."""
    cases = [
        case for at, case in enumerate(CASES) if at % every == 0 or case.group.startswith(("hostile", "adversary"))
    ]
    pool = make_pool(workers=1, algebra_workers=2, timeout_s=30.0)

    def requests(verifier: str) -> list[VerificationRequest]:
        return [_request(case, verifier) for case in cases]

    async def both():
        return await asyncio.gather(pool.verify(requests("robust")), pool.verify(requests("exact")))

    by_robust, by_exact = asyncio.run(both())
    assert [verdict.accuracy for verdict in by_robust] == [case.robust for case in cases]
    assert [verdict.accuracy for verdict in by_exact] == [case.exact for case in cases]
    assert not [verdict for verdict in by_robust + by_exact if verdict.error]


def _request(case: Case, verifier: str) -> VerificationRequest:
    return VerificationRequest(
        response=case.response, ground_truth=case.ground_truth, prompt=case.prompt, verifier=verifier
    )
