"""The quickstart's problems, their splits and the rule that judges them."""

import itertools
import json
import random
from pathlib import Path

import pytest

import make_data
import task
from reward.verdict import Judgement, VerificationRequest
from reward.verifiers.robust import judge
from tests.examples.word_problems import calculation

DATA = Path(__file__).parents[2] / "examples" / "quickstart" / "data"


def rows(split: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (DATA / f"{split}.jsonl").read_text().splitlines()]


def some_problems(count: int, split: task.Split = task.Split.TRAIN, seed: int = 5) -> list[task.Problem]:
    return list(itertools.islice(task.problems(split, seed=seed), count))


def is_right(problem: task.Problem, response: str) -> bool:
    verdict = judge(VerificationRequest(response=response, ground_truth=str(problem.answer), prompt=problem.prompt))
    assert isinstance(verdict, Judgement), "no response of this task should need algebra"
    return verdict.accuracy


@pytest.fixture(scope="module")
def signatures() -> dict[str, set[tuple]]:
    """Signature of every problem of each split, read from the texts."""
    taught = {
        calculation(problem.prompt)[0]
        for seed in (0, 1)
        for problem in some_problems(24_000, task.Split.WARM_START, seed)
    }
    return {"warm_start": taught} | {
        split: {calculation(row["prompt"])[0] for row in rows(split)} for split in ("train", "heldout")
    }


def test_no_heldout_problem_shares_its_numbers_with_anything_that_is_learnt_from(signatures) -> None:
    assert {name: len(found) for name, found in signatures.items() if name != "warm_start"} == {
        "train": 4000,
        "heldout": 1000,
    }
    assert len(signatures["warm_start"]) > 24_000
    assert not signatures["heldout"] & signatures["train"]
    assert not signatures["heldout"] & signatures["warm_start"]
    assert not signatures["train"] & signatures["warm_start"]


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_the_answers_in_the_files_are_those_of_the_texts(split: str) -> None:
    for row in rows(split):
        assert row["answer"] == str(calculation(row["prompt"])[1])


def test_a_problem_is_what_its_text_says() -> None:
    for problem in some_problems(500):
        assert (task.signature(problem), problem.answer) == calculation(problem.prompt)
        values = [step.result for step in problem.steps]
        assert all(0 <= value <= 99 for value in values)


def test_names_and_things_do_not_change_the_split() -> None:
    problem = some_problems(1)[0]
    renamed = task.Problem(text=problem.text.replace(problem.text.split()[0], "Ida"), steps=problem.steps)
    assert renamed.text != problem.text
    assert task.split_of(renamed) is task.split_of(problem)


def test_every_length_is_there_in_equal_shares() -> None:
    counts = [len(calculation(row["prompt"])[0]) for row in rows("train")]
    shares = [counts.count(steps) / len(counts) for steps in (2, 3, 4, 5)]
    assert sum(shares) == 1
    assert all(abs(share - 0.25) < 0.03 for share in shares)


def test_a_used_up_split_says_so(monkeypatch) -> None:
    monkeypatch.setattr(task, "ATTEMPTS", 50)
    with pytest.raises(ValueError, match=r"split heldout: no new problem of \d steps after \d+ of all"):
        some_problems(5000, task.Split.HELDOUT)


def test_the_files_come_out_the_same_again(tmp_path) -> None:
    for written in make_data.make_data(tmp_path):
        assert written.read_bytes() == (DATA / written.name).read_bytes()


def test_the_reward_rule_agrees_with_the_task() -> None:
    rng = random.Random(0)
    ended = 0
    for problem in some_problems(300):
        assert is_right(problem, problem.worked)
        assert is_right(problem, problem.bare)
        wrong = (problem.answer + rng.randint(1, 99)) % 100
        assert not is_right(problem, f"Answer: {wrong}")
        assert not is_right(problem, problem.worked.replace(problem.bare, f"Answer: {wrong}"))
        assert not is_right(problem, problem.worked.removesuffix(problem.bare))
        text, ends = task.rambling(problem, rng, repeat=0.55, longest=8)
        assert is_right(problem, text) is ends
        ended += ends
    assert 0 < ended < 300


def test_rambling_repeats_true_lines_and_breaks_off() -> None:
    problem = some_problems(1)[0]
    text, ends = task.rambling(problem, random.Random(0), repeat=0.999, longest=6)
    first = problem.steps[0].line
    assert not ends
    assert text == f"{first}\n" + f"wait {first}\n" * 5
    assert task.rambling(problem, random.Random(0), repeat=0.0, longest=6) == (problem.worked, True)
