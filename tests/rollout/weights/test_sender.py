"""Two buckets in flight: what waits for what, what is held, and what becomes of an error."""

import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, TimeoutError
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rollout.errors import ServerUnavailable
from rollout.weights import sender as sending
from rollout.weights.sender import GroupCache, WeightSender
from rollout.weights.transport import Failure, SendRequest, Target
from rollout.wire.client import ServerInfo

INFO = ServerInfo(device="cpu", dtype="float32", tensor_parallel=1)
SHORT_S, LONG_S = 0.2, 20.0
SIZE = 8


class Gated:
    """A transport whose sends end when the test lets them."""

    def __init__(self, *_: Any) -> None:
        self.gates = [threading.Event() for _ in range(4)]
        self.begun = [threading.Event() for _ in range(4)]
        self.sent: list[tuple[list[int], str | None]] = []
        self.live: list[Any] = []
        self.most_held = 0
        self.error: BaseException | None = None

    def buffer(self, size: int) -> torch.Tensor:
        memory = torch.empty(size, dtype=torch.uint8)
        self.live.append(weakref.ref(memory))
        self.most_held = max(self.most_held, self.held())
        return memory

    async def send(self, buffer: torch.Tensor, bucket: Any, clients: Any, label: str | None) -> dict[str, Failure]:
        at = len(self.sent)
        self.sent.append((buffer.tolist(), label))
        self.begun[at].set()
        await sending.asyncio.to_thread(self.gates[at].wait, LONG_S)
        if self.error is not None:
            raise self.error
        return {}

    def held(self) -> int:
        return sum(reference() is not None for reference in self.live)


class Hashes:
    """Stands for a ChecksumStream."""

    def __init__(self) -> None:
        self.missing = {"a", "b", "c"}
        self.read: list[int] = []
        self.flushed = threading.Event()

    def add(self, tensors: dict[str, torch.Tensor]) -> None:
        self.missing -= tensors.keys()
        self.read += [int(tensor[0]) for tensor in tensors.values()]

    def flush(self) -> None:
        self.flushed.set()

    def finish(self) -> dict:
        return {}


@pytest.fixture
def kit(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    gated, hashes = Gated(), Hashes()
    monkeypatch.setattr(sending, "SharedMemoryTransport", type("Made", (), {"__new__": lambda *_: gated}))
    request = SendRequest(
        transport="tensor",
        targets=(Target(url="http://127.0.0.1:9", info=INFO, restarts=0),),
        label="7",
        deadline_s=LONG_S,
        backend="gloo",
        api_key_file=None,
    )
    sender = WeightSender(request, hashes, GroupCache(), torch.device("cpu"), None)  # type: ignore[arg-type]
    with ThreadPoolExecutor(1) as trainer:
        yield SimpleNamespace(gated=gated, hashes=hashes, sender=sender, trainer=trainer)


def put(sender: WeightSender, name: str, value: int) -> None:
    memory = sender.buffer(SIZE)
    memory.fill_(value)
    sender.put(SimpleNamespace(size=SIZE), {name: memory})


def test_the_next_bucket_is_gathered_while_one_is_sent_and_hashed(kit: SimpleNamespace) -> None:
    gated, hashes = kit.gated, kit.hashes
    with kit.sender as sender:
        put(sender, "a", 1)  # comes back while the servers load
        assert gated.begun[0].wait(LONG_S)
        assert hashes.flushed.wait(LONG_S), "hashed while it is sent"
        second = kit.trainer.submit(put, sender, "b", 2)
        with pytest.raises(TimeoutError):
            second.result(SHORT_S)
        assert gated.held() == 2
        assert not gated.begun[1].is_set(), "sent one after the other"
        gated.gates[0].set()
        second.result(LONG_S)
        for gate in gated.gates:
            gate.set()
        put(sender, "c", 3)
        report = sender.report()
    assert report.bytes == 3 * SIZE
    assert gated.most_held == 2
    assert hashes.read == [1, 2, 3]
    assert gated.sent == [([1] * SIZE, None), ([2] * SIZE, None), ([3] * SIZE, "7")]


def test_an_error_of_a_bucket_is_that_of_the_next_put_and_ends_the_sender(kit: SimpleNamespace) -> None:
    gated = kit.gated
    gated.error = RuntimeError("planted")
    gated.gates[0].set()

    def two_buckets() -> None:
        with kit.sender as sender:
            put(sender, "a", 1)
            put(sender, "b", 2)

    with pytest.raises(RuntimeError, match="planted"):
        two_buckets()
    assert len(gated.sent) == 1


def test_a_trainer_that_fails_while_a_bucket_is_sent_leaves_once_it_is(kit: SimpleNamespace) -> None:
    def fails() -> None:
        with kit.sender as sender:
            put(sender, "a", 1)
            raise OSError("a rank is lost")

    failed = kit.trainer.submit(fails)
    with pytest.raises(TimeoutError):
        failed.result(SHORT_S)
    kit.gated.gates[0].set()
    with pytest.raises(OSError, match="a rank is lost"):
        failed.result(LONG_S)


def test_a_server_that_fails_gets_no_more_and_the_rest_is_hashed(kit: SimpleNamespace) -> None:
    async def refused(*_: Any) -> dict[str, Failure]:
        failed = {"http://127.0.0.1:9": Failure(reason=str(ServerUnavailable("planted")), answers=False)}
        kit.gated.sent.append(([], None))
        return failed

    kit.gated.send = refused
    with kit.sender as sender:
        for value, name in enumerate("abc", 1):
            put(sender, name, value)
        report = sender.report()
    assert [failure.reason for failure in report.failures.values()] == ["planted"]
    assert len(kit.gated.sent) == 1
    assert kit.hashes.read == [1, 2, 3]
