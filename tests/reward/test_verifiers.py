"""The table of verifiers and those that are not for mathematics."""

import json
import time

import pytest
from pydantic import ValidationError

from reward.config import RewardConfig
from reward.registry import VERIFIERS, find, load
from reward.verdict import Judgement, VerificationRequest, VerifierError
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
    assert not find("tests.reward.hostile:judge").fast
    judged = load("tests.reward.hostile:judge")(VerificationRequest(response="a", ground_truth="a"))
    assert judged == Judgement(accuracy=True, extracted="a", rule="own")
    with pytest.raises(VerifierError, match="no function or class nothing"):
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
        *[(f"Answer: {text}", True) for text in ("It's B", "I would go with (B)", "definitely B")],
        *[(f"Answer: {text}", False) for text in ("It's not B", "I choose B or A", "B is right if A")],
        ("\\boxed{A} or \\boxed{B}", False),
        ("Answer: B or Answer: A", False),
        ("The letter is B", False),
        *[(f"Answer: {text}", True) for text in ("(B) Both A and C", "B) A and C only", "(B) x = 2 or x = 3")],
        *[(f"Answer: {text}", True) for text in ("B. Not enough is known", "B (Paris)", "B!", "B because 3 > 2")],
        *[(f"Answer: {text}", False) for text in ("(B) 42 or C", "B) or C", "B) is not correct", "B (or C)")],
        *[(f"Answer: {text}", False) for text in ("B. 41, C. 42", "(B) 42 or C?", "(B), or maybe C", "(B) 42, C")],
        *[(f"Answer: B\n\n{text}", False) for text in ("No, the answer is C.", "Wait, it should be (C).")],
        *[(f"Answer: B\n\n{text}", True) for text in ("Wait, the answer is B.", "But it should be A simple sum.")],
        *[(f"Answer: B\n\n{text}", False) for text in ("The correct answer is C.", "Hmm, so the answer is C.")],
        *[(f"Answer: B\n\n{text}", True) for text in ("The correct answer is B.", "So the answer is C for small n.")],
        *[(f"Answer: B, {text}", False) for text in ("but D is also possible", "maybe C", "could be C", "also C")],
        *[(f"Answer: B{text}", True) for text in (": 12 m/s", " \u2014 12 m/s", ": both masses", ", but C is wrong")],
        *[(f"Answer: B{text}", True) for text in (" (not C)", ", not C", "; C is wrong", " rather than C")],
        *[(f"Answer: {text}", True) for text in ("(B) Wrong, Not wrong", "B) Cannot be determined", "(B) Incorrect")],
        *[(f"Answer: {text}", True) for text in ("B. The answer is B.", "B. C is true, but not why.", "(B) a + b")],
        *[(f"Answer: {text}", True) for text in ("B. But C is tempting", "(B) a, b", "B-Nitrogen", "(B) e")],
        *[(f"Answer: {text}", False) for text in ("b, c", "(b)/(c)", "Option B, option C", "B is right. C is right.")],
        *[(f"Answer: {text}", False) for text in ("B. Actually, it's C.", "B (maybe C)", "(b) or (c)", "(B) WRONG")],
        *[(f"Answer: {text}", False) for text in ("(B) or none", "The answer is B. The answer is C.", "(B) maybe")],
        ("Answer: B\n\nOn second thought, the answer is C.", False),
        *[(f"Answer: B{text}", False) for text in (" (C also works)", " (incorrect)", ": wrong", "; alternatively C")],
    ],
)  # fmt: skip
def test_choice(response, right):
    judged = choice.judge(VerificationRequest(response=response, ground_truth="B"))
    assert judged.accuracy is right, judged
    assert choice.judge(VerificationRequest(response=response, ground_truth="(b)")).accuracy is right


@pytest.mark.parametrize("text", ["Neither (A) nor (C)", "A > C", "P(A or C)", "$A$", "Either A or C", "A C D", "or"])
@pytest.mark.parametrize("offered", ["(A) 1\n(B) {}\n(C) 3", "A. 1\nB. {}.\nC. 3", "- A) 1\n- B) {}\n- C) 3"])
def test_an_option_that_names_others_is_known_from_the_prompt(text, offered):
    for response, right in (("Answer: (B) {}", True), ("\\boxed{{\\text{{B. {}}}}}", True), ("Answer: C) {}", False)):
        request = VerificationRequest(response=response.format(text), ground_truth="B", prompt=offered.format(text))
        assert choice.judge(request).accuracy is right


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
        (said(WANTED) + "\nNo:\n" + json.dumps({"x": 2}), False),
        (said({"x": 2}) + "\nNo:\n" + json.dumps(WANTED), True),
        (said(WANTED) + "\nNo:\n" + '{"x": 2, ', False),
        (said({"x": 2})[:-10] + "\nNo:\n" + said(WANTED), True),
        (said(WANTED) + "\nfor all {n} of [a, b]", True),
        ("on [0, 1) it is\n\n" + json.dumps(WANTED), True),
        (f"\\boxed{{{json.dumps(WANTED)}}}", True),
        (f"\\[{json.dumps(WANTED)}\\]", True),
        (r"\frac{a}{b} on [0, 1), {x : x > 0}; " * 1000 + json.dumps(WANTED), True),
        (f"```python\npass\n```\n{json.dumps(WANTED)}", True),
        (f"```json {json.dumps(WANTED)}\n```", True),
        (f"```JSON\r\n{json.dumps(WANTED)}\r\n```\r\n", True),
        (f"```json\n{json.dumps(WANTED)}", True),
    ],
)
def test_json_equality(response, right):
    truth = json.dumps({"equals": WANTED})
    assert json_answer.judge(VerificationRequest(response=response, ground_truth=truth)).accuracy is right


PART = json.dumps(WANTED)


@pytest.mark.parametrize(
    "response",
    [
        f'{{"a": {PART}',
        f'{{"a": {PART}, "a": 2}}',
        f'{{"a": {PART},}}',
        f'{{"a": {PART}]',
        f'{{"a": [1, {PART}, "b": 2}}',
        f'{{"a": "cut off, "b": {PART}}}',
        f'"a": {PART}}}',
        f"{{'a': {PART}}}",
        f"{{a: {PART}}}",
        f"{{a: {PART}",
        f"{{{PART}}}",
        f'[{{"x": 7}}, {PART}',
        f"[1, {PART}",
        f"[oops, {PART}]",
        f"[{PART}, NaN]",
        f"[{PART}, 1e999]",
        f'```json\n{{"a": {PART}\n```',
        f'First {PART}\nthen {{"a": {PART}',
        "{a" * 40_000 + PART,
    ],
)
def test_nothing_inside_a_broken_value_is_credited(response):
    truth = json.dumps({"equals": WANTED})
    assert not json_answer.judge(VerificationRequest(response=response, ground_truth=truth)).accuracy


@pytest.mark.parametrize(
    "text", ["{a", "[a", '{"', "[1,", '{a"', '{"a":1} ', '[{"a":1},', "\\", "[a\n\n", "```\n", "{a}"]
)
def test_the_last_value_is_found_in_linear_time(text):
    truth = json.dumps({"equals": WANTED})
    start = time.process_time()
    for response in (text * 30_000, text * 30_000 + PART):
        json_answer.judge(VerificationRequest(response=response, ground_truth=truth))
    assert time.process_time() - start < 5


@pytest.mark.parametrize(
    ("given", "wanted", "right"),
    [
        ("1.0", "1", True),
        ("1e2", "100", True),
        ("-0.0", "0", True),
        ("0e-999", "0", True),
        ("1e308", "1e308", True),
        ("2e999", "1", False),
        ("1e-999", "0", False),
        ("NaN", "1", False),
        ("Infinity", "1", False),
        ("true", "1", False),
        ("9007199254740993", "9007199254740992", False),
    ],
)
def test_json_numbers(given, wanted, right):
    request = VerificationRequest(response=f'{{"n": {given}}}', ground_truth=f'{{"equals": {{"n": {wanted}}}}}')
    assert json_answer.judge(request).accuracy is right


TREE = {"type": "object", "properties": {"child": {"$ref": "#"}}, "required": ["n"]}


@pytest.mark.parametrize(
    ("schema", "said_of_it"),
    [
        ({"properties": {"a": {"$ref": "#/$defs/none"}}}, "does not hold"),
        ({"$ref": "https://example.com/s.json"}, "does not hold"),
        ({"pattern": "("}, "not valid"),
    ],
)
def test_a_schema_that_cannot_be_applied_is_refused_before_any_response(schema, said_of_it):
    with pytest.raises(VerifierError, match=said_of_it):
        json_answer.judge(VerificationRequest(response="", ground_truth=json.dumps({"schema": schema})))


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"allOf": [{"anyOf": [{"$ref": "#"}]}]},
        {"properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": {"not": {"$ref": "#/$defs/b"}}}},
        {"$dynamicRef": "#"},
    ],
)
def test_a_schema_that_applies_itself_to_the_same_value_for_ever_judges_nobody(schema):
    with pytest.raises(VerifierError, match="leads back to itself"):
        json_answer.judge(VerificationRequest(response="", ground_truth=json.dumps({"schema": schema})))


def test_a_recursive_schema_is_no_loop_and_a_value_too_deep_for_it_is_wrong():
    truth = json.dumps({"schema": TREE})
    deep = '{"n": 1, "child": ' * 300 + '{"n": 1}' + "}" * 300
    for response, right in (('{"n": 1, "child": {"n": 2}}', True), ('{"n": 1, "child": {}}', False), (deep, False)):
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
    "truth",
    ["", "42", "{}", '{"equal": 1}', "not json", '{"schema": {"type": 7}}', '{"schema": 5}', '{"equals": 1e999}'],
)
def test_a_json_truth_of_another_form_is_an_error(truth):
    with pytest.raises(VerifierError, match="json"):
        json_answer.judge(VerificationRequest(response="{}", ground_truth=truth))
