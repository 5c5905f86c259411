"""What a step that fails before it has changed any weights leaves behind."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_dapo.coordinator import loop
from megatron_dapo.coordinator.checkpoint import save_checkpoint
from megatron_dapo.coordinator.run_dir import RunDir
from megatron_dapo.coordinator.trainer import Trainer, TrainerError, TrainerLost, TrainerStalled
from megatron_dapo.coordinator.waits import Stalled, StopRequested, Waits

PARTS = SimpleNamespace(config=SimpleNamespace(run=SimpleNamespace(rollout_steps=2)))
PROGRESS = SimpleNamespace(rollout_step=1)


@pytest.mark.parametrize(
    ("error", "saves"),
    [
        (StopRequested(), True),
        (Stalled("the servers"), True),
        (TrainerStalled("the ranks"), False),
        (TrainerLost("a rank"), False),
    ],
)
def test_what_was_reached_is_saved_unless_the_trainer_cannot(monkeypatch, error, saves):
    saved = []

    async def fail(*_):
        raise error

    async def keep(_, progress):
        saved.append(progress)

    monkeypatch.setattr(loop, "fill_batch", fail)
    monkeypatch.setattr(loop, "keep_what_stands", keep)
    with pytest.raises(type(error)):
        asyncio.run(loop.train(PARTS, PROGRESS))
    assert bool(saved) is saves, "a trainer that does not answer would be waited for a second time"


def test_ranks_that_do_not_answer_in_time_are_told_apart_from_other_stalls():
    async def test():
        trainer = Trainer(None, None, Path(), Waits(), use_gpu=False)
        never = asyncio.get_running_loop().create_future()
        with pytest.raises(TrainerStalled, match=r"trainer update: 1 trainer rank\(s\) gave no answer within 0.05 s"):
            await trainer._ask("trainer update", 0.05, [never])

    asyncio.run(test())


def test_a_checkpoint_that_cannot_be_written_says_how_much_room_there_is(tmp_path):
    class Full:
        async def save_checkpoint(self, folder):
            raise TrainerError("trainer save_checkpoint failed\n  rank 0: unexpected pos 704 vs 598")

    run_dir = RunDir(tmp_path / "run", resume=False)
    parts = SimpleNamespace(run_dir=run_dir, services=SimpleNamespace(trainer=Full()))
    with pytest.raises(TrainerError, match=r"(?s)rank 0: .*step_2\.tmp: its disk has \d+ MB free"):
        asyncio.run(save_checkpoint(parts, SimpleNamespace(rollout_step=2)))
    assert run_dir.latest_checkpoint() is None
    run_dir.close()
