"""The coordinator's part of a checkpoint: equal in every bit, and damage is named before anything starts from it; the
newest intact one before it is offered."""

import asyncio
import dataclasses
import resource
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megatron_dapo.actor.checkpoint.checkpoint_files import (
    MANIFEST_FILE,
    STATE_FILE,
    digest_of,
    put_in_place,
    state_text,
)
from megatron_dapo.actor.step_data import CheckpointError
from megatron_dapo.algorithm.dynamic_sampling import PassRate
from megatron_dapo.config import load_config
from megatron_dapo.config.actor_config import ActorConfig, LayoutConfig
from megatron_dapo.coordinator import checkpoints as checkpoints_module
from megatron_dapo.coordinator import run as run_module
from megatron_dapo.coordinator.checkpoints import (
    Progress,
    damaged_checkpoint,
    load_counters,
    load_progress,
    save_progress,
)
from megatron_dapo.coordinator.run_context import first_progress
from megatron_dapo.experience.groups import SamplerState, unjudged
from megatron_dapo.storage.group_files import GroupFileError
from megatron_dapo.storage.run_dir import CheckpointDamaged, RunDir, RunDirError
from rollout.generation import FinishReason
from tests.coordinator.test_sampler import group


@pytest.fixture
def saved(tmp_path):
    carried = (group(7, 2, 5, version=3), group(8, 1, 9, version=3))
    rate = PassRate.start(0.3).update(kept=2, filtered=5)
    drawn = [one.generation for one in group(10, 0, 4, version=2).responses]
    drawn[1:] = [dataclasses.replace(one, finish_reason=FinishReason.ABORT) for one in drawn[1:]]
    nothing = {name: getattr(drawn[3], name)[:0] for name in ("token_ids", "log_probs", "weight_versions")}
    drawn[3] = dataclasses.replace(drawn[3], **nothing)
    unfinished = dataclasses.replace(group(10, 0, 4, version=2), responses=tuple(map(unjudged, drawn)))
    state = SamplerState(
        cursor=7, pass_rate=rate, carried=carried, next=12, passed_over=(9, 11), unfinished=(unfinished,)
    )
    progress = Progress(rollout_step=3, optimizer_step=12, weight_version=3, sampler=state)
    save_progress(progress, tmp_path)
    return progress, tmp_path


def plain(value):
    if isinstance(value, np.ndarray):
        return (str(value.dtype), value.tobytes())
    if dataclasses.is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return [plain(item) for item in value] if isinstance(value, tuple) else value


def test_what_was_saved_comes_back_equal(saved):
    progress, folder = saved
    assert plain(load_progress(folder)) == plain(progress)


def test_a_file_for_which_the_disk_has_no_room_is_named(saved):
    progress, folder = saved
    (folder / "progress.json").unlink()
    (folder / "progress.json").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"No space left on device: '.*/progress\.json'"):
        save_progress(progress, folder)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(OSError, match=r"File too large: '.*/unfinished\.npz'"):
            save_progress(progress, folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_without_unfinished_groups_the_files_are_those_of_before(saved):
    progress, folder = saved
    state = dataclasses.replace(progress.sampler, unfinished=())
    for name in ("unfinished.json", "unfinished.npz"):
        (folder / name).unlink()
    save_progress(dataclasses.replace(progress, sampler=state), folder)
    assert sorted(file.name for file in folder.iterdir()) == ["progress.json", "progress.npz"]
    assert plain(load_progress(folder).sampler) == plain(state)


@pytest.mark.parametrize("name", ["progress.json", "progress.npz", "unfinished.json", "unfinished.npz"])
@pytest.mark.parametrize("damage", ["missing", "cut", "empty", "zeros"])
def test_a_damaged_file_is_named(saved, name, damage):
    _, folder = saved
    content = (folder / name).read_bytes()
    changed = {"cut": content[: len(content) // 2], "empty": b"", "zeros": bytes(len(content))}
    (folder / name).unlink() if damage == "missing" else (folder / name).write_bytes(changed[damage])
    with pytest.raises(GroupFileError, match=str(folder)):
        load_progress(folder)


def test_a_changed_digit_is_found(saved):
    _, folder = saved
    file = folder / "progress.json"
    file.write_text(file.read_text().replace('"cursor": 7', '"cursor": 9'))
    with pytest.raises(GroupFileError, match="checksum"):
        load_progress(folder)


def test_arrays_of_another_checkpoint_are_refused(saved, tmp_path_factory):
    progress, folder = saved
    other = tmp_path_factory.mktemp("other")
    state = dataclasses.replace(progress.sampler, carried=progress.sampler.carried[:1])
    save_progress(dataclasses.replace(progress, sampler=state), other)
    (folder / "progress.json").write_bytes((other / "progress.json").read_bytes())
    with pytest.raises(GroupFileError, match="checksum"):
        load_progress(folder)


def test_a_flipped_bit_is_found_wherever_it_is(saved):
    """In the arrays' file too, whose own checksums do not cover its directory."""
    _, folder = saved
    for name in ("progress.json", "progress.npz"):
        content = (folder / name).read_bytes()
        for at in range(0, len(content), 37):
            (folder / name).write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
            with pytest.raises(GroupFileError):
                load_progress(folder)
        (folder / name).write_bytes(content)
    load_progress(folder)


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-7])


KINDS = {"flipped": flip, "truncated": truncate, "missing": Path.unlink}
COORDINATORS = ("progress.json", "progress.npz")
"""Counters, and the carried groups."""

TRAINERS = ("actor/__0_0.distcp", "actor/common.pt", f"actor/{MANIFEST_FILE}")


@pytest.fixture
def run_dir(tmp_path):
    """With whole checkpoints after steps 2, 4 and 6: real progress and state files, tensors of random bytes."""
    found = RunDir(tmp_path / "run", resume=False)
    for step in (2, 4, 6):
        aside = found.aside(found.path / "checkpoints" / f"step_{step}")
        sampler = SamplerState(cursor=step, pass_rate=PassRate.start(0.5), carried=(group(7, 2, 5), group(8, 1, 9)))
        save_progress(Progress(rollout_step=step, optimizer_step=1, weight_version=step, sampler=sampler), aside)
        actor = aside / "actor.partial"
        actor.mkdir()
        digests = {}
        for name in ("__0_0.distcp", "common.pt"):
            (actor / name).write_bytes(bytes(range(200)) * step)
            digests[name] = digest_of(actor / name)
        state = state_text(optimizer_steps=1, layout=LayoutConfig(), distributed_optimizer=True)
        (actor / STATE_FILE).write_text(state)
        put_in_place(actor, aside / "actor", digests)
        found.publish_checkpoint(aside, step)
    yield found
    found.close()


def found_at_start(run_dir: RunDir) -> CheckpointDamaged:
    with pytest.raises(CheckpointDamaged) as caught:
        asyncio.run(load_counters(run_dir, run_dir.latest_checkpoint(), ActorConfig()))
    return caught.value


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", COORDINATORS)
def test_the_coordinators_files(run_dir, name, kind):
    newest = run_dir.latest_checkpoint().folder
    KINDS[kind](newest / name)
    error = found_at_start(run_dir)
    assert str(newest) in str(error)
    assert name in str(error)
    assert "run.resume_step=4 continues" in str(error)
    assert error.intact == 4


@pytest.mark.parametrize("name", TRAINERS)
def test_a_missing_file_of_the_trainer_is_found_before_anything_starts(run_dir, name):
    file = run_dir.latest_checkpoint().folder / name
    file.unlink()
    error = found_at_start(run_dir)
    assert str(error).startswith(str(file))
    assert "is missing" in str(error) or "No such file" in str(error)
    assert error.intact == 4


@pytest.mark.parametrize("name", ["__0_0.distcp", "common.pt"])
def test_a_damaged_file_of_the_trainer_is_found_before_anything_starts(run_dir, name, monkeypatch):
    file = run_dir.latest_checkpoint().folder / "actor" / name
    flip(file)
    assert str(found_at_start(run_dir)).startswith(f"{file} is damaged")
    monkeypatch.setattr(checkpoints_module, "READ_FIRST", 100)  # too large to be read twice: left to the ranks
    asyncio.run(load_counters(run_dir, run_dir.latest_checkpoint(), ActorConfig()))


def test_a_checkpoint_that_cannot_be_used_is_refused_before_anything_is_set_aside(run_dir, tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text(
        f"run: {{dir: {run_dir.path}, rollout_steps: 9, resume: true, resume_step: 4}}\n"
        "model: {path: m, context_length: 30000}\ndata: {path: p}\nevaluation: {path: e}\n"
    )
    actor = run_dir.checkpoints()[1].folder / "actor"
    before = sorted(path.name for path in (run_dir.path / "checkpoints").iterdir())

    def error(*more: str) -> RunDirError:
        with pytest.raises(RunDirError) as caught:
            asyncio.run(first_progress(load_config(file, list(more)), run_dir))
        assert sorted(path.name for path in (run_dir.path / "checkpoints").iterdir()) == before
        return caught.value

    assert "holds step 2, step 4, step 6" in str(error("run.resume_step=5"))
    with pytest.raises(CheckpointError, match=r"set actor\.optimizer\.distributed=true, as"):
        asyncio.run(first_progress(load_config(file, ["actor.optimizer.distributed=false"]), run_dir))
    flip(actor / "common.pt")
    assert error().overrides == ("run.resume_step=2",)
    flip(actor / "common.pt")
    assert asyncio.run(first_progress(load_config(file), run_dir)).rollout_step == 4
    assert [found.step for found in run_dir.checkpoints()] == [2, 4]


def test_a_manifest_that_is_no_json_is_found_before_anything_starts(run_dir):
    file = run_dir.latest_checkpoint().folder / "actor" / MANIFEST_FILE
    truncate(file)
    assert str(found_at_start(run_dir)).startswith(f"{file} is damaged")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [*COORDINATORS, *TRAINERS])
def test_what_is_offered_is_intact_itself(run_dir, name, kind):
    """The newest was found damaged by the ranks; of the earlier ones each file is read, the newest first."""
    KINDS[kind](run_dir.checkpoints()[1].folder / name)
    assert asyncio.run(damaged_checkpoint(run_dir, run_dir.latest_checkpoint(), "reason")).intact == 2
    KINDS[kind](run_dir.checkpoints()[0].folder / name)
    error = asyncio.run(damaged_checkpoint(run_dir, run_dir.latest_checkpoint(), "reason"))
    assert error.intact is None
    assert "no checkpoint before it is intact; begin anew in another run.dir" in str(error)


def test_intact_ones_load(run_dir):
    progress = asyncio.run(load_counters(run_dir, run_dir.latest_checkpoint(), ActorConfig()))
    assert progress.rollout_step == 6
    assert len(progress.sampler.carried) == 2


@pytest.fixture
def restarted(monkeypatch, tmp_path) -> Callable[..., list[int | None]]:
    """`restarted(policy, damages)`: a run whose checkpoints are damaged in turn; where each start went on from."""
    file = tmp_path / "c.yaml"
    file.write_text(
        f"run: {{dir: {tmp_path / 'run'}, rollout_steps: 9, resume: true}}\n"
        "model: {path: m, context_length: 30000}\ndata: {path: p}\nevaluation: {path: e}\n"
    )

    def start(policy: str, intact: list[int | None]) -> list[int | None]:
        config = load_config(file, [f"run.on_damaged_checkpoint={policy}"])
        starts: list[int | None] = []

        async def run(config, *_):
            starts.append(config.run.resume_step)
            if len(starts) <= len(intact):
                raise CheckpointDamaged("a file", intact[len(starts) - 1])
            return {}

        monkeypatch.setattr(run_module, "run", run)

        class Console:
            def note(self, line: str) -> None:
                notes.append(line)

        notes: list[str] = []
        asyncio.run(run_module.run_with_restarts(config, None, Console(), None))
        assert all("a file" in note for note in notes)
        assert len(notes) == len(intact)
        return starts

    return start


def test_older_ones_are_taken_when_the_config_says_so(restarted):
    assert restarted("take_older", [6, 2]) == [None, 6, 2]
    with pytest.raises(CheckpointDamaged):
        restarted("take_older", [None])
    with pytest.raises(CheckpointDamaged):
        restarted("stop", [6])
