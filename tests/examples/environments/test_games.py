"""The two environments that are trained here: their rules, their data and their bases."""

import itertools
import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from examples.environments import make_calculator, make_guess
from examples.environments.calculator import END, calculate, result
from examples.environments.guess import TRIES, play
from examples.environments.teach import token_ids
from megatron_dapo.cli.exit_codes import ExitCode
from megatron_dapo.storage.ledger import read_ledger
from reward.environment import End, Environment, Episode, Observation, Turn, load_environment
from tests.ledger_check import check_ledger
from tests.processes import ROOT, Running

FOLDER = ROOT / "examples" / "environments"


def rows(name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (FOLDER / "data" / f"{name}.jsonl").read_text().splitlines()]


def last(environment: Environment, prompt: str, truth: str, responses: list[str]) -> object:
    """The outcome of the newest of these responses."""
    return environment(Episode(prompt, truth, tuple(map(Turn, responses))))


@pytest.mark.parametrize(
    ("guesses", "outcome"),
    [
        (["12"], Observation("higher")),
        (["12", "40"], Observation("lower")),
        (["x"], Observation("number?")),
        (["-25"], Observation("number?")),
        (["9" * 5000], Observation("number?")),
        (["12", " 25\n"], End(accuracy=True, extracted="25", rule="found")),
        (["1"] * TRIES, End(accuracy=False, extracted="1", rule="not-found")),
        ([*["1"] * (TRIES - 1), "25"], End(accuracy=True, extracted="25", rule="found")),
    ],
)
def test_guesses(guesses, outcome):
    assert last(load_environment("examples.environments.guess:play"), "Guess 10-40", "25", guesses) == outcome


def test_halving_always_finds_the_number():
    for least, most, goal in make_guess.games(held_out=True):
        guesses: list[str] = []
        while True:
            guesses.append(str((least + most) // 2))
            outcome = last(play, "", str(goal), guesses)
            if isinstance(outcome, End):
                break
            middle = int(guesses[-1])
            least, most = (middle + 1, most) if outcome.text == "higher" else (least, middle - 1)
        assert outcome.accuracy


@pytest.mark.parametrize(
    ("call", "value"),
    [
        ("27*348", "9396"),
        (" 5-12 ", "-7"),
        ("1+2+3", "error"),
        ("2**9", "error"),
        ("9" * 13 + "*2", "error"),
        ("", "error"),
        ("__import__('os')", "error"),
    ],
)
def test_calls(call, value):
    assert result(call) == value
    environment = load_environment("examples.environments.calculator:calculate")
    assert last(environment, "", "1", [f"<call>1+1{END}", f"so <call>{call}{END}"]) == Observation(value, role="tool")


@pytest.mark.parametrize("response", ["Answer: 8", f"<call>1+1{END} is 2", "<call>1+1", ""])
def test_a_response_without_a_call_at_its_end_goes_to_the_verifier(response):
    assert last(calculate, "", "8", [response]) is None


def test_a_teacher_who_calls_is_right_and_each_turn_is_what_the_environment_sees():
    for problem in itertools.islice(make_calculator.problems(5, held_out=True), 50):
        (_, prompt), *rest = make_calculator.solved(problem, bare=False)
        turns: list[Turn] = []
        for (_, said), (_, told) in zip(rest[:-1:2], rest[1::2], strict=True):
            assert calculate(Episode(prompt, "", (*turns, Turn(said)))) == Observation(told, role="tool")
            turns.append(Turn(said, told, role="tool"))
        assert rest[-1] == ("assistant", f"Answer: {problem.answer}")


def test_no_held_out_problem_is_trained_on_or_taught():
    for name in ("guess", "calculator"):
        trained, held_out = ({row["prompt"] for row in rows(f"{name}_{part}")} for part in ("train", "heldout"))
        made = make_guess if name == "guess" else make_calculator
        taught = {talk[0][1] for talk in itertools.islice(made.conversations(0, 1000), 2000)}
        assert held_out
        assert not held_out & (trained | taught), name


@pytest.mark.parametrize(("name", "made"), [("guess", make_guess), ("calculator", make_calculator)])
def test_the_files_come_out_the_same_again(name, made, tmp_path):
    for written in made.make_data(tmp_path):
        assert written.read_bytes() == (FOLDER / "data" / written.name).read_bytes(), name


@pytest.mark.parametrize("name", ["guess", "calculator"])
def test_the_tokenizer_keeps_every_text_and_the_template_only_appends(name: str):
    base = FOLDER / f"{name}_base"
    tokenizer = AutoTokenizer.from_pretrained(base, local_files_only=True)
    prompt = rows(f"{name}_train")[0]["prompt"]
    talk = [("user", prompt), ("assistant", "25"), ("user", "higher"), ("assistant", "30")]
    messages = [{"role": role, "content": text} for role, text in talk]
    texts = [tokenizer.apply_chat_template(messages[:count], tokenize=False) for count in range(1, 5)]
    assert all(longer.startswith(shorter) for shorter, longer in itertools.pairwise(texts))
    ids, said = token_ids(talk, tokenizer)
    assert tokenizer.decode(ids) == texts[-1]
    assert tokenizer.decode([token for token, drawn in zip(ids, said, strict=True) if drawn]) == "25</s>30</s>"
    assert tokenizer.unk_token_id not in ids
    assert Path(base, "model.safetensors").stat().st_size < 4 << 20


def test_the_end_of_a_call_is_one_token():
    tokenizer = AutoTokenizer.from_pretrained(FOLDER / "calculator_base", local_files_only=True)
    ids = tokenizer.encode(f"<call>1+2{END}3", add_special_tokens=False)
    assert tokenizer.convert_tokens_to_ids(END) in ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == f"<call>1+2{END}3"


SMALL = ("run.rollout_steps=2", "algorithm.prompts_per_step=8", "algorithm.mini_batch_responses=32")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["guess", "calculator"])
def test_each_example_trains(name, tmp_path):
    """Two rollout steps with real parts: episodes of several turns, right and wrong ones, and no environment fails."""
    words = ("train", str(FOLDER / f"{name}.yaml"), f"run.dir={tmp_path / 'run'}", *SMALL, "evaluation.limit=10")
    finished = Running(*words, "monitor.sample_responses=200", log=tmp_path / "log.txt").finish(500)
    assert finished.code == ExitCode.FINISHED, finished.output
    assert finished.left_behind == ()
    check_ledger(read_ledger(tmp_path / "run" / "ledger.jsonl"))
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [step["sampling/kept"] for step in steps] == [8, 8]
    assert all(step["verdict_errors"] == 0 and step["grad_norm"] > 0 for step in steps)
