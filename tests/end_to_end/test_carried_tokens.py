"""A surplus that goes on while the actor trains (`sync`) or is interrupted (`colocated`), on its real parts: evaluated
between steps, killed, and resumed."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from megatron_dapo.cli.exit_codes import ExitCode
from megatron_dapo.monitor.writer import read_metrics
from megatron_dapo.storage.group_files import load_groups
from megatron_dapo.storage.ledger import effective_events, read_ledger
from tests.end_to_end.test_quickstart import start
from tests.ledger_check import check_ledger

STEPS = 4
KEEPING = "tests.end_to_end.train_keeping_batches"
MODES = {
    "colocated": ("run.mode=colocated", "actor.offload.between_phases=all", "rollout.max_running_requests=16"),
    "sync": ("run.mode=sync", "rollout.max_running_requests=4"),  # else all is finished before the new weights
}
CARRYING = (
    "rollout.servers=2",
    f"run.rollout_steps={STEPS}",
    "rollout.deterministic=false",
    "rollout.stream_every=8",
    "algorithm.dynamic_sampling.surplus=4",  # a part of it waits for a place when the batch is full
    "evaluation.limit=4",
    "evaluation.every=1",
    "evaluation.greedy=false",
    "evaluation.forbidden_start=null",
    "run.export_at_end=false",
    "run.keep_checkpoints=9",
    "algorithm.importance.mode=truncated",
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module", params=MODES)
def resumed(tmp_path_factory, request) -> Path:
    run_dir, keys = tmp_path_factory.mktemp("carried") / "run", (*CARRYING, *MODES[request.param])
    running = start(run_dir, *keys, module=KEEPING)
    running.wait_for(f"step 3/{STEPS}", 300)
    running.kill_all()
    running.finish(60)
    finished = start(run_dir, *keys, "run.resume=true", module=KEEPING).finish(400)
    assert finished.code == ExitCode.FINISHED, finished.output
    assert finished.left_behind == ()
    return run_dir


def test_no_prompt_is_lost_or_sent_or_trained_twice(resumed):
    events = read_ledger(resumed / "ledger.jsonl")
    check_ledger(events)
    standing = effective_events(events)
    trained = [event["prompt"] for event in standing if event["event"] == "trained"]
    assert trained == sorted(set(trained))
    assert len(trained) == 6 * STEPS
    (again,) = (event for event in events if event["event"] == "resumed")
    unfinished, _ = load_groups(resumed / "checkpoints" / f"step_{again['rollout_step']}", "unfinished")
    assert [group.position for group in unfinished] == again["continued"]
    assert sum(group.tokens for group in unfinished) > 0
    sent = Counter(event["prompt"] for event in standing if event["event"] == "dispatched")
    expired = Counter(event["prompt"] for event in standing if event["event"] == "expired")
    assert all(sent[position] == 1 + expired[position] for position in again["continued"])


def test_tokens_a_second_are_over_the_time_in_which_servers_may_write(resumed):
    phases = (
        ("rollout", "environment", "reward")
        if "mode: colocated" in (resumed / "config.yaml").read_text()
        else ("step",)
    )
    first = read_metrics(resumed)[0]  # of it nothing was drawn before
    seconds = sum(first[f"timing/{phase}"] for phase in phases)
    assert first["tokens_per_second/rollout"] == pytest.approx(first["tokens/generated"] / seconds, rel=1e-3)


def test_responses_go_on_from_their_tokens_over_new_weights_and_over_the_kill(resumed):
    steps = read_metrics(resumed)
    assert sum(step["sampling/in_flight"] for step in steps) > 0
    assert max(step["staleness/max"] for step in steps) == 1
    (again,) = (event for event in read_ledger(resumed / "ledger.jsonl") if event["event"] == "resumed")
    mixed, found, fresh = 0, 0, 0
    for step in range(2, STEPS + 1):
        batch, _ = load_groups(resumed / "batches" / f"step_{step}", "batch")
        made = {one.generation.request_id: one.generation for group in batch for one in group.responses}
        mixed += sum(bool(np.ptp(generation.weight_versions)) for generation in made.values())
        if step == again["rollout_step"] + 1:
            folder = resumed / "checkpoints" / f"step_{step - 1}"
            for group in load_groups(folder, "unfinished")[0]:
                fresh += group.weight_version >= step - 2  # others have expired, and are drawn anew
                for one in group.responses:
                    drawn, whole = one.generation, made.get(one.generation.request_id)
                    if whole is not None:
                        size = drawn.token_ids.size
                        np.testing.assert_array_equal(whole.token_ids[:size], drawn.token_ids)
                        np.testing.assert_array_equal(whole.log_probs[:size], drawn.log_probs)
                        np.testing.assert_array_equal(whole.weight_versions[:size], drawn.weight_versions)
                        found += size > 0
    assert mixed > 0, "no response went on over new weights: the test shows nothing"
    assert found > 0 or not fresh
    for step in steps:
        assert step.get("mismatch/max_abs", 0.0) < 1e-3, "on tokens of the current weights engine and trainer agree"
    assert json.loads((resumed / "summary.json").read_text())["rollout_steps"] == STEPS
