"""`delta` to one half of the servers after the other: both are sent the same changes, and one copy of what they hold is
kept."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.cluster.test_rank_weights import Started, peers
from tests.rollout.folders import save_model
from tests.rollout.weights.memory_trainer import MemoryTrainer
from tests.rollout.weights.test_delta import INFO

pytestmark = pytest.mark.timeout(300)


class Halves:
    """One trainer and two peers, each a half."""

    def __init__(self, trainer: MemoryTrainer, started: list[Started]) -> None:
        self.trainer, self.started, self.version = trainer, started, 0
        self.targets = [replace(each.target, info=INFO, index=index) for index, each in enumerate(started)]

    def change(self) -> None:
        self.trainer.change(0.02)
        self.version += 1

    def send(self, half: int, *, more: bool) -> str:
        """Sends, and compares what the peer then holds with the trainer's, bit by bit. Returns what was sent."""
        sent = self.trainer.send_now(self.targets[half : half + 1], str(self.version), more=more)
        assert sent.failures == {}
        label, held = self.started[half].held()
        assert label == str(self.version)
        assert held.keys() == self.trainer.tensors.keys()
        assert all(torch.equal(held[name], tensor) for name, tensor in self.trainer.tensors.items())
        self.verified(half)
        assert sent.changed == 1.0 or 0.01 < sent.changed < 0.05
        return "all" if sent.changed == 1.0 else "changes"

    def verified(self, half: int) -> None:
        """The server holds the newest weights."""
        self.targets[half] = replace(self.targets[half], holds=str(self.version))

    def restarted(self, half: int) -> None:
        """And has read the newest weights from a folder."""
        self.targets[half] = replace(self.targets[half], restarts=self.targets[half].restarts + 1)
        self.verified(half)

    def publish(self) -> tuple[str, str]:
        self.change()
        return self.send(0, more=True), self.send(1, more=False)


@pytest.fixture
def trainer(tmp_path: Path) -> MemoryTrainer:
    save_model(tmp_path / "model", "qwen2", seed=1)
    return MemoryTrainer(tmp_path / "model", bucket_bytes=20_000)


@contextlib.contextmanager
def halves(trainer: MemoryTrainer, root: Path) -> Iterator[Halves]:
    with peers(root, (), ()) as started:
        made = Halves(trainer, started)
        assert made.publish() == ("all", "all")
        assert made.publish() == ("changes", "changes")
        yield made


def test_both_halves_are_sent_the_changes_alone_from_one_copy(trainer: MemoryTrainer, tmp_path: Path) -> None:
    with halves(trainer, tmp_path) as made:
        assert [made.publish() for _ in range(3)] == [("changes", "changes")] * 3
        held = sum(bucket.numel() for bucket in trainer.groups._base.buckets.values())
        assert held == sum(tensor.nbytes for tensor in trainer.tensors.values())


def test_a_restarted_half_is_sent_everything_and_the_other_one_not(trainer: MemoryTrainer, tmp_path: Path) -> None:
    with halves(trainer, tmp_path) as made:
        for half in (0, 1):
            made.restarted(half)
            assert made.publish() == ("all" if half == 0 else "changes", "all" if half == 1 else "changes")
            assert made.publish() == ("changes", "changes")


def _breaks_off(made: Halves, half: int) -> None:
    """Sending to a half ends in its middle, by an error of the trainer."""
    buckets = made.trainer.buckets

    def some() -> Iterator:
        yield from list(buckets())[:2]
        raise OSError("a rank is lost")

    made.trainer.buckets = some  # type: ignore[method-assign]
    with pytest.raises(OSError, match="a rank is lost"):
        made.trainer.send_now(made.targets[half : half + 1], str(made.version), more=half == 0)
    made.trainer.buckets = buckets  # type: ignore[method-assign]


@pytest.mark.slow
@pytest.mark.parametrize("restarts", [pytest.param(True, id="restarted"), pytest.param(False, id="as it is")])
def test_the_first_half_fails(trainer: MemoryTrainer, tmp_path: Path, restarts: bool) -> None:
    """The second is sent the changes all the same; the first everything, once, even if it believes to hold the old."""
    with halves(trainer, tmp_path) as made:
        made.change()
        _breaks_off(made, 0)
        assert made.send(1, more=False) == "changes"
        if restarts:
            made.restarted(0)
        assert made.publish() == ("all", "changes")
        assert made.publish() == ("changes", "changes")


def test_the_second_half_fails(trainer: MemoryTrainer, tmp_path: Path) -> None:
    """What the trainer keeps is then of two versions."""
    with halves(trainer, tmp_path) as made:
        made.change()
        assert made.send(0, more=True) == "changes"
        _breaks_off(made, 1)
        made.restarted(1)
        assert made.publish() == ("all", "all")
        assert made.publish() == ("changes", "changes")


def test_the_second_half_is_lost_before_its_turn(trainer: MemoryTrainer, tmp_path: Path) -> None:
    """What the trainer keeps is then old. While it is down, the first half is sent to alone, and soon changes again."""
    with halves(trainer, tmp_path) as made:
        made.change()
        assert made.send(0, more=True) == "changes"
        for sent in ("all", "changes"):
            made.change()
            assert made.send(0, more=False) == sent
        made.restarted(1)
        assert made.publish() == ("changes", "all")
        assert made.publish() == ("changes", "changes")


@pytest.mark.slow
def test_a_half_that_was_sent_to_together_with_the_other(trainer: MemoryTrainer, tmp_path: Path) -> None:
    """Groups that share a server are never kept beside each other."""
    with halves(trainer, tmp_path) as made:
        made.change()
        sent = made.trainer.send_now(made.targets, str(made.version))
        assert (sent.failures, sent.changed) == ({}, 1.0)
        for half in (0, 1):
            made.verified(half)
        assert made.publish() == ("all", "all")
        assert made.publish() == ("changes", "changes")
