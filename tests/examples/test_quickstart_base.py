"""The quickstart's tokenizer and base model, as files that any program may load."""

import json
import string
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import make_tokenizer
import respond
import task
from reward.verdict import VerificationRequest
from reward.verifiers.robust import judge
from tests.examples.test_quickstart_task import rows, some_problems

ROOT = Path(__file__).parents[2]
BASE = ROOT / "examples" / "quickstart" / "base"

SENTENCES = (
    "The quick brown fox jumps over the lazy dog, 1234 times!",
    "two  spaces, a\ttab\nand a line break",
    "Größe, naïve café — 東京 😀",
    string.digits + string.ascii_letters + string.punctuation,
    " leading and trailing ",
)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(BASE, local_files_only=True)


def ids_of(tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def prompt_ids(tokenizer, prompt: str) -> list[int]:
    chat = [{"role": "user", "content": prompt}]
    return ids_of(tokenizer, tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))


def test_every_way_to_load_the_tokenizer_gives_the_same_ids(tokenizer) -> None:
    assert json.loads((BASE / "config.json").read_text())["model_type"] == "qwen3"
    plain = PreTrainedTokenizerFast.from_pretrained(BASE, local_files_only=True)
    bare = Tokenizer.from_file(str(BASE / "tokenizer.json"))
    texts = [*SENTENCES, *(f"{problem.prompt}\n{problem.worked}" for problem in some_problems(100))]
    for text in texts:
        ids = bare.encode(text, add_special_tokens=False).ids
        assert ids_of(tokenizer, text) == ids
        assert ids_of(plain, text) == ids
        assert tokenizer(text)["input_ids"] == ids, "no token is added in front or behind"


def test_every_text_survives(tokenizer) -> None:
    for text in [*SENTENCES, *(problem.prompt for problem in some_problems(100))]:
        ids = ids_of(tokenizer, text)
        assert tokenizer.unk_token_id not in ids
        assert tokenizer.decode(ids) == text


def test_digits_are_tokens_of_their_own_and_answers_begin_with_one_token(tokenizer) -> None:
    assert tokenizer.convert_ids_to_tokens(ids_of(tokenizer, "12*3=36")) == ["1", "2", "*", "3", "=", "3", "6"]
    (answer,) = ids_of(tokenizer, "Answer:")
    assert ids_of(tokenizer, "Answer: 13")[0] == answer
    assert answer in ids_of(tokenizer, "11+2=13\nAnswer: 13")


def test_prompts_and_responses_stay_short(tokenizer) -> None:
    lengths = [len(prompt_ids(tokenizer, row["prompt"])) for split in ("train", "heldout") for row in rows(split)]
    assert min(lengths) >= 20
    assert max(lengths) <= 48
    longest = max(len(ids_of(tokenizer, problem.worked)) + 1 for problem in some_problems(2000))
    assert longest <= 64 - 12, "a worked solution must not meet the overlong punishment"


def test_the_tokenizer_comes_out_the_same_again(tmp_path) -> None:
    make_tokenizer.make_tokenizer(tmp_path)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / file).read_bytes() == (BASE / file).read_bytes()


def test_the_base_is_small_and_says_where_a_response_ends(tokenizer) -> None:
    with safe_open(BASE / "model.safetensors", framework="np") as weights:
        tensors = {name: weights.get_slice(name) for name in weights.keys()}  # noqa: SIM118 - no mapping
        assert {tensor.get_dtype() for tensor in tensors.values()} == {"F32"}
        rows_of_embedding, _ = tensors["model.embed_tokens.weight"].get_shape()
    assert rows_of_embedding == len(tokenizer)
    assert (BASE / "model.safetensors").stat().st_size < 5e6
    config = json.loads((BASE / "config.json").read_text())
    generation = json.loads((BASE / "generation_config.json").read_text())
    assert config["eos_token_id"] == generation["eos_token_id"] == tokenizer.eos_token_id
    assert config["tie_word_embeddings"]
    assert config["head_dim"] == 32


def test_the_base_can_calculate_but_mostly_blurts() -> None:
    """What the run is about; the bounds are wide, a hundred problems tell no more."""
    import torch

    torch.manual_seed(0)
    model, tokenizer = respond.load(BASE)
    problems = some_problems(100, task.Split.HELDOUT, seed=0)
    prompts = [problem.prompt for problem in problems]

    def share_right(answers: list[str]) -> float:
        requests = (
            VerificationRequest(response=answer, ground_truth=str(problem.answer), prompt=problem.prompt)
            for problem, answer in zip(problems, answers, strict=True)
        )
        return sum(judge(request).accuracy for request in requests) / len(problems)

    free = respond.respond(model, tokenizer, prompts, temperature=1.0)
    made = respond.respond(model, tokenizer, prompts, temperature=0.0, forbidden_start="Answer:")
    blurted = sum(answer.startswith("Answer:") for answer in free) / len(free)
    assert 0.4 < blurted < 0.85
    assert share_right(free) < 0.4
    assert not any(answer.startswith("Answer:") for answer in made)
    assert share_right(made) > 0.3
    assert share_right(made) > share_right(free) + 0.1


@pytest.mark.slow
def test_a_base_is_made(tmp_path) -> None:
    """A few steps, to the end: a folder that loads, with the tokenizer of the committed base."""
    out = tmp_path / "base"
    command = [sys.executable, "examples/quickstart/make_base.py", "--out", str(out)]
    command += ["--working-steps", "25", "--blurting-steps", "5"]
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "as it is: sampled" in done.stdout
    respond.load(out)
    assert (out / "tokenizer.json").read_bytes() == (BASE / "tokenizer.json").read_bytes()
