"""`run.mode: async` with its real parts: the servers write ahead while the actor trains; and stopped and resumed."""

import signal
from pathlib import Path

import pytest

from megatron_dapo.cli.exit_codes import ExitCode
from megatron_dapo.monitor.writer import read_metrics
from megatron_dapo.storage.ledger import effective_events, read_ledger
from tests.end_to_end.test_quickstart import start
from tests.ledger_check import check_ledger
from tests.monitor.declared import check_declared

STEPS = 3
ASYNC = (
    "run.mode=async",
    f"run.rollout_steps={STEPS}",
    "evaluation.limit=2",
    "evaluation.greedy=false",
    "evaluation.forbidden_start=null",
    "run.export_at_end=false",
    "algorithm.importance.mode=truncated",
    "run.checkpoint_every=0",
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    run_dir = tmp_path_factory.mktemp("async") / "run"
    finished = start(run_dir, *ASYNC).finish(300)
    assert finished.code == ExitCode.FINISHED, finished.output
    assert finished.left_behind == ()
    return run_dir


@pytest.fixture(scope="module")
def resumed(tmp_path_factory) -> Path:
    """A run that was stopped by Ctrl-C in its second step or later, and went on from what it had saved by then."""
    run_dir = tmp_path_factory.mktemp("async") / "run"
    running = start(run_dir, *ASYNC)
    running.wait_for(f"step 1/{STEPS}", 240)
    running.signal(signal.SIGINT, group=True)
    stopped = running.finish(120)
    assert stopped.code == ExitCode.CONTINUE, stopped.output
    assert stopped.left_behind == ()
    assert (run_dir / "checkpoints" / "latest").read_text().strip().startswith("step_"), "what was reached is saved"
    finished = start(run_dir, *ASYNC, "run.resume=true").finish(300)
    assert finished.code == ExitCode.FINISHED, finished.output
    assert finished.left_behind == ()
    return run_dir


def check_async_ledger(run_dir: Path, *, prompts: int, unfinished: int = 0) -> None:
    """Of a finished run: `prompts` trained once each, in order with what was filtered. `unfinished`: at most."""
    events = read_ledger(run_dir / "ledger.jsonl")
    fates = check_ledger(events)
    stands = effective_events(events)
    trained = [event["prompt"] for event in stands if event["event"] == "trained"]
    assert len(trained) == len(set(trained)) == prompts
    assert trained == sorted(trained)
    decided = [event["prompt"] for event in stands if event["event"] in ("trained", "filtered")]
    assert sorted(decided) == list(range(len(decided))), "admission is in prompt order: no prompt is passed over"
    later = [fate for prompt, fate in fates.items() if prompt >= len(decided)]
    # Interrupted: in flight at the checkpoint of the kill, and the run ended before its turn came again.
    assert set(later) <= {"carried", "interrupted", "dispatched"}
    # A verdict that comes while the last step is written down: in flight for its metrics, carried for the ledger.
    assert later.count("dispatched") <= unfinished, "after the last step nothing else is in flight"


RUNS = ["undisturbed", "resumed"]


@pytest.mark.parametrize("run", RUNS)
def test_nothing_is_lost_and_nothing_trained_twice(run, request):
    check_async_ledger(request.getfixturevalue(run), prompts=6 * STEPS)


@pytest.mark.parametrize("run", RUNS)
def test_servers_write_while_the_actor_trains_within_the_staleness_bound(run, request):
    # Where a run went on, a step whose checkpoint was not in place yet has been done again.
    steps = read_metrics(request.getfixturevalue(run))
    check_declared(name for step in steps for name in step)
    assert [step["weight_version"] for step in steps] == [1, 2, 3]
    assert steps[-1]["sampling/in_flight"] == 0
    assert sum(step["sampling/in_flight"] + step["sampling/carried"] for step in steps[:-1]) > 0
    assert max(step["staleness/max"] for step in steps) == 1, "max_staleness"
    stale = [step for step in steps if step["staleness/share"] > 0]
    assert stale
    for step in steps:
        assert step.get("mismatch/max_abs", 0.0) < 1e-3, "on tokens of the current weights engine and trainer agree"
        assert step["sampling/kept"] == 6
    assert max(step["staleness/kl"] for step in stale) > max(step.get("mismatch/kl", 0.0) for step in steps)


@pytest.mark.parametrize(
    ("mode", "way"), [("recompute", "disk"), ("keep", "disk"), ("recompute", "distributed"), ("keep", "delta")]
)
def test_a_publish_while_servers_write(tmp_path: Path, mode: str, way: str) -> None:
    """One of two servers always draws; ledger and staleness bound hold; `recompute` agrees with the trainer."""
    run_dir = tmp_path / "run"
    servers = ("rollout.servers=2", "rollout.max_running_requests=16", "rollout.deterministic=false")
    ways = (f"rollout.on_publish={mode}", f"rollout.weight_sync={way}")
    finished = start(run_dir, *ASYNC, *servers, *ways).finish(400)
    assert finished.code == ExitCode.FINISHED, finished.output
    assert finished.left_behind == ()
    steps = read_metrics(run_dir)
    check_async_ledger(run_dir, prompts=6 * STEPS, unfinished=steps[-1]["sampling/in_flight"])
    assert max(step["staleness/max"] for step in steps) == 1, "max_staleness"
    for step in steps:
        assert step["weight_sync/standstill"] == 0 < step["weight_sync/stopped"] < 1
        assert mode == "keep" or step.get("mismatch/max_abs", 0.0) < 1e-3
    if way != "disk":
        assert "it reads from disk" not in finished.output
        assert not (run_dir / "weights").exists()
        logs = [(run_dir / "logs" / f"server{at}.log").read_text() for at in range(2)]
        assert [log.count("init custom process group") for log in logs] == [1, 1], "each half keeps its own"
