"""Figures over problems by hand, and files that hold every problem."""

import json

import numpy as np
import pytest

from megatron_dapo.data.prompts import Prompt
from megatron_dapo.experience.evaluation import Answer, figures, problem_id, write_results


def prompt(text="?", answer="42", place="f.jsonl:1"):
    return Prompt(text=text, answer=answer, ids=np.ones(1, np.int32), place=place, source="f", verifier="robust")


def answers(*given, truth="42"):
    """A response that states each; None states nothing."""
    return [
        Answer(
            text=f"Answer: {each}",
            tokens=10 + at,
            truncated=each is None,
            correct=each == truth,
            extracted=each,
            error=None,
        )
        for at, each in enumerate(given)
    ]


PROMPTS = [prompt("one"), prompt("two"), prompt("three"), prompt("four")]
PROBLEMS = [
    answers("42", "42", "41", None),
    answers("1/2", "0.5", "42", "7"),  # two ways of writing one wrong answer outvote 42
    answers("1", "2", "3", None),
    answers("42", "1", "42", "1"),  # a tie
]


def test_figures_by_hand():
    found = figures(PROBLEMS)
    value = {name: figure["value"] for name, figure in found["figures"].items()}
    assert value["avg@4"] == pytest.approx((2 / 4 + 1 / 4 + 0 + 2 / 4) / 4)
    assert value["pass@1"] == pytest.approx(value["avg@4"])
    assert value["pass@2"] == pytest.approx((5 / 6 + 3 / 6 + 0 + 5 / 6) / 4)
    assert value["pass@4"] == pytest.approx(3 / 4)
    assert value["cons@4"] == pytest.approx((1 + 0 + 0 + 0.5) / 4)
    assert all(figure["low"] <= figure["value"] <= figure["high"] for figure in found["figures"].values())
    assert (found["problems"], found["samples"]) == (4, 4)
    assert found["mean_tokens"] == pytest.approx(11.5)
    assert found["truncated"] == found["without_answer"] == pytest.approx(2 / 16)


def test_files_hold_every_problem_and_the_figures(tmp_path):
    result = write_results(tmp_path / "v3", PROMPTS, {"sampled": PROBLEMS}, {"rollout_step": 3})
    lines = [json.loads(line) for line in (tmp_path / "v3" / "problems.jsonl").read_text().splitlines()]
    assert [line["problem"] for line in lines] == [problem_id(each) for each in PROMPTS]
    assert lines[0]["correct"] == [True, True, False, False]
    assert lines[1]["extracted"] == ["1/2", "0.5", "42", "7"]
    assert json.loads((tmp_path / "v3" / "result.json").read_text()) == result
    assert result["rollout_step"] == 3


def test_a_problem_is_named_by_what_it_says():
    assert problem_id(prompt(place="a:1")) == problem_id(prompt(place="b:2"))
    assert problem_id(prompt(answer="41")) != problem_id(prompt())
    assert problem_id(prompt(text="!")) != problem_id(prompt())
