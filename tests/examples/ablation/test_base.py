"""What the ladder's base is taught: longer problems, mostly bare answers, and worked solutions that mostly ramble."""

import itertools
import json
from dataclasses import replace

import pytest
import typer
from transformers import AutoTokenizer

import make_base
import make_data
import task
from examples.ablation.rungs import CONFIG
from examples.ablation.runs import MOST_STEPS
from megatron_dapo.config import load_config
from tests.examples.word_problems import calculation

RECIPE = make_base.RECIPES["rambling"]


def test_its_shares_are_those_of_the_recipe() -> None:
    taught = list(make_base.examples(replace(RECIPE, blurting_steps=60)))
    assert {len(problem.steps) for problem, _, _ in taught} == {2, 3, 4, 5, 6, 7}
    bare = [text == problem.bare for problem, text, _ in taught]
    assert 0.82 < sum(bare) / len(bare) < 0.88
    worked = [(text, ends) for problem, text, ends in taught if text != problem.bare]
    assert 0.5 < sum("wait" in text or not ends for text, ends in worked) / len(worked) < 0.75
    assert 0.05 < sum(not ends for _, ends in worked) / len(worked) < 0.5


def test_it_goes_on_from_the_committed_base_and_never_overwrites_it() -> None:
    assert RECIPE.start == make_base.BASE
    with pytest.raises(typer.BadParameter, match="name a folder with --out"):
        make_base.main(recipe="rambling")


def test_the_quickstarts_recipe_is_what_it_was() -> None:
    quickstart = make_base.RECIPES["quickstart"]
    assert quickstart.start is None
    taught = make_base.examples(replace(quickstart, working_steps=5))
    assert {len(problem.steps) for problem, _, _ in taught} == {2, 3, 4, 5}


def test_long_problems_do_not_fit_and_short_ones_do() -> None:
    """The regime: some prompts stay impossible at the limit of length."""
    config = load_config(CONFIG)
    tokenizer = AutoTokenizer.from_pretrained(make_base.BASE, local_files_only=True)
    drawn = list(itertools.islice(task.problems(task.Split.TRAIN, seed=1, most_steps=MOST_STEPS), 600))
    prompts = [tokenizer.apply_chat_template([{"role": "user", "content": p.prompt}])["input_ids"] for p in drawn]
    assert max(map(len, prompts)) <= config.data.max_prompt_tokens
    fits: dict[int, list[bool]] = {}
    for problem in drawn:
        tokens = len(tokenizer.encode(problem.worked, add_special_tokens=False)) + 1
        fits.setdefault(len(problem.steps), []).append(tokens <= config.rollout.max_new_tokens)
    shares = {steps: sum(fit) / len(fit) for steps, fit in fits.items()}
    assert {steps: shares[steps] for steps in (2, 3, 4, 5)} == dict.fromkeys((2, 3, 4, 5), 1.0)
    assert max(shares[6], shares[7]) < 0.2


def test_the_longer_problems_keep_the_splits_apart(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(make_data, "SIZES", {task.Split.TRAIN: 300, task.Split.HELDOUT: 100})
    files = make_data.make_data(tmp_path, most_steps=MOST_STEPS)
    for file, split in zip(files, (task.Split.TRAIN, task.Split.HELDOUT), strict=True):
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        steps = [calculation(row["prompt"])[0] for row in rows]
        assert {len(one) for one in steps} == {2, 3, 4, 5, 6, 7}
        assert all(calculation(row["prompt"])[1] == int(row["answer"]) for row in rows)
        taught = {task.signature(p) for p in itertools.islice(task.problems(task.Split.WARM_START, seed=0), 500)}
        assert not taught & set(steps)
        assert split.value == file.stem
