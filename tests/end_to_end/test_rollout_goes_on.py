"""A run that ends in the middle of a rollout, on its real parts: what was drawn is not drawn again, and the weights are
those of a run that nobody disturbed."""

import signal
from pathlib import Path

import pytest

from megatron_dapo.cli.exit_codes import ExitCode
from megatron_dapo.coordinator.checkpoints import Progress, load_progress
from megatron_dapo.storage.ledger import Event, effective_events, read_ledger
from megatron_dapo.storage.run_dir import newest_step
from tests.end_to_end.test_kills import arguments, check_equal, undisturbed
from tests.ledger_check import check_ledger
from tests.processes import Running

__all__ = ["undisturbed"]  # pytest finds the fixture by its import

STREAMED = (
    "run.mode=colocated",
    "actor.offload.between_phases=all",
    "rollout.deterministic=false",
    "rollout.stream_every=4",
)
"""Responses of which tokens are known before their end."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def ended_and_resumed(run_dir: Path, how: str, step: int, *more: str) -> tuple[Progress, str]:
    """(what was saved of the rollout, the second life's output)."""
    log, more = run_dir.parent / "out.txt", (*more, "run.checkpoint_minutes=0.001")
    ending = Running(how, str(step), *arguments(run_dir, *more), log=log, module="tests.end_to_end.ended_in_rollout")
    first = ending.finish(400)
    assert first.code == (-signal.SIGKILL if how == "kill" else ExitCode.CONTINUE), first.output
    assert first.left_behind == ()
    assert newest_step(run_dir) == step - 1
    saved = load_progress(run_dir / "rollout")
    assert saved.rollout_step == saved.weight_version == step - 1
    assert len(saved.sampler.carried) >= 2
    again = Running(*arguments(run_dir, *more, "run.resume=true"), log=log).finish(400)
    assert again.code == ExitCode.FINISHED, again.output
    assert f"its rollout goes on: {len(saved.sampler.carried)} groups are finished" in again.output
    assert not (run_dir / "rollout").exists(), "it is over"
    return saved, again.output


@pytest.mark.parametrize(("how", "step"), [("kill", 2), ("stop", 2), ("kill", 1)])
def test_the_weights_are_those_of_a_run_that_ran_through(undisturbed, tmp_path, how, step):
    saved, output = ended_and_resumed(tmp_path / "run", how, step)
    assert not saved.sampler.unfinished, "which tokens a kill leaves depends on time"
    check_equal(tmp_path / "run", undisturbed, output)


def test_begun_responses_go_on_from_their_tokens(tmp_path):
    saved, _ = ended_and_resumed(tmp_path / "run", "kill", 2, *STREAMED)
    assert sum(group.tokens for group in saved.sampler.unfinished) > 0
    events = read_ledger(tmp_path / "run" / "ledger.jsonl")
    check_ledger(events)
    trained = [event["prompt"] for event in effective_events(events) if event["event"] == Event.TRAINED]
    assert trained == sorted(set(trained))
    assert len(trained) == 3 * 6
