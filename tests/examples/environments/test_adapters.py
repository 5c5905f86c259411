"""Environments that others wrote, stepped through by the adapters with scripted answers.

Each part runs only where its package is installed: gymnasium (the extra `environments`), openenv-core, or verifiers and
textarena; the last three in a virtual environment of their own.
"""

import asyncio
import dataclasses
import importlib.util
import itertools
import json
import random
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.environments.teach import Conversation, teach
from examples.environments.wordlevel import make_tokenizer
from megatron_dapo.cli.exit_codes import ExitCode
from reward.config import RewardConfig
from reward.environment import End, Environment, Episode, Observation, Stepped, Turn, ask, load_environment
from reward.pool.pool import RewardPool
from reward.verdict import VerifierError
from tests.processes import ROOT, Running

VERIFIERS = all(importlib.util.find_spec(name) for name in ("verifiers", "textarena"))


def steps(environment: Environment, row: dict[str, str], responses: list[str], *, turns: int = 20) -> list:
    """Every outcome until the end, each state through JSON as a checkpoint holds it."""
    prompt = row["prompt"] if isinstance(row["prompt"], str) else "\n".join(each["content"] for each in row["prompt"])
    said: tuple[Turn, ...] = ()
    outcomes, state = [], None
    for place, response in enumerate(responses, 1):
        episode = Episode(prompt, row["answer"], (*said, Turn(response)), state=state, last=place == turns)
        outcomes.append(ask(environment, episode))
        if isinstance(outcomes[-1], End):
            break
        said, state = (*said, Turn(response, outcomes[-1].text)), json.loads(json.dumps(outcomes[-1].state))
    return outcomes


def in_a_new_process(name: str, episode: Episode) -> str:
    """The outcome of one step as text, in a process that knows nothing of the turns before."""
    code = (
        "import json, sys\nfrom reward.environment import *\n"
        "given = json.load(sys.stdin)\nturns = tuple(Turn(**turn) for turn in given.pop('turns'))\n"
        f"print(ask(load_environment({name!r}), Episode(turns=turns, **given)))"
    )
    given = json.dumps(dataclasses.asdict(episode))
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, input=given, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


@pytest.mark.skipif(not importlib.util.find_spec("gymnasium"), reason="gymnasium is not installed")
class TestGymnasium:
    """Farama's frozen lake: S to G, not over H."""

    NAME = "examples.environments.reset_step:gymnasium"
    WAY = ("down", "down", "right", "right", "down", "right")

    def row(self, **changed: object) -> dict[str, str]:
        from examples.environments.reset_step import Gymnasium, World, row

        arguments = {"is_slippery": False, "render_mode": "ansi"}
        world = World(environment="FrozenLake-v1", seed=3, arguments=arguments, names=("left", "down", "right", "up"))
        return row(dataclasses.replace(world, **changed), "Reach G.", Gymnasium)

    def test_the_way_to_the_goal_is_right(self):
        row = self.row()
        *seen, end = steps(load_environment(self.NAME), row, list(self.WAY))
        assert end == End(accuracy=True, extracted="1", rule="done")
        assert row["prompt"].startswith("Reach G.\n\n[S]FFF\n")
        assert [outcome.text.strip().splitlines() for outcome in seen][-1] == [
            "(Down)",
            "SFFF",
            "FHFH",
            "FFFH",
            "HF[F]G",
        ]

    def test_a_hole_is_wrong_and_a_word_that_is_no_action_moves_nothing(self):
        right, fly, end = steps(load_environment(self.NAME), self.row(), ["right", "I fly\nfly", "down"])
        assert (right.text.strip().splitlines()[1], fly.text) == ("S[F]FF", "no such action")
        assert (end.accuracy, end.rule) == (False, "done")

    def test_turns_that_are_used_up_are_wrong(self):
        *_, end = steps(load_environment(self.NAME), self.row(), ["left"] * 9, turns=3)
        assert (end.accuracy, end.rule) == (False, "not-done")

    def test_a_new_process_goes_on_in_the_middle_even_on_slippery_ice(self):
        row = self.row(arguments={"is_slippery": True})
        environment = load_environment(self.NAME)
        outcomes = steps(environment, row, ["up", "up", "up"])
        assert all(isinstance(outcome, Observation) for outcome in outcomes)
        turns = tuple(Turn(said, seen.text) for said, seen in zip(("up", "up"), outcomes[:2], strict=True))
        episode = Episode(row["prompt"], row["answer"], (*turns, Turn("up")), state=outcomes[1].state)
        assert in_a_new_process(self.NAME, episode) == str(outcomes[2])

    def test_a_turn_that_failed_is_not_played_again(self):
        row, environment = self.row(), load_environment(self.NAME)
        down, right = steps(environment, row, ["down", "right"])
        for failed in (
            (Turn("right", "error: timeout", failed=True), Turn("down", down.text)),
            (Turn("down", down.text),),
        ):
            turns = (*failed, Turn("right", "error: timeout", failed=True), Turn("right"))
            assert ask(environment, Episode(row["prompt"], row["answer"], turns, state=down.state)) == right

    @pytest.mark.parametrize(
        ("written", "taken"), [("2", True), ("4", False), ("-1", False), ("1.5", False), ("x", False), ("[1]", False)]
    )
    def test_actions_in_json(self, written, taken):
        (outcome,) = steps(load_environment(self.NAME), self.row(names=()), [written])
        assert (outcome.text != "no such action") is taken

    def test_what_does_not_repeat_itself_stops_the_run(self):
        row, environment = self.row(), load_environment(self.NAME)
        (first,) = steps(environment, row, ["right"])
        for turns, state in (((Turn("left"), Turn("right")), first.state), ((*map(Turn, self.WAY), Turn("up")), None)):
            with pytest.raises(VerifierError, match="does not repeat itself"):
                ask(environment, Episode(row["prompt"], row["answer"], turns, state=state))
        other = json.dumps(json.loads(row["answer"]) | {"arguments": {"map_name": "8x8", "render_mode": "ansi"}})
        with pytest.raises(VerifierError, match="no longer begins as in the row"):
            ask(environment, Episode(row["prompt"], other, (Turn("right"),)))

    def test_the_reward_pool_runs_it_under_its_default_limits(self):
        row = self.row()

        async def two_steps() -> list[Stepped]:
            pool = RewardPool(RewardConfig(workers=1))
            try:
                episode = Episode(row["prompt"], row["answer"], (Turn("down"),))
                return [await pool.step(self.NAME, episode) for _ in range(2)]
            finally:
                pool.close()

        first, second = asyncio.run(asyncio.wait_for(two_steps(), 120))
        assert (first.error, first.unjudged) == (None, False)
        assert first.outcome == second.outcome == steps(load_environment(self.NAME), row, ["down"])[0]

    @pytest.mark.parametrize("truth", ["7", "{}", '{"environment": "os:x", "seed": 1}'])
    def test_a_ground_truth_of_another_form_stops_the_run(self, truth):
        with pytest.raises(VerifierError):
            ask(load_environment(self.NAME), Episode("", truth, (Turn("1"),)))


def train_two_steps(folder: Path, rows: Path, environment: str, *words: str) -> None:
    """Two rollout steps like the guessing game's, all groups with right and wrong episodes of several turns."""
    run = folder / "run"
    finished = Running(
        "train",
        "examples/environments/guess.yaml",
        f"run.dir={run}",
        f"data.path={rows}",
        f"data.environment={environment}",
        "data.max_prompt_tokens=24",
        "evaluation.path=null",
        "run.rollout_steps=2",
        "algorithm.prompts_per_step=8",
        "algorithm.mini_batch_responses=32",
        "rollout.max_new_tokens=12",
        *words,
        log=folder / "log.txt",
    ).finish(500)
    assert finished.code == ExitCode.FINISHED, finished.output
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [(step["sampling/kept"], step["verdict_errors"], step["episode/errors"]) for step in steps] == [
        (8, 0, 0)
    ] * 2
    assert all(step["grad_norm"] > 0 and step["episode/turns"] > 1 for step in steps)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not importlib.util.find_spec("gymnasium"), reason="gymnasium is not installed")
def test_gymnasiums_blackjack_trains(tmp_path):
    """With the guessing game's base, whose 1 is to stick and whose 2 is to hit."""
    rows = tmp_path / "rows.jsonl"
    made = [sys.executable, "-m", "examples.environments.reset_step", "Blackjack-v1", "--names", "1,2"]
    with rows.open("w") as file:
        subprocess.run([*made, "--instruction", "Guess 1-15"], cwd=ROOT, stdout=file, check=True)
    train_two_steps(tmp_path, rows, "examples.environments.reset_step:gymnasium")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that answers whatever it is told with one of [1] to [20]."""
    folder, draw = tmp_path_factory.mktemp("models") / "base", random.Random(0)
    numbers = [str(number) for number in range(1, 21)]
    make_tokenizer(folder, ["Guess", "The", "target", "number", "is", "higher", "lower", *numbers], context=768)

    def talks() -> Iterator[Conversation]:
        while True:
            heard = ["Guess.", *(f"The target number is {draw.choice(('higher', 'lower'))}." for _ in range(3))]
            pairs = [(("user", text), ("assistant", f"[{draw.choice(numbers)}]")) for text in heard]
            yield list(itertools.chain(*pairs))

    teach(folder, talks(), steps=150)
    return folder


LONG = ("model.context_length=768", "rollout.max_new_tokens=24", "rollout.max_observation_tokens=200")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not VERIFIERS, reason="verifiers and textarena are not installed")
def test_verifiers_textarena_trains(tmp_path, base):
    """TextArena's number between 1 and 20."""
    tasks = [{"prompt": "Guess.", "info": {"game": "GuessTheNumber-v0", "seed": seed}} for seed in range(40)]
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": "Guess.", "answer": json.dumps(task)}) + "\n" for task in tasks))
    train_two_steps(tmp_path, rows, "tests.examples.environments.verifiers_games:play", f"model.path={base}", *LONG)


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder: Path = tmp_path_factory.mktemp("openenv")
    subprocess.run([sys.executable, "-m", "openenv.cli", "init", "echo_env"], cwd=folder, check=True, timeout=120)
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    command = [sys.executable, "-m", "uvicorn", "echo_env.server.app:app", "--port", str(port)]
    server = subprocess.Popen(command, cwd=folder)
    try:
        wait_for(f"http://127.0.0.1:{port}/health", server)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


@pytest.mark.skipif(not importlib.util.find_spec("openenv"), reason="openenv-core is not installed")
class TestOpenEnv:
    """The environment that `openenv init` writes: it echoes, a letter is worth 0.1, and it never ends by itself."""

    NAME = "examples.environments.from_openenv:play"

    def row(self, address: str) -> dict[str, str]:
        from examples.environments.from_openenv import row
        from examples.environments.reset_step import World

        return row(World(environment=address, seed=0, success=2.0), "Say something long.")

    def test_right_and_wrong_by_the_sum_of_the_rewards(self, address):
        environment = load_environment(self.NAME)
        for said, right in (("a long sentence", True), ("short", False)):
            seen, end = steps(environment, self.row(address), [said, said], turns=2)
            assert json.loads(seen.text)["echoed_message"] == said
            assert seen.reward == pytest.approx(0.1 * len(said))
            assert (end.accuracy, end.rule) == (right, "not-done")

    def test_a_new_process_goes_on_in_the_middle(self, address):
        row, environment = self.row(address), load_environment(self.NAME)
        first, second = steps(environment, row, ["one", "two"])
        turns = (Turn("one", first.text), Turn("two"))
        episode = Episode(row["prompt"], row["answer"], turns, state=first.state)
        assert in_a_new_process(self.NAME, episode) == str(second)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not importlib.util.find_spec("openenv"), reason="openenv-core is not installed")
def test_openenvs_echo_trains(tmp_path, base, address):
    """Four answers of three or four characters each are right from 14 characters on."""
    from examples.environments.from_openenv import row
    from examples.environments.reset_step import World

    rows = tmp_path / "rows.jsonl"
    worlds = [row(World(environment=address, seed=seed, success=1.4), "Guess.") for seed in range(40)]
    rows.write_text("".join(json.dumps(world) + "\n" for world in worlds))
    words = (f"model.path={base}", *LONG, "data.max_prompt_tokens=96", "reward.environment_workers=1")
    train_two_steps(tmp_path, rows, "examples.environments.from_openenv:play", *words)


def wait_for(url: str, server: subprocess.Popen) -> None:
    """Until the server answers; fails after a minute, or when it has ended."""
    end = time.monotonic() + 60
    while True:
        assert server.poll() is None, "the server has ended"
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except OSError:
            assert time.monotonic() < end, "the server does not answer"
            time.sleep(0.3)


GUESS = {"prompt": "Guess.", "info": {"game": "GuessTheNumber-v0", "seed": 3}}
ROW = {"prompt": "Guess.", "answer": json.dumps(GUESS)}


@pytest.mark.skipif(not VERIFIERS, reason="verifiers and textarena are not installed")
class TestVerifiers:
    """The package's own TextArena environment, with TextArena's guessing game: no word lists are fetched."""

    NAME = "tests.examples.environments.verifiers_games:play"

    def goal(self) -> int:
        """The number, found by asking."""
        return next(n for n in range(1, 21) if steps(load_environment(self.NAME), ROW, [f"[{n}]"])[0].__class__ is End)

    def test_the_right_number_is_right(self):
        goal = self.goal()
        other = goal - 1 if goal > 1 else goal + 1
        wrong, end = steps(load_environment(self.NAME), ROW, [f"[{other}]", f"I say [{goal}]"])
        assert ("higher" if other < goal else "lower") in wrong.text
        assert end == End(accuracy=True, extracted="1", rule="user_closed")

    def test_turns_that_are_used_up_are_wrong_with_what_the_environment_gives(self):
        goal = self.goal()
        others = [f"[{n}]" for n in range(1, 21) if n != goal]
        *_, end = steps(load_environment(self.NAME), ROW, others, turns=3)
        assert (end.accuracy, end.rule) == (False, "max_turns")

    def test_a_new_process_goes_on_in_the_middle(self):
        goal = self.goal()
        others = [f"[{n}]" for n in range(1, 21) if n != goal][:2]
        first, second = steps(load_environment(self.NAME), ROW, others)
        turns = (Turn(others[0], first.text), Turn(others[1]))
        episode = Episode("Guess.", ROW["answer"], turns, state=first.state)
        assert in_a_new_process(self.NAME, episode) == str(second)
        with pytest.raises(VerifierError, match="does not repeat itself"):
            ask(load_environment(self.NAME), dataclasses.replace(episode, turns=(Turn("[0]"), turns[1])))

    def test_a_turn_that_failed_is_not_played_again(self):
        goal = self.goal()
        others = [f"[{n}]" for n in range(1, 21) if n != goal][:2]
        first, second = steps(load_environment(self.NAME), ROW, others)
        turns = (Turn(others[0], first.text), Turn("[0]", "error: timeout", failed=True), Turn(others[1]))
        assert ask(load_environment(self.NAME), Episode("Guess.", ROW["answer"], turns, state=first.state)) == second

    def test_one_answer_is_scored_by_the_tasks_own_rewards(self):
        row = {"prompt": "2+2?", "answer": json.dumps({"prompt": "2+2?", "wanted": "4"})}
        environment = load_environment("tests.examples.environments.verifiers_games:sums")
        assert steps(environment, row, ["4"]) == [End(accuracy=True, extracted="1.5", rule="user_closed")]
        assert steps(environment, row, ["5"]) == [End(accuracy=False, extracted="0.5", rule="user_closed")]

    def test_what_the_adapter_cannot_run_is_refused_in_words(self):
        row = {"prompt": "2+2?", "answer": json.dumps({"prompt": "2+2?", "wanted": "4", "image": "python:3"})}
        with pytest.raises(VerifierError, match="needs a container"):
            steps(load_environment("tests.examples.environments.verifiers_games:sums"), row, ["4"])
        with pytest.raises(VerifierError, match="not the data of a TextArenaTask"):
            steps(load_environment(self.NAME), {"prompt": "", "answer": "7"}, ["4"])
