"""The table of verifiers and those that are not for mathematics."""

import json

import pytest
from pydantic import ValidationError

from reward.config import RewardConfig
from reward.messages import Judgement, VerificationRequest, VerifierError
from reward.registry import VERIFIERS, find, load
from reward.verifiers import choice, json_answer


def test_every_registered_verifier_loads():
    for name, entry in VERIFIERS.items():
        assert entry.remote or callable(load(name))


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("robst", "'robust'"),
        ("Exact", "'exact'"),
        ("jsn", "'json'"),
        ("zzzzzz", "valid: robust"),
        ("", "valid"),
        ("a b:c", "valid"),
    ],
)
def test_an_unknown_name_gets_the_nearest(name, hint):
    with pytest.raises(VerifierError, match=hint):
        find(name)


def test_a_path_names_a_function_of_any_module():
    assert not find("tests.reward.hostile:judge").cheap
    judged = load("tests.reward.hostile:judge")(VerificationRequest(response="a", ground_truth="a"))
    assert judged == Judgement(accuracy=True, extracted="a", rule="own")
    with pytest.raises(VerifierError, match="no function nothing"):
        load("tests.reward.hostile:nothing")
    with pytest.raises(VerifierError, match=r"import of no\.such failed"):
        load("no.such:thing")


def test_the_config_refuses_an_unknown_verifier():
    assert RewardConfig(verifier="tests.reward.hostile:judge").verifier == "tests.reward.hostile:judge"
    with pytest.raises(ValidationError, match="did you mean 'robust'"):
        RewardConfig(verifier="rubust")


@pytest.mark.parametrize(
    ("response", "right"),
    [
        *[(f"Answer: {text}", True) for text in ("B", "(B)", "b", "B.", "**B**", "\\text{B}", "B) Paris", "B. Paris")],
        *[(f"Answer: {text}", True) for text in ("$\\boxed{B}$", "option B", "The answer is B", "(B) Paris", "[B]")],
        ("Answer: \uff22", True),
        ("Answer: B: it is", True),
        ("\\boxed{\\textbf{(B)}}", True),
        ("Answer: A\n\nNo.\n\nAnswer: B", True),
        *[(f"Answer: {text}", False) for text in ("A", "A or B", "B or A", "A, B", "AB", "B and C", "Paris")],
        ("Answer: Because", False),
        *[(f"Answer: {text}", False) for text in ("not B", "either B", "(A) or (B)", "B (or A)", "42", "?", "", "B/C")],
        *[(f"Answer: {text}", True) for text in ("B) f(x)", "(B) P(A)", "(B) P", "B. At (c)", "(B) False", "B) is")],
        *[(f"Answer: {text}", False) for text in ("B. C. D.", "(B) (C)", "(B)(C)", "B) 3 C) 4", "(B) to (D)", "B-D")],
        *[(f"Answer: {text}", False) for text in ("(B) is wrong", "B) isn't right", "B - C", "(B) maybe (C)", "B: C")],
        ("\\boxed{A} or \\boxed{B}", False),
        ("Answer: B or Answer: A", False),
        ("The letter is B", False),
    ],
)  # fmt: skip
def test_choice(response, right):
    judged = choice.judge(VerificationRequest(response=response, ground_truth="B"))
    assert judged.accuracy is right, judged
    assert choice.judge(VerificationRequest(response=response, ground_truth="(b)")).accuracy is right


def test_choice_wants_a_letter_as_truth():
    with pytest.raises(VerifierError, match="letter"):
        choice.judge(VerificationRequest(response="Answer: B", ground_truth="Paris"))


WANTED = {"x": 1, "tags": ["a", "b"], "deep": {"on": True, "none": None}}


def said(value: object) -> str:
    return f"Here it is:\n```json\n{json.dumps(value)}\n```\nDone."


@pytest.mark.parametrize(
    ("response", "right"),
    [
        (said(WANTED), True),
        (json.dumps(WANTED), True),
        ("text " + json.dumps(WANTED) + " text", True),
        (said({"deep": {"none": None, "on": True}, "tags": ["a", "b"], "x": 1.0}), True),
        (said({"x": 2}) + "\nNo:\n" + said(WANTED), True),
        (said(WANTED) + "\nNo:\n" + said({"x": 2}), False),
        (said(WANTED | {"x": True}), False),
        (said(WANTED | {"tags": ["b", "a"]}), False),
        (said(WANTED | {"extra": 1}), False),
        (said({"x": 1}), False),
        (said([WANTED]), False),
        (json.dumps(WANTED)[:-1], False),
        (json.dumps(WANTED).replace('"x": 1', '"x": 7, "x": 1'), False),
        ("", False),
        ("[" * 50_000, False),
        ('{"x": ' + "9" * 10_000 + "}", False),
        ("```json\nbroken\n```", False),
    ],
)
def test_json_equality(response, right):
    truth = json.dumps({"equals": WANTED})
    assert json_answer.judge(VerificationRequest(response=response, ground_truth=truth)).accuracy is right


@pytest.mark.parametrize(
    ("value", "right"), [({"n": 3}, True), ({"n": 0}, False), ({"n": "3"}, False), ({}, False), ([3], False)]
)
def test_json_under_a_schema(value, right):
    schema = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 1}}, "required": ["n"]}
    request = VerificationRequest(response=said(value), ground_truth=json.dumps({"schema": schema}))
    judged = json_answer.judge(request)
    assert (judged.accuracy, judged.rule) == (right, json_answer.RULE_SCHEMA)
    both = VerificationRequest(response=said(value), ground_truth=json.dumps({"schema": schema, "equals": {"n": 4}}))
    assert not json_answer.judge(both).accuracy


@pytest.mark.parametrize(
    "truth", ["", "42", "{}", '{"equal": 1}', "not json", '{"schema": {"type": 7}}', '{"schema": 5}']
)
def test_a_json_truth_of_another_form_is_an_error(truth):
    with pytest.raises(VerifierError, match="json"):
        json_answer.judge(VerificationRequest(response="{}", ground_truth=truth))
