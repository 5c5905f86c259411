"""Episodes of a three-line environment on the real parts: trained on, killed in the middle, and resumed."""

import json
from pathlib import Path

import numpy as np
import pytest

from megatron_dapo.cli.exit_codes import ExitCode
from megatron_dapo.data.tokenizer import load_text_tools
from megatron_dapo.experience.episodes import UNENDED, drawn_turns
from megatron_dapo.monitor.writer import read_metrics
from megatron_dapo.storage.group_files import load_groups
from megatron_dapo.storage.ledger import effective_events, read_ledger
from tests.end_to_end.test_quickstart import start
from tests.ledger_check import check_ledger
from tests.monitor.declared import check_declared
from tests.processes import ROOT

STEPS = 3
KEEPING = "tests.end_to_end.train_keeping_batches"
EPISODES = (
    "data.environment=tests.end_to_end.own_environment:again",
    "rollout.max_turns=2",
    "rollout.max_observation_tokens=24",
    "rollout.max_new_tokens=40",
    "algorithm.overlong.buffer=8",
    "algorithm.turn_rewards=true",
    "rollout.deterministic=false",
    "rollout.stream_every=8",
    "algorithm.dynamic_sampling.surplus=4",
    "algorithm.importance.mode=truncated",
    "evaluation.limit=8",
    "evaluation.greedy=false",
    "evaluation.forbidden_start=null",
    "run.export_at_end=false",
    "run.keep_checkpoints=9",
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module", params=[0, 2])
def resumed(request, tmp_path_factory) -> Path:
    """Played by the coordinator, and by two processes."""
    run_dir, clients = tmp_path_factory.mktemp("episodes") / "run", f"rollout.client_processes={request.param}"
    running = start(run_dir, *EPISODES, clients, module=KEEPING)
    running.wait_for(f"step 2/{STEPS}", 300)
    running.kill_all()
    running.finish(60)
    finished = start(run_dir, *EPISODES, clients, "run.resume=true", module=KEEPING).finish(400)
    assert finished.code == ExitCode.FINISHED, finished.output
    assert finished.left_behind == ()
    return run_dir


def test_no_prompt_is_lost_or_trained_twice(resumed):
    events = read_ledger(resumed / "ledger.jsonl")
    check_ledger(events)
    trained = [event["prompt"] for event in effective_events(events) if event["event"] == "trained"]
    assert trained == sorted(set(trained))
    assert len(trained) == 6 * STEPS


def test_batches_hold_episodes_as_they_were_drawn(resumed):
    text = load_text_tools(ROOT / "examples" / "quickstart" / "base")
    given = text.tokenizer.encode("\nAnswer: 0\n", add_special_tokens=False)
    several = 0
    for step in range(1, STEPS + 1):
        groups, _ = load_groups(resumed / "batches" / f"step_{step}", "batch")
        for response in (each for group in groups for each in group.responses):
            generation, turns = response.generation, drawn_turns(response.generation)
            assert len(turns) == 1 + len(response.earlier) == 1 + len(generation.given) <= 2
            assert generation.drawn == sum(map(len, turns)) <= 40
            for (first, tokens), turn in zip(generation.given, response.earlier, strict=True):
                assert generation.token_ids[first : first + tokens].tolist() == given
                assert (turn.observation, turn.reward, turn.error) == ("Answer: 0", -0.125, None)
            ended = response.accuracy or response.verdict.rule == UNENDED
            assert ended
            turn_rewards = -0.125 * (len(turns) - response.accuracy)
            assert response.reward_raw == (1.0 if response.accuracy else -1.0) + turn_rewards
            several += len(turns) > 1
    assert several > 0


def test_engine_and_trainer_agree_on_the_drawn_tokens_of_every_turn(resumed):
    steps = read_metrics(resumed)
    check_declared(name for step in steps for name in step)
    assert [step["rollout_step"] for step in steps] == [1, 2, 3]
    for step in steps:
        assert step.get("mismatch/max_abs", 0.0) < 1e-3
        assert 1 < step["episode/turns"] <= 2
        assert 0 < step["episode/observation_tokens"] <= 24
        assert step["episode/errors"] == 0
        assert np.isfinite(step["grad_norm"])


def test_samples_and_held_out_problems_are_episodes(resumed):
    lines = [json.loads(line) for line in (resumed / "samples.jsonl").read_text().splitlines()]
    assert any(line.get("earlier") for line in lines)
    result = json.loads((resumed / "evaluations" / "after" / "result.json").read_text())
    assert result["ways"]["sampled"]["verdict_errors"] == 0


def test_a_resume_with_another_environment_is_refused(resumed):
    changed = start(
        resumed, *EPISODES, "run.resume=true", "rollout.max_observation_tokens=23", f"run.rollout_steps={STEPS + 1}"
    )
    refused = changed.finish(60)
    assert refused.code == ExitCode.CONFIG
    assert "rollout.max_observation_tokens = 23: the run in" in refused.output
