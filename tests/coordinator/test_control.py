"""What changes over the steps of a run and stands in its checkpoints: the entropy bonus's weight, the KL reference."""

import asyncio
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

from megatron_dapo.algorithm.dynamic_sampling import PassRate
from megatron_dapo.algorithm.entropy_control import controlled
from megatron_dapo.config import load_config
from megatron_dapo.coordinator import loop
from megatron_dapo.coordinator.batch import entropy_weight, step_arrays
from megatron_dapo.coordinator.checkpoints import (
    Checkpoints,
    Progress,
    _remove_unnamed,
    load_progress,
    save_progress,
)
from megatron_dapo.coordinator.sampler import nothing_new
from megatron_dapo.experience.groups import SamplerState
from megatron_dapo.monitor.timeline import StepTimer
from megatron_dapo.storage.run_dir import RunDir
from rollout.fleet.member import ServerStatistics
from tests.coordinator.test_batch import GROUP, make_groups
from tests.coordinator.test_stages import Calls
from tests.monitor.declared import check_declared
from tests.processes import ROOT

ENTROPIES = (0.5, 0.1, 0.1, 0.3, 0.1, 0.25, 0.1)
"""Of the batches of steps 1, 2, ..."""


@pytest.mark.parametrize(
    ("coefficient", "entropy", "expected"),
    [
        (0.002, 0.15, (0.002, 0.003)),
        (0.002, 0.25, (0.0, 0.001)),
        (0.002, 0.2, (0.002, 0.001)),
        (0.0, 0.3, (0.0, 0.0)),
        (0.005, 0.1, (0.005, 0.005)),
    ],
)
def test_the_weight_rises_below_the_target_falls_above_it_and_is_on_only_there(coefficient, entropy, expected):
    assert controlled(coefficient, entropy, target=0.2, change=0.001, maximum=0.005) == pytest.approx(expected)


def test_a_maximum_that_a_resume_lowers_holds_from_its_first_step():
    config = load_config(
        ROOT / "examples" / "quickstart" / "dapo.yaml", ["algorithm.entropy_control={target: 0.2, maximum: 0.001}"]
    )
    batch = SimpleNamespace(old=SimpleNamespace(entropy=np.array([0.1])))
    assert entropy_weight(config.algorithm, 0.005, batch) == (0.001, 0.001)


class Trainer(Calls):
    """Notes the weight of the entropy bonus of every update, and what becomes of the reference."""

    def __init__(self):
        super().__init__()
        self.bonuses: list[float] = []
        self.resets: list[bool] = []

    async def update(self, batches, objective, temperature):
        self.bonuses.append(objective.entropy_coefficient)
        return await super().update(batches, objective, temperature)

    async def export_hf(self, folder):
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_text(f"after {len(self.bonuses)}")

    async def reset_reference(self, *, optimizer):
        self.resets.append(optimizer)


@pytest.fixture
def train(tmp_path, monkeypatch):
    """`train(steps, progress, *overrides)`: learns the given steps, a checkpoint after each; what it left."""
    file = tmp_path / "c.yaml"
    file.write_text(
        "run: {dir: x, rollout_steps: 99}\nmodel: {path: m, context_length: 200}\ndata: {path: p}\n"
        "evaluation: {path: e}\nrollout: {max_new_tokens: 100}\n"
        f"algorithm: {{group_size: {GROUP}, prompts_per_step: 6, mini_batch_responses: 24, overlong: {{buffer: 10}}}}\n"
    )

    async def synced(context, version):
        return None

    lines: list[dict] = []
    monkeypatch.setattr(loop, "publish_weights", synced)
    monkeypatch.setattr(loop, "step_metrics", lambda *_: {})
    monkeypatch.setattr(loop, "write_records", lambda context, metrics, admission: lines.append(dict(metrics)))
    run_dir = RunDir(tmp_path / "run", resume=True)
    state = SamplerState(cursor=0, pass_rate=PassRate.start(0.5), carried=())
    groups = make_groups()

    def run(steps, progress=None, *overrides):
        config, trainer = load_config(file, list(overrides)), Trainer()

        async def begin(progress, wait):
            folder = run_dir.aside(run_dir.path / "checkpoints" / f"step_{progress.rollout_step}")
            save_progress(progress, folder)

            async def publish():
                run_dir.publish_checkpoint(folder, progress.rollout_step)
                run_dir.keep_newest(config.run.keep_checkpoints)

            return publish

        due = Checkpoints(config.run, *[None] * 6).due
        context = SimpleNamespace(
            config=config,
            trainer=trainer,
            run_dir=run_dir,
            inputs=SimpleNamespace(model=SimpleNamespace(hidden_size=64)),
            sampler=SimpleNamespace(
                record_trained=lambda *_: None, snapshot=lambda step: state, under_way=None, refresh=nothing_new
            ),
            checkpoints=SimpleNamespace(begin=begin, due=due, kept_on_failure=lambda *_, **__: nullcontext()),
            handover=SimpleNamespace(to_trainer=lambda: asyncio.sleep(0)),
            fleet=SimpleNamespace(statistics=ServerStatistics()),
        )
        now = progress or Progress(rollout_step=0, optimizer_step=0, weight_version=0, sampler=state)

        async def learn():
            nonlocal now
            for step in steps:
                arrays = step_arrays(groups, config)
                entropy = np.full(arrays.responses.num_response_tokens, ENTROPIES[step - 1], np.float32)
                old = SimpleNamespace(entropy=entropy, log_probs=np.zeros(len(entropy), np.float32))
                batch = SimpleNamespace(arrays=arrays, old=old, admission=SimpleNamespace(kept=groups))
                now, _ = await loop.learn(context, now, batch, StepTimer())

        lines.clear()
        asyncio.run(learn())
        return SimpleNamespace(trainer=trainer, lines=list(lines), run_dir=run_dir)

    yield run
    run_dir.close()


CONTROL = (
    "algorithm.entropy_control.target=0.25",
    "algorithm.entropy_control.change=0.001",
    "run.checkpoint_every=1",
    "run.keep_checkpoints=9",
)


def test_the_entropy_bonus_follows_the_entropy_and_a_resume_goes_on_with_it(train):
    whole = train(range(1, 8), None, *CONTROL)
    expected = [0, 0, 0.001, 0, 0.001, 0.002, 0.001]
    assert whole.trainer.bonuses == pytest.approx(expected)
    assert [line["entropy_coefficient"] for line in whole.lines] == whole.trainer.bonuses
    check_declared(whole.lines[0])
    for killed_after in (3, 4):
        train(range(1, killed_after + 1), None, *CONTROL)
        saved = load_progress(whole.run_dir.path / "checkpoints" / f"step_{killed_after}")
        rest = train(range(killed_after + 1, 8), saved, *CONTROL)
        assert rest.trainer.bonuses == whole.trainer.bonuses[killed_after:]


def test_without_a_target_the_weight_is_the_configs(train):
    found = train(range(1, 4), None, "algorithm.entropy_coefficient=0.01")
    assert found.trainer.bonuses == [0.01] * 3
    assert "entropy_coefficient" not in found.lines[0]


RESET = ("algorithm.kl.coefficient=0.1", "algorithm.kl.reset_every=2", "run.checkpoint_every=1")


def test_the_reference_is_reset_stored_and_named_by_the_checkpoint(train):
    found = train(range(1, 8), None, *RESET)
    assert found.trainer.resets == [True] * 3
    path = found.run_dir.path
    assert load_progress(path / "checkpoints" / "step_7").reference_step == 6
    assert (path / "references" / "step_6" / "model.safetensors").read_text() == "after 6"
    there = sorted(each.name for each in (path / "references").iterdir())
    assert there == ["step_4", "step_6"], "when step 6 began, the oldest checkpoint was that of step 4"
    (path / "references" / "step_5").mkdir()  # of steps that a resume made void, with another reset_every
    _remove_unnamed(found.run_dir)
    assert [each.name for each in (path / "references").iterdir()] == ["step_6"], "both checkpoints name it"
    kept = train(range(1, 4), None, *RESET, "algorithm.kl.reset_optimizer=false")
    assert kept.trainer.resets == [False]
    assert train(range(1, 4), None, "algorithm.kl.coefficient=0.1").trainer.resets == []
