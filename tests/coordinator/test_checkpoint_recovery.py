"""A damaged checkpoint is named before anything starts from it, and the newest intact one before it is offered."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_dapo.actor.checkpoint.checkpoint_files import MANIFEST_FILE, digest_of, put_in_place
from megatron_dapo.algorithm.dynamic_sampling import PassRate
from megatron_dapo.config import load_config
from megatron_dapo.coordinator import run as run_module
from megatron_dapo.coordinator.progress import Progress, damaged_checkpoint, load_counters, save_progress
from megatron_dapo.coordinator.sampler import SamplerState
from megatron_dapo.storage.run_dir import CheckpointDamaged, RunDir
from tests.coordinator.test_sampler import group


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
    """With whole checkpoints after steps 2, 4 and 6: real progress files, trainer files of random bytes."""
    found = RunDir(tmp_path / "run", resume=False)
    for step in (2, 4, 6):
        aside = found.checkpoint_aside(step)
        sampler = SamplerState(cursor=step, pass_rate=PassRate.start(0.5), carried=(group(7, 2, 5), group(8, 1, 9)))
        save_progress(Progress(rollout_step=step, optimizer_step=1, weight_version=step, sampler=sampler), aside)
        actor = aside / "actor.partial"
        actor.mkdir()
        digests = {}
        for name in ("__0_0.distcp", "common.pt"):
            (actor / name).write_bytes(bytes(range(200)) * step)
            digests[name] = digest_of(actor / name)
        put_in_place(actor, aside / "actor", digests)
        found.publish_checkpoint(aside, step, keep=3)
    yield found
    found.close()


def found_at_start(run_dir: RunDir) -> CheckpointDamaged:
    with pytest.raises(CheckpointDamaged) as caught:
        asyncio.run(load_counters(run_dir, run_dir.latest_checkpoint()))
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
    assert str(error).startswith(f"{file} is missing")
    assert error.intact == 4


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
    progress = asyncio.run(load_counters(run_dir, run_dir.latest_checkpoint()))
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
