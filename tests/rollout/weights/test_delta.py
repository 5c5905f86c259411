"""`delta` by a real process group into two peers: what they then hold, what was sent, and when everything is."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rollout.weights.transport import Target
from rollout.wire.client import ServerInfo
from tests.cluster.test_rank_weights import Started, peers
from tests.rollout.folders import save_model
from tests.rollout.weights.memory_trainer import MemoryTrainer

pytestmark = pytest.mark.timeout(300)
INFO = ServerInfo(device="cpu", dtype="float32", tensor_parallel=1)


class Publishes:
    """By one trainer, to the peers as the fleet would name them."""

    def __init__(self, trainer: MemoryTrainer, started: list[Started]) -> None:
        self.trainer, self.started, self.version = trainer, started, 0
        self.targets = tuple(replace(each.target, info=INFO) for each in started)

    def __call__(self, *, share: float | None = None) -> None:
        """The next version; `share`: of the values that must have been sent."""
        self.version += 1
        sent = self.trainer.send_now(self.targets, str(self.version))
        assert sent.failures == {}
        for each in self.started:
            label, held = each.held()
            assert label == str(self.version)
            assert held.keys() == self.trainer.tensors.keys()
            assert all(torch.equal(held[name], tensor) for name, tensor in self.trainer.tensors.items())
        self.targets = tuple(replace(target, holds=str(self.version)) for target in self.targets)
        if share is not None:
            assert sent.changed == pytest.approx(share)

    def whole(self) -> bool:
        """Whether everything was sent, and nothing else."""
        size = sum(tensor.nbytes for tensor in self.trainer.tensors.values())
        return (self.trainer.sent[-1].changed, self.trainer.sent[-1].bytes) == (1.0, size)


@pytest.fixture
def trainer(tmp_path: Path) -> MemoryTrainer:
    save_model(tmp_path / "model", "qwen2", seed=1)
    return MemoryTrainer(tmp_path / "model", bucket_bytes=20_000)


@contextlib.contextmanager
def publishing(trainer: MemoryTrainer, root: Path, *faults: tuple[str, ...]) -> Iterator[Publishes]:
    with peers(root, *(faults or [(), ()])) as started:
        yield Publishes(trainer, started)


def test_the_changed_values_alone_are_sent_and_every_peer_holds_all(trainer: MemoryTrainer, tmp_path: Path) -> None:
    """In several buckets: all at first, a few, none, and all again."""
    count = sum(tensor.numel() for tensor in trainer.tensors.values())
    with publishing(trainer, tmp_path) as publish:
        assert len(list(trainer.buckets())) > 2
        publish()
        assert publish.whole()
        for share in (0.02, 0.1):
            before = trainer.held()
            trainer.change(share)
            changed = sum(int((before[name] != tensor).sum()) for name, tensor in trainer.tensors.items())
            publish(share=changed / count)
            bits = sum(-(-bucket.size // 4 // 8) for bucket, _ in trainer.buckets())
            assert trainer.sent[-1].bytes == 4 * changed + bits
        publish(share=0.0)
        trainer.change(1.0)
        publish()
        assert publish.whole()
        trainer.change(0.02)
        publish()
        assert not publish.whole()


def _other_label(publish: Publishes) -> None:
    """A server was given other weights than the last ones that were sent, or was not verified."""
    first, *others = publish.targets
    publish.targets = (replace(first, holds="other"), *others)


def _restarted(publish: Publishes) -> None:
    first, *others = publish.targets
    publish.targets = (replace(first, restarts=1), *others)


def _nobody(publish: Publishes) -> None:
    """A publish while all servers are down, which read it from a folder."""
    publish.trainer.change(0.05)
    publish.version += 1
    publish.trainer.send_now((), str(publish.version))
    for each in publish.targets:
        assert each.holds is not None
    publish.targets = tuple(replace(target, holds=str(publish.version)) for target in publish.targets)


def _broke_off(publish: Publishes) -> None:
    """The trainer failed in the middle of a publish."""
    buckets = publish.trainer.buckets
    publish.trainer.change(0.05)

    def some() -> Iterator:
        yield from list(buckets())[:2]
        raise OSError("a rank is lost")

    publish.trainer.buckets = some  # type: ignore[method-assign]
    with pytest.raises(OSError, match="a rank is lost"):
        publish.trainer.send_now(publish.targets, "broken off")
    publish.trainer.buckets = buckets  # type: ignore[method-assign]


@pytest.mark.parametrize("doubt", [_other_label, _restarted, _nobody, _broke_off], ids=lambda each: each.__name__)
def test_after_any_doubt_everything_is_sent(trainer: MemoryTrainer, tmp_path: Path, doubt) -> None:
    with publishing(trainer, tmp_path) as publish:
        publish()
        trainer.change(0.02)
        publish()
        assert not publish.whole()
        doubt(publish)
        trainer.change(0.02)
        publish()
        assert publish.whole()
        trainer.change(0.02)
        publish()
        assert not publish.whole()


def test_after_a_server_that_failed_everything_is_sent_to_the_rest(trainer: MemoryTrainer, tmp_path: Path) -> None:
    with publishing(trainer, tmp_path, (), ()) as publish:
        publish()
        trainer.change(0.02)
        lost = publish.started[1]
        lost.process.kill()
        trainer.deadline_s = 5.0
        sent = trainer.send_now(publish.targets, "failed")
        assert sent.failures.keys() == {target.url for target in publish.targets}
        assert sent.failures[lost.target.url].answers is False
        publish.started, publish.targets = publish.started[:1], publish.targets[:1]
        publish()
        assert publish.whole()


def test_a_bucket_with_a_new_nan_goes_whole(trainer: MemoryTrainer, tmp_path: Path) -> None:
    with publishing(trainer, tmp_path) as publish:
        publish()
        name = "model.layers.1.mlp.down_proj.weight"
        trainer.tensors[name].view(-1)[9] = torch.nan
        sent = trainer.send_now(publish.targets, "2")
        bucket = next(bucket for bucket, parts in trainer.buckets() if name in parts)
        assert sent.changed == pytest.approx(bucket.size / sum(each.size for each, _ in trainer.buckets()))
        held = publish.started[0].held()[1]
        assert held[name].view(torch.int32).equal(trainer.tensors[name].view(torch.int32))


def test_targets_are_the_same_whatever_they_hold() -> None:
    """Else every publish would have a group of its own."""
    target = Target(url="http://127.0.0.1:1", info=INFO, restarts=0)
    assert target == replace(target, holds="7")
