"""The run directory: one writer, nothing of somebody else's, complete checkpoints, the same run at a resume."""

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_dapo.config import dump_config, load_config
from megatron_dapo.coordinator.resume import check_resume
from megatron_dapo.monitor.writer import MetricsError
from megatron_dapo.storage.durable import FolderHeld, replace_file
from megatron_dapo.storage.ledger import LedgerError
from megatron_dapo.storage.run_dir import RunDir, RunDirError, RunDirLost, newest_step


def aside(run_dir: RunDir, step: int) -> Path:
    return run_dir.aside(run_dir.path / "checkpoints" / f"step_{step}")


def test_a_second_run_on_the_same_directory_is_refused_while_the_first_lives(tmp_path):
    first = RunDir(tmp_path / "run", resume=False)
    with pytest.raises(FolderHeld, match="run: another process writes there"):
        RunDir(tmp_path / "run", resume=True)
    first.close()
    RunDir(tmp_path / "run", resume=True).close()


@pytest.mark.parametrize(
    "make", [Path.touch, lambda path: path.symlink_to(path.parent), lambda path: path.symlink_to("none")]
)
def test_something_else_where_the_rollout_is_saved_is_named_before_the_run(make, tmp_path):
    (tmp_path / "run").mkdir()
    make(tmp_path / "run" / "rollout")
    with pytest.raises(RunDirError, match=r"run/rollout: is no folder; .*; move it away"):
        RunDir(tmp_path / "run", resume=True)
    (tmp_path / "run" / "rollout").unlink()
    RunDir(tmp_path / "run", resume=True).close()


def test_a_disk_that_takes_nothing_is_named(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise OSError(30, "Read-only file system")

    with monkeypatch.context() as broken:
        broken.setattr("filelock._unix.os.open", refuse)
        with pytest.raises(RunDirError, match="Read-only file system; choose a directory that you can write"):
            RunDir(tmp_path / "run", resume=False)
    RunDir(tmp_path / "run", resume=False).close()


def test_an_empty_ledger_is_no_run_and_a_filled_one_is(tmp_path):
    (tmp_path / "ledger.jsonl").touch()
    RunDir(tmp_path, resume=False).close()
    (tmp_path / "ledger.jsonl").write_text("{}\n")
    with pytest.raises(RunDirError, match=r"run\.resume=true"):
        RunDir(tmp_path, resume=False)
    RunDir(tmp_path, resume=True).close()


def test_a_ledger_that_cannot_be_seen_is_not_taken_for_none(tmp_path):
    (tmp_path / "ledger.jsonl").symlink_to(tmp_path / "ledger.jsonl")
    with pytest.raises(RunDirError, match="symbolic links; choose a directory"):
        RunDir(tmp_path, resume=False)
    (tmp_path / "ledger.jsonl").unlink()
    RunDir(tmp_path, resume=False).close()  # the lock was given back


@pytest.mark.parametrize("name", ["model", "weights", "checkpoints"])
def test_a_directory_with_somebody_elses_files_is_refused(tmp_path, name):
    (tmp_path / name).mkdir()
    with pytest.raises(RunDirError, match=f"holds {name} but no run"):
        RunDir(tmp_path, resume=False)


def test_a_run_that_was_killed_in_its_first_step_may_begin_anew(tmp_path):
    (tmp_path / "weights").mkdir()
    (tmp_path / "manifest.json").write_text("{}")
    (tmp_path / "ledger.jsonl").touch()
    RunDir(tmp_path, resume=False).close()


def test_only_complete_checkpoints_count_and_the_oldest_go(tmp_path):
    run_dir = RunDir(tmp_path / "run", resume=False)
    for step in (1, 2, 3):
        folder = aside(run_dir, step)
        (folder / "file").write_text(str(step))
        assert run_dir.latest_checkpoint() is None or run_dir.latest_checkpoint().step == step - 1
        run_dir.publish_checkpoint(folder, step)
        run_dir.keep_newest(2)
    (run_dir.path / "checkpoints" / "step_9.bak").mkdir()
    aside(run_dir, 10)
    assert [checkpoint.step for checkpoint in run_dir.checkpoints()] == [2, 3]
    assert (run_dir.path / "checkpoints" / "latest").read_text().strip() == "step_3"
    run_dir.close()


def test_going_back_keeps_later_checkpoints_under_another_name(tmp_path):
    run_dir = RunDir(tmp_path / "run", resume=False)
    for step in (2, 4, 6):
        run_dir.publish_checkpoint(aside(run_dir, step), step)
    with pytest.raises(RunDirError, match=r"run\.resume_step = 3.*step 2, step 4, step 6"):
        run_dir.go_back_to(3)
    for again in ("set_aside.step_6", "set_aside.step_6.2"):
        run_dir.go_back_to(4)
        assert [checkpoint.step for checkpoint in run_dir.checkpoints()] == [2, 4]
        assert (run_dir.path / "checkpoints" / "latest").read_text().strip() == "step_4"
        assert (run_dir.path / "checkpoints" / again).is_dir()
        run_dir.publish_checkpoint(aside(run_dir, 6), 6)
    assert newest_step(run_dir.path) == 6
    run_dir.close()


@pytest.mark.parametrize("replaced", [False, True])
def test_nothing_is_saved_to_what_is_left_of_a_lost_mount(tmp_path, replaced):
    run_dir = RunDir(tmp_path / "run", resume=False)
    (tmp_path / "run").rename(tmp_path / "elsewhere")
    if replaced:
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / ".lock").touch()
    with pytest.raises(RunDirLost, match="not the directory that this run began in"):
        aside(run_dir, 1)
    assert not (tmp_path / "run" / "checkpoints").exists()
    run_dir.close()


@pytest.fixture
def disk(monkeypatch):
    """What has been asked to be on disk, by inode, since it was changed last; a rename keeps the inode."""
    synced = set()
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.add(os.fstat(descriptor).st_ino))
    return synced


def test_what_a_resume_rests_on_is_on_disk_when_it_has_its_name(tmp_path, disk):
    run_dir = RunDir(tmp_path / "run", resume=False)
    run_dir.write_json("heldout_before.json", {})
    assert {os.stat(path).st_ino for path in (run_dir.path, run_dir.path / "heldout_before.json")} <= disk
    disk.clear()
    replace_file(run_dir.path / "status.json", "{}", durable=False)
    assert not disk, "every two seconds"

    folder = aside(run_dir, 1)
    (folder / "file").touch()
    run_dir.publish_checkpoint(folder, 1)
    folder = run_dir.latest_checkpoint().folder
    assert {os.stat(path).st_ino for path in (folder, folder.parent)} <= disk
    run_dir.close()


def test_a_path_that_no_directory_can_have_is_named():
    with pytest.raises(RunDirError, match=r"run\.dir = x+: File name too long"):
        newest_step(Path("x" * 300))


@pytest.fixture
def begun(tmp_path):
    """A run directory with a checkpoint after step 1, and its config file."""
    file = tmp_path / "c.yaml"
    file.write_text(
        f"run: {{dir: {tmp_path / 'run'}, rollout_steps: 1}}\nmodel: {{path: m, context_length: 30000}}\n"
        "data: {path: p}\nevaluation: {path: e}\n"
    )
    run_dir = RunDir(tmp_path / "run", resume=False)
    run_dir.write_text("config.yaml", dump_config(load_config(file)))
    run_dir.write_json("manifest.json", {"data": {"train": {"sha256": "abc"}, "heldout": {"sha256": "held"}}})
    run_dir.write_json("heldout_before.json", {"before": {}, "baseline": None})
    run_dir.ledger.write_text('{"event": "dispatched"}\n{"event": "checkpoint", "rollout_step": 1}\n')
    (run_dir.path / "metrics.jsonl").write_text('{"rollout_step": 1}\n')
    run_dir.publish_checkpoint(aside(run_dir, 1), 1)
    yield run_dir, file
    run_dir.close()


def inputs(prompts: str = "abc", heldout: str = "held") -> SimpleNamespace:
    return SimpleNamespace(prompts=SimpleNamespace(content_hash=prompts), heldout=SimpleNamespace(content_hash=heldout))


def test_a_resume_with_another_seed_or_other_prompts_is_refused(begun):
    run_dir, file = begun
    check_resume(load_config(file, ["run.rollout_steps=9"]), inputs(), run_dir)
    with pytest.raises(RunDirError, match=r"run\.seed = 1: .* begun with 0") as caught:
        check_resume(load_config(file, ["run.seed=1"]), inputs(), run_dir)
    assert caught.value.overrides == ("run.seed=0",)
    with pytest.raises(RunDirError, match=r"data\.order = mine:Order: .* begun with spaced"):
        check_resume(load_config(file, ["data.order=mine:Order"]), inputs(), run_dir)
    with pytest.raises(RunDirError, match="trained twice or never") as caught:
        check_resume(load_config(file), inputs(prompts="def"), run_dir)
    assert caught.value.overrides == ("run.resume=false", f"run.dir={run_dir.path}.new")


def test_a_resume_may_change_only_stages_that_lie_ahead(begun):
    """The checkpoint is step 1's, whose groups may wait for step 2."""
    run_dir, file = begun
    check_resume(load_config(file, ["rollout.stages=[{from_step: 3, temperature: 1.1}]"]), inputs(), run_dir)
    for step in (1, 2):
        changed = load_config(file, [f"rollout.stages=[{{from_step: {step}, temperature: 1.1}}]"])
        with pytest.raises(RunDirError, match=r"rollout\.stages: .* had others up to step 2"):
            check_resume(changed, inputs(), run_dir)


def test_refused_stages_come_with_those_that_a_resume_may_have(begun):
    """Those of the run so far, and those asked for that lie ahead."""
    run_dir, file = begun
    run_dir.write_text(
        "config.yaml", dump_config(load_config(file, ["rollout.stages=[{from_step: 2, temperature: 1.2}]"]))
    )
    asked = "rollout.stages=[{from_step: 1, temperature: 1.1}, {from_step: 5, temperature: 0.9}]"
    with pytest.raises(RunDirError) as caught:
        check_resume(load_config(file, [asked]), inputs(), run_dir)
    offered = load_config(file, caught.value.overrides)
    assert [(stage.from_step, stage.temperature) for stage in offered.rollout.stages] == [(2, 1.2), (5, 0.9)]
    check_resume(offered, inputs(), run_dir)


def test_a_resume_that_trains_otherwise_says_so(begun):
    run_dir, file = begun
    assert check_resume(load_config(file, ["run.rollout_steps=9"]), inputs(), run_dir) == []
    changed = load_config(file, ["algorithm.dynamic_sampling.max_staleness=1", "actor.optimizer.lr=1.0e-5"])
    assert check_resume(changed, inputs(), run_dir) == [
        f"{key} from here on; the run in {run_dir.path} had {before}"
        for key, before in (
            ("algorithm.dynamic_sampling.max_staleness = 1", "0"),
            ("actor.optimizer.lr = 1e-05", "1e-06"),
        )
    ]


def test_a_resume_whose_accuracy_could_not_be_compared_is_refused_once_something_is_trained(begun):
    run_dir, file = begun
    for key in ("limit=3", "samples=3", "temperature=0.5", "top_p=0.5", "greedy=false"):
        with pytest.raises(RunDirError, match=f"evaluation.{key.partition('=')[0]} = .* a resume must keep"):
            check_resume(load_config(file, [f"evaluation.{key}"]), inputs(), run_dir)
    with pytest.raises(RunDirError, match=r"evaluation\.path: the held-out problems"):
        check_resume(load_config(file), inputs(heldout="others"), run_dir)
    shutil.rmtree(run_dir.path / "checkpoints")
    check_resume(load_config(file, ["evaluation.limit=3"]), inputs(heldout="others"), run_dir)


@pytest.mark.parametrize("content", [None, "{", "[]", "{}", '{"data": [], "before": null, "baseline": null}'])
@pytest.mark.parametrize("name", ["manifest.json", "heldout_before.json"])
def test_a_damaged_file_of_the_run_is_named_before_anything_starts(begun, name, content):
    run_dir, file = begun
    (run_dir.path / name).unlink() if content is None else (run_dir.path / name).write_text(content)
    with pytest.raises(RunDirError, match=f"{name}: .*restore it"):
        check_resume(load_config(file), inputs(), run_dir)


@pytest.mark.parametrize(("name", "kind"), [("metrics.jsonl", MetricsError), ("ledger.jsonl", LedgerError)])
def test_a_damaged_line_of_the_records_is_named_before_anything_starts(begun, name, kind):
    run_dir, file = begun
    records = run_dir.path / name
    records.write_text("garbage\n" + records.read_text())
    with pytest.raises(kind, match=f"{name}:1"):
        check_resume(load_config(file), inputs(), run_dir)


@pytest.mark.parametrize("content", [None, "", '{"event": "dispatched"}\n'])
def test_a_ledger_that_lost_its_last_lines_is_named_before_anything_starts(begun, content):
    run_dir, file = begun
    run_dir.ledger.unlink() if content is None else run_dir.ledger.write_text(content)
    with pytest.raises(LedgerError, match=r"ledger\.jsonl: it does not hold the checkpoint of step 1"):
        check_resume(load_config(file), inputs(), run_dir)


def test_a_run_that_goes_back_is_not_finished_any_more(begun):
    run_dir, _ = begun
    run_dir.write_json("summary.json", {"rollout_steps": 1})
    run_dir.go_back_to(1)
    assert not (run_dir.path / "summary.json").exists()
    assert json.loads((run_dir.path / "set_aside.summary.json").read_text()) == {"rollout_steps": 1}


def test_a_run_that_goes_on_is_not_finished_any_more(begun):
    run_dir, _ = begun
    run_dir.set_results_aside(1)
    for steps in (1, 2):
        run_dir.write_json("summary.json", {"rollout_steps": steps})
        (run_dir.path / "model").mkdir()
        (run_dir.path / "model" / "config.json").write_text(str(steps))
        run_dir.set_results_aside(1)
    assert not (run_dir.path / "summary.json").exists()
    assert json.loads((run_dir.path / "set_aside.summary.json").read_text()) == {"rollout_steps": 1}
    assert not (run_dir.path / "model").exists(), "`eval` and `ask` would take it for the newest"
    kept = [run_dir.path / f"set_aside.model{number}" / "config.json" for number in ("", ".2")]
    assert [file.read_text() for file in kept] == ["1", "2"]


def test_what_was_measured_of_steps_that_are_to_come_again_is_none_of_the_runs_results(begun):
    run_dir, _ = begun
    for name in ("before", "step1", "step2", "step12", "after", "v3", "mine"):
        (run_dir.path / "evaluations" / name).mkdir(parents=True)
    run_dir.set_results_aside(1)
    assert {each.name for each in (run_dir.path / "evaluations").iterdir()} == {"before", "step1", "v3", "mine"}
    assert {each.name for each in run_dir.path.glob("set_aside.*")} == {
        f"set_aside.{name}" for name in ("step2", "step12", "after")
    }


def test_a_resume_keeps_the_type_of_the_weights(begun):
    """Each rank holds masters of its own part alone: as float32 weights they would differ from rank to rank."""
    run_dir, file = begun
    with pytest.raises(RunDirError, match=r"model\.dtype = float32: .* begun with bfloat16"):
        check_resume(load_config(file, ["model.dtype=float32"]), inputs(), run_dir)


def test_a_resume_neither_begins_nor_ends_routing_replay(begun):
    """Carried groups come with the experts of their tokens, or without."""
    run_dir, file = begun
    with pytest.raises(RunDirError, match=r"actor\.routing_replay = True: .* begun with False") as caught:
        check_resume(load_config(file, ["actor.routing_replay=true"]), inputs(), run_dir)
    assert caught.value.overrides == ("actor.routing_replay=false",)
