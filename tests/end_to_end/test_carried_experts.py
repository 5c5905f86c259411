"""Routing replay in runs whose responses are interrupted: by a kill, where each token's row is kept, and by a publish,
after which they go on with old keys and values."""

from pathlib import Path

import numpy as np
import pytest

from megatron_dapo.cli.exit_codes import ExitCode
from megatron_dapo.monitor.writer import read_metrics
from megatron_dapo.storage.group_files import load_groups
from tests.end_to_end.test_async import ASYNC
from tests.end_to_end.test_carried_tokens import CARRYING, KEEPING
from tests.end_to_end.test_quickstart import start
from tests.end_to_end.test_weight_sync import with_experts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_rows_are_kept_over_interruptions_and_a_kill(tmp_path: Path) -> None:
    keys = [*CARRYING, "evaluation.every=0", "rollout.servers=1", "actor.routing_replay=true"]
    keys += [f"model.path={with_experts(tmp_path / 'model')}", "actor.layout.tensor=1"]
    keys += ["actor.layout.data=2", "actor.layout.expert=2"]
    keys += ["rollout.max_running_requests=8"]  # else all is finished before the new weights
    run_dir = tmp_path / "run"
    running = start(run_dir, *keys)
    running.wait_for("step 3/4", 300)
    running.kill_all()
    running.finish(60)
    begun, partial = 0, 0
    for folder in (run_dir / "checkpoints").glob("step_*"):
        for group in load_groups(folder, "unfinished")[0]:
            for one in group.responses:
                drawn, tokens = one.generation, group.prompt_ids.size + one.generation.token_ids.size
                rows = 0 if drawn.routing is None else len(drawn.routing)
                assert rows == (tokens - 1 if drawn.drawn else 0), "the servers tell them when they are interrupted"
                if rows:
                    assert (np.diff(np.sort(drawn.routing, axis=-1).astype(int), axis=-1) > 0).all()
                    assert drawn.routing.max() < 4
                begun, partial = begun + bool(rows), partial + (drawn.finish_reason == "abort")
    assert begun > partial > 0
    finished = start(run_dir, *keys, "run.resume=true").finish(400)
    assert finished.code == ExitCode.FINISHED, finished.output
    assert finished.left_behind == ()
    steps = read_metrics(run_dir)
    assert [step["rollout_step"] for step in steps] == [1, 2, 3, 4]
    assert max(step["staleness/share"] for step in steps) > 0
    # A response of two versions: the engine has read its beginning anew, by the later ones' routers.
    known = [step["mismatch/mean_abs"] for step in steps if step["staleness/share"] < 1]  # else it has no such figure
    assert known
    assert max(known) < 1e-4


def test_what_follows_a_publish_on_old_keys_and_values_is_corrected(tmp_path: Path) -> None:
    """`rollout.on_publish: keep`: those tokens alone differ from the trainer's, by far less than a stale one may, and
    each has min(pi_old / pi_rollout, upper) as its weight."""
    keys = [*ASYNC, "run.rollout_steps=6", "rollout.servers=2", "rollout.max_running_requests=8"]
    keys += [f"model.path={with_experts(tmp_path / 'model')}", "actor.layout.tensor=1", "actor.layout.data=2"]
    keys += ["actor.layout.expert=2", "actor.routing_replay=true", "rollout.on_publish=keep"]
    keys += ["rollout.deterministic=false"]
    run_dir = tmp_path / "run"
    finished = start(run_dir, *keys, module=KEEPING).finish(400)
    assert finished.code == ExitCode.FINISHED, finished.output
    assert finished.left_behind == ()
    steps, gaps = read_metrics(run_dir), []
    for step in steps:
        tokens = np.load(run_dir / "batches" / f"step_{step['rollout_step']}" / "tokens.npz")
        versions, difference = tokens["versions"], tokens["old"].astype(float) - tokens["rollout"]
        np.testing.assert_allclose(tokens["correction"], np.minimum(np.exp(difference), 2.0), rtol=1e-5)
        first = np.repeat(versions[np.cumsum(tokens["lengths"]) - tokens["lengths"]], tokens["lengths"])
        newest = versions == step["weight_version"] - 1
        assert np.abs(difference[newest & (first == versions)]).max(initial=0) < 1e-4
        gaps.append(np.abs(difference[newest & (first < versions)]))
    behind = np.concatenate(gaps)
    assert 1e-4 < behind.max() < 3
    assert behind.mean() < 0.1
