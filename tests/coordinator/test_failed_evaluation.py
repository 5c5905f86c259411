"""An evaluation during training that fails ends the run, and costs no step that was trained."""

import contextlib
from types import SimpleNamespace

import pytest

from megatron_dapo.cluster.waits import Stalled, StopRequested
from megatron_dapo.config import load_config
from megatron_dapo.coordinator import loop
from rollout.errors import FleetLost
from tests.coordinator.test_checkpoints import progress, run, steps  # noqa: F401 - a fixture
from tests.processes import ROOT

KEYS = ["run.rollout_steps=9", "run.checkpoint_every=10", "evaluation.every=5", "run.checkpoint_minutes=60"]


class Phases:
    @contextlib.contextmanager
    def measure(self, name):
        yield

    def seconds(self):
        return {}


@pytest.fixture
def trained(run, monkeypatch):  # noqa: F811
    """`trained(evaluate)`: trains with it; (around, rollout steps that were recorded)."""
    recorded = []

    def gives(value):
        async def call(*_):
            return value

        return call

    async def fill_batch(*_):
        return SimpleNamespace(admission=SimpleNamespace(kept=()))

    monkeypatch.setattr(loop, "fill_batch", fill_batch)
    monkeypatch.setattr(loop, "update_actor", gives(([1, 2], None)))
    monkeypatch.setattr(loop, "reset_reference", gives(False))
    monkeypatch.setattr(loop, "publish_weights", gives({}))
    monkeypatch.setattr(loop, "entropy_weight", lambda *_: (0.0, None))
    monkeypatch.setattr(loop, "step_metrics", lambda config, progress, *_: {"step": progress.rollout_step})
    monkeypatch.setattr(loop, "write_records", lambda context, metrics, batch: recorded.append(metrics["step"]))
    config = load_config(ROOT / "examples" / "quickstart" / "dapo.yaml", KEYS)

    def train(evaluate):
        async def body(checkpoints, ranks, around):
            sampler = SimpleNamespace(
                refresh=gives(None),
                record_trained=lambda *_: None,
                snapshot=lambda step: progress(step).sampler,
                under_way=lambda: progress(0).sampler,
            )
            context = SimpleNamespace(
                config=config,
                timeline=SimpleNamespace(begin=lambda step: Phases()),
                checkpoints=checkpoints,
                sampler=sampler,
                trainer=None,
                run_dir=around.run_dir,
                inputs=SimpleNamespace(model=SimpleNamespace(hidden_size=8)),
                evaluate=evaluate,
                handover=SimpleNamespace(to_trainer=gives(None)),
                fleet=SimpleNamespace(statistics=SimpleNamespace(take=dict)),
                console=SimpleNamespace(step=lambda metrics, total: None, note=print),
            )
            await loop.train(context, progress(0))

        return run(body, checkpoint_every=10)

    return SimpleNamespace(train=train, recorded=recorded, look=lambda: steps(run(gives(None))))


@pytest.mark.parametrize(
    "error", [Stalled("held-out answers"), FleetLost("all")], ids=lambda error: type(error).__name__
)
def test_the_step_before_it_is_in_a_checkpoint_and_in_the_records(trained, error):
    async def evaluate(name):
        raise error

    with pytest.raises(type(error), match=str(error)):
        trained.train(evaluate)
    assert trained.look() == [5]
    assert trained.recorded == [1, 2, 3, 4, 5]


def test_a_stop_request_ends_it_alone(trained):
    """The next wait, here none, is what ends the run."""

    async def evaluate(name):
        raise StopRequested

    trained.train(evaluate)
    assert trained.recorded == list(range(1, 10))
    assert trained.look() == [9]
