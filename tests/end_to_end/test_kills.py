"""Law 4 under murder: whatever is killed, and whenever, the run ends as the one that nobody disturbed.

Kills of the coordinator are resumed by hand, as a batch system does; the run survives the others by itself.
"""

import random
import shutil
from pathlib import Path

import pytest

from megatron_dapo.cli.exit_codes import ExitCode
from megatron_dapo.monitor.writer import read_metrics
from megatron_dapo.storage.ledger import Event, effective_events, read_ledger
from tests.end_to_end.test_async import check_async_ledger
from tests.end_to_end.test_quickstart import SMALL, fates, weights
from tests.killer import COORDINATOR, MARKS
from tests.ledger_check import check_ledger
from tests.processes import ROOT, Running

VICTIMS = ("coordinator", "trainer", "server", "reward")
EVENTS = (Event.DISPATCHED, Event.FINISHED, Event.FILTERED, Event.CARRIED, Event.TRAINED, Event.CHECKPOINT)
COUNTS = {Event.CHECKPOINT: 2, Event.CARRIED: 3, Event.FILTERED: 4, Event.EXPIRED: 1}
"""How many of the rare events come before the kill; 11 of the others: in the second step."""
ENDED = (*COORDINATOR, "raylet", "agent", "environment")
"""Who takes the run with it: Ray ends the process that started it with its raylet, and the raylet with its agents."""

EPISODES = (
    "data.environment=tests.end_to_end.own_environment:again",
    "rollout.max_turns=2",
    "rollout.max_observation_tokens=24",
    "rollout.max_new_tokens=40",
    "algorithm.overlong.buffer=8",
    "algorithm.turn_rewards=true",
)

TIMES = 28
LIVES = 6

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    finished = Running(*arguments(run_dir), log=run_dir.parent / "out.txt").finish(300)
    assert finished.code == ExitCode.FINISHED, finished.output
    return run_dir


def arguments(run_dir: Path, *more: str) -> list[str]:
    return ["train", str(ROOT / "examples" / "quickstart" / "dapo.yaml"), f"run.dir={run_dir}", *SMALL, *more]


def live_through(run_dir: Path, victim: str, event: str, count: float, *more: str) -> str:
    """Run with one murder in the first life, resumed until it is done. Returns the output of all lives."""
    log = run_dir.parent / "out.txt"
    command = (victim, event, f"{count:g}", *arguments(run_dir, *more))
    first = Running(*command, log=log, module="tests.killer").finish(600)
    output = first.output
    assert first.left_behind == (), f"{first.left_behind}\n{output}"
    code = first.code
    for _ in range(LIVES):
        if code == ExitCode.FINISHED:
            break
        assert victim in ENDED, f"the run did not survive the death of its {victim}:\n{output}"
        again = Running(*arguments(run_dir, *more, "run.resume=true"), log=log).finish(600)
        code, output = again.code, output + again.output
    assert code == ExitCode.FINISHED, output
    return output


def check_killed(victim: str, output: str) -> None:
    """Of a kill at an event: it took place."""
    assert ("resuming after rollout step" if victim in COORDINATOR else f"killed {victim}") in output, output


def check_equal(run_dir: Path, undisturbed: Path, output: str) -> None:
    events = read_ledger(run_dir / "ledger.jsonl")
    check_ledger(events)
    trained = [event["prompt"] for event in effective_events(events) if event["event"] == Event.TRAINED]
    assert len(trained) == len(set(trained))
    assert fates(run_dir) == fates(undisturbed), output
    assert weights(run_dir / "model") == weights(undisturbed / "model"), output
    shutil.rmtree(run_dir)


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("victim", VICTIMS)
def test_a_kill_at_an_event_changes_nothing(undisturbed, tmp_path, victim, event):
    output = live_through(tmp_path / "run", victim, event, COUNTS.get(event, 11))
    check_killed(victim, output)
    check_equal(tmp_path / "run", undisturbed, output)


@pytest.mark.parametrize("victim", [*COORDINATOR, *MARKS])
def test_every_kind_of_process_may_be_killed_after_the_first_step(undisturbed, tmp_path, victim):
    """One kill a run, while the second step's responses are written."""
    more = ["rollout.client_processes=1"] if victim == "client" else []
    output = live_through(tmp_path / "run", victim, Event.FINISHED, 11, *more)
    check_killed(victim, output)
    check_equal(tmp_path / "run", undisturbed, output)


@pytest.fixture(scope="module")
def undisturbed_episodes(tmp_path_factory) -> Path:
    run_dir = tmp_path_factory.mktemp("episodes") / "run"
    finished = Running(*arguments(run_dir, *EPISODES), log=run_dir.parent / "out.txt").finish(300)
    assert finished.code == ExitCode.FINISHED, finished.output
    assert '"earlier"' in (run_dir / "samples.jsonl").read_text(), "no episode had a second turn"
    return run_dir


@pytest.mark.parametrize(
    ("victim", "count", "processes"),
    [("coordinator", 4, 0), ("coordinator", 11, 0), ("server", 11, 0), ("coordinator", 11, 2), ("client", 11, 2)],
)
def test_a_kill_changes_nothing_of_episodes(undisturbed_episodes, tmp_path, victim, count, processes):
    """Turns are drawn by seeds of their own, and the environment is a function of the conversation; who plays them is
    no matter."""
    clients = f"rollout.client_processes={processes}"
    output = live_through(tmp_path / "run", victim, Event.FINISHED, count, *EPISODES, clients)
    check_killed(victim, output)
    check_equal(tmp_path / "run", undisturbed_episodes, output)


def test_a_rank_that_is_stopped_is_named(tmp_path):
    """The other rank still waits for it when the coordinator looks, however late that is."""
    overrides = ("run.rollout_steps=50", "run.step_deadline_s=20")
    command = arguments(tmp_path / "run", *overrides)
    running = Running(*command, log=tmp_path / "out.txt", module="tests.end_to_end.late_look")
    running.wait_for(" 1/50", 300)
    ranks = [process for process in running.marked() if " ".join(process.cmdline()).startswith("ray::TrainerRank")]
    (second,) = (rank for rank in ranks if any("trainer-rank1" in file.path for file in rank.open_files()))
    second.suspend()
    finished = running.finish(200)
    assert finished.code == ExitCode.STALLED, finished.output
    assert f"\n  rank 1: stopped (process {second.pid} on " in finished.output
    assert "\n  rank 0: waits for other ranks in " in finished.output
    assert finished.left_behind == ()


@pytest.mark.parametrize("event", [*EVENTS, Event.EXPIRED])
@pytest.mark.parametrize("victim", VICTIMS)
def test_a_kill_in_async_mode_loses_nothing_and_trains_nothing_twice(tmp_path, victim, event):
    """Which weights write a token depends on time there, so weights differ; the order of prompts does not."""
    # So many prompts are sent at first that some are too old when their turn comes.
    more = ("run.mode=async", "run.rollout_steps=4", "algorithm.dynamic_sampling.initial_pass_rate=0.25")
    output = live_through(tmp_path / "run", victim, event, COUNTS.get(event, 11), *more)
    check_async_ledger(tmp_path / "run", prompts=4 * 6)
    check_killed(victim, output)


@pytest.mark.parametrize("event", [Event.FINISHED, Event.CARRIED, Event.TRAINED, Event.CHECKPOINT])
@pytest.mark.parametrize("victim", ["coordinator", "trainer", "server"])
def test_a_kill_while_a_surplus_goes_on_loses_nothing_and_trains_nothing_twice(tmp_path, victim, event):
    """`sync` that carries: servers write while the actor trains and over a publish."""
    more = ("rollout.deterministic=false", "rollout.stream_every=8", "algorithm.dynamic_sampling.surplus=4")
    output = live_through(tmp_path / "run", victim, event, COUNTS.get(event, 11), *more, "run.rollout_steps=4")
    check_killed(victim, output)
    steps = read_metrics(tmp_path / "run")
    assert sum(step["sampling/in_flight"] for step in steps[:-1]) > 0, "nothing went on: the test shows nothing"
    check_async_ledger(tmp_path / "run", prompts=4 * 6, unfinished=steps[-1]["sampling/in_flight"])


@pytest.mark.parametrize("number", range(TIMES))
def test_a_kill_at_a_random_moment_changes_nothing(undisturbed, tmp_path, number):
    draw = random.Random(number)
    victim, moment = VICTIMS[number % len(VICTIMS)], draw.uniform(0.0, 12.0)
    output = live_through(tmp_path / "run", victim, "after", moment)
    check_equal(tmp_path / "run", undisturbed, f"{victim} after {moment:.2f} s\n{output}")


@pytest.mark.parametrize("age_s", [0.0, 3.0, 7.0])
@pytest.mark.parametrize("victim", VICTIMS)
def test_a_kill_while_the_run_starts_changes_nothing(undisturbed, tmp_path, victim, age_s):
    output = live_through(tmp_path / "run", victim, "born", age_s)
    check_equal(tmp_path / "run", undisturbed, output)
    if victim != "coordinator":  # its second start may find nothing to resume
        check_killed(victim, output)


SHIPPED = ("actor.layout.tensor=1", "actor.layout.data=2", "rollout.servers=2")
STAGES = ("actor.layout.tensor=1", "actor.layout.pipeline=2", "rollout.weight_sync=distributed", "rollout.servers=2")


@pytest.fixture(scope="module", params=[SHIPPED, STAGES], ids=["shipped", "stages"])
def undisturbed_in_layout(request, tmp_path_factory) -> tuple[Path, tuple[str, ...]]:
    run_dir = tmp_path_factory.mktemp("layout") / "run"
    finished = Running(*arguments(run_dir, *request.param), log=run_dir.parent / "out.txt").finish(300)
    assert finished.code == ExitCode.FINISHED, finished.output
    return run_dir, request.param


@pytest.mark.parametrize(
    ("victim", "count"), [("coordinator", 4), ("coordinator", 11), ("trainer", 11), ("server", 11)]
)
def test_a_kill_changes_nothing_in_other_layouts(undisturbed_in_layout, tmp_path, victim, count):
    """The quickstart's own: data parallel, with two servers; a prompt's responses may come from the other one after a
    loss. And two pipeline stages, each of which sends its weights to both servers."""
    undisturbed, layout = undisturbed_in_layout
    output = live_through(tmp_path / "run", victim, Event.FINISHED, count, *layout)
    check_killed(victim, output)
    check_equal(tmp_path / "run", undisturbed, output)
