"""The second rule for mathematics."""

import pytest

from reward.registry import other_accuracy
from reward.verdict import Deferred, VerificationRequest
from reward.verifiers import exact, robust
from tests.reward.conftest import load_cases


def test_the_other_rule_is_the_labelled_one():
    for case in load_cases():
        request = {"response": case.response, "ground_truth": case.ground_truth, "prompt": case.prompt}
        assert other_accuracy(VerificationRequest(**request, verifier="robust")) is case.exact, case
        other = other_accuracy(VerificationRequest(**request, verifier="exact"))
        deferred = isinstance(robust.judge(VerificationRequest(**request)), Deferred)
        assert other is (None if deferred else case.robust), case


@pytest.mark.parametrize("verifier", ["choice", "json", "remote", "tests.reward.hostile:judge"])
def test_there_is_none_outside_mathematics(verifier):
    assert other_accuracy(VerificationRequest(response="Answer: B", ground_truth="B", verifier=verifier)) is None


def test_an_unusable_truth_has_no_second_opinion():
    assert other_accuracy(VerificationRequest(response="Answer: 4", ground_truth="", verifier="exact")) is None


def test_examples():
    request = VerificationRequest(response="Answer: 42.", ground_truth="42")
    assert other_accuracy(request) is False
    assert exact.judge(request).accuracy is False
