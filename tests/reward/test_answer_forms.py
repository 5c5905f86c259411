"""`robust:FORM`: the user's form is read, with the same care as the default one."""

import re

import pytest

from reward.check import check_ground_truth, check_verifiers
from reward.config import RewardConfig
from reward.registry import find, find_named_by_data, other_accuracy, stated_form
from reward.verdict import Deferred, VerificationRequest, VerifierError
from reward.verifiers import robust
from tests.reward.conftest import load_cases

HASHES, TAGS, SENTENCE = "#### {answer}", "<answer>{answer}</answer>", "The answer is {answer}."


def accuracy(form, response, truth="42", prompt=""):
    request = VerificationRequest(response=response, ground_truth=truth, prompt=prompt, verifier=f"robust:{form}")
    judged = robust.judge(request)
    return (robust.finish(judged) if isinstance(judged, Deferred) else judged).accuracy


@pytest.mark.parametrize(
    ("form", "response", "truth"),
    [
        (SENTENCE, "The answer is 42.", "42"),
        (SENTENCE, r"So the answer is $\frac12$.", "0.5"),
        (SENTENCE, "It is not 41. The answer is 42 because 6 * 7 = 42.", "42"),
        ("the final answer is: {answer}", "the final answer is: $42$", "42"),
        (HASHES, "6 * 7 = 42\n#### 42", "42"),
        (HASHES, "#### 41\nNo: 6 * 7 = 42.\n#### 42\n", "42"),
        (HASHES, "#### \\boxed{42}", "42"),
        (TAGS, "<answer>42</answer>", "42"),
        (TAGS, "<think>41</think>\n<Answer>\n 42 </Answer>\nDone.", "42"),
        ("**{answer}**", "so **42** it is", "42"),
        (r"\boxed{{answer}}", r"so \boxed{\frac{1}{2}}", "1/2"),
        (r"\boxed{{answer}}", r"so \boxed{42}.", "42"),
        (HASHES + "\n", "6 * 7\n#### 42", "42"),
        ("<answer>\n{answer}\n</answer>", "<answer>42</answer>", "42"),
        (HASHES, "#### 42\nAnswer: $42$", "42"),
    ],
)
def test_an_answer_in_the_form_counts(form, response, truth):
    assert accuracy(form, response, truth)


@pytest.mark.parametrize(
    ("form", "response"),
    [
        (HASHES, "Answer: 42"),
        (HASHES, "\\boxed{42}"),
        (HASHES, "#### 42\n#### Conclusion: 41"),
        (HASHES, "#### 41 #### 42"),
        (HASHES, "#### 40\n#### 41\n#### 42"),
        (HASHES, "#### 42\nI made a slip; it is \\boxed{41}."),
        (HASHES, "```\n#### 42\n```"),
        (HASHES, "#### 42\n\nWait, that is wrong."),
        (TAGS, "<answer>42"),
        (TAGS, "<answer>42</answer>. No, both of these:\n<answer>43\n44</answer>"),
        (r"\boxed{{answer}}", r"so \boxed{42"),
        (TAGS, "<answer>4\n2</answer>"),
        (TAGS, "<answer>41</answer> or <answer>42</answer>"),
        (TAGS, "-<answer>42</answer>"),
        (SENTENCE, "The answer is not 42."),
        (SENTENCE, "If the answer is 42, all is well."),
        (SENTENCE, "The answer is 42 or 43."),
        (SENTENCE, "The answer is 42?"),
        (SENTENCE, "The answer isn't 41. Nobody knows it; 42."),
    ],
)
def test_what_is_no_answer_in_the_form_does_not(form, response):
    assert not accuracy(form, response)


@pytest.mark.parametrize(
    ("form", "found", "put"),
    [
        (HASHES, r"(?i)answer\s*:", "#### "),
        (SENTENCE, r"(?i)(?:the )?(?:final )?answer\s*:", "The answer is"),
        (TAGS, r"(?im)answer\s*:(.*)$", r"<answer>\1</answer>"),
    ],
)
@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_the_labelled_table_in_another_form_brings_no_false_credit(form, found, put, every):
    right = wrong = 0
    differing = []
    for case in load_cases()[::every]:
        response = re.sub(found, put, case.response)
        if response == case.response or case.group == "placeholder":
            continue
        got = accuracy(form, response, case.ground_truth, re.sub(found, put, case.prompt))
        right, wrong = right + (got and case.robust), wrong + (not got and not case.robust)
        if got and not case.robust:
            differing.append(case.response)
    # Words before the mark, or in the line behind it, that the rewriting makes part of no statement.
    assert set(differing) <= {
        "Answer: 9\nor 8",
        "Answer: 9\n(or 8)",
        "Not the answer: 42",
        "Suppose the answer: 4. Contradiction.",
        "Answer: A\nNo! The answer is (D).",
    }
    assert right > 1600 / every * 0.9
    assert wrong > 1500 / every * 0.9


def test_such_a_verifier_is_a_built_in_one():
    name = f"robust:{TAGS}"
    assert find(name).fast
    assert find_named_by_data(name, ()) == find(name), "a row may name it: it runs no code of the file's"
    check_verifiers({name: "reward.verifier"}, RewardConfig(verifier=name, by_source={"gsm8k": f"robust:{HASHES}"}))
    with pytest.raises(VerifierError, match="holds no answer"):
        check_ground_truth(name, " ")
    request = VerificationRequest(response="<answer>42</answer>", ground_truth="42", verifier=name)
    assert other_accuracy(request) is None, "`exact` reads another form"
    assert [stated_form(each) for each in (name, "robust", "choice", "code")] == [
        TAGS, "Answer: {answer}", "Answer: {answer}", None,
    ]  # fmt: skip


@pytest.mark.parametrize(
    "name", ["robust:{answer}", "robust:. {answer}", "robust:#### {answer} {answer}", "robust:####"]
)
def test_a_form_without_a_beginning_is_refused(name):
    with pytest.raises(VerifierError, match="is not known"):
        find(name)


def test_no_part_of_a_list_stands_outside_the_form():
    assert accuracy(TAGS, "<answer>1, 2</answer>", "1, 2")
    assert not accuracy(TAGS, "<answer>1</answer> Answer: 2", "1, 2")


def test_a_verifier_of_the_users_that_asks_robust_gets_the_default_form():
    request = VerificationRequest(response="Answer: 42", ground_truth="42", verifier="my_module:judge")
    assert robust.judge(request).accuracy


def test_the_pool_judges_by_form(make_pool):
    import asyncio

    pool = make_pool(workers=1)
    requests = [
        VerificationRequest(response=response, ground_truth="1/2", verifier=f"robust:{HASHES}")
        for response in ("#### 0.5", "Answer: 0.5", "#### \\sin(\\pi/6)")
    ]
    assert [verdict.accuracy for verdict in asyncio.run(pool.verify(requests))] == [True, False, True]
