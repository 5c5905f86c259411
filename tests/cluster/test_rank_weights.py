"""Weights from Megatron at TP=2 into other processes, by both transports, with peers that die, hang or refuse."""

import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from safetensors import safe_open

from rollout.weights.checksums import expected_checksums
from rollout.weights.transport import SendRequest, Target
from rollout.wire.client import ServerInfo
from tests import fork_server
from tests.actor.gloo import run_ranks
from tests.actor.tiny import save_tiny
from tests.actor.weights.test_hf_weights import assert_same_tensors, read_folder
from tests.coordinator.sync_kit import send
from tests.rollout.peer import play

pytestmark = pytest.mark.timeout(300)
ONE = ServerInfo(device="cpu", dtype="float32", tensor_parallel=1)
BUCKET = 200_000


@dataclass(frozen=True, kw_only=True)
class Started:
    process: BaseProcess
    folder: Path
    target: Target

    def held(self) -> tuple[str, dict]:
        with safe_open(self.folder / "held.safetensors", framework="pt") as file:
            return file.metadata()["label"], {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118

    def times(self) -> dict[str, int]:
        with safe_open(self.folder / "held.safetensors", framework="pt") as file:
            return json.loads(file.metadata()["times"])

    def sources(self) -> list[str]:
        with safe_open(self.folder / "held.safetensors", framework="pt") as file:
            return file.metadata()["sources"].split()


@contextlib.contextmanager
def peers(root: Path, *faults: tuple[str, ...]) -> Iterator[list[Started]]:
    started = []
    fork_server.start()
    try:
        for number, fault in enumerate(faults):
            folder = root / f"peer{number}"
            folder.mkdir()
            process = fork_server.CONTEXT.Process(target=play, args=(folder, *fault), daemon=True)
            process.start()
            started.append((process, folder))
        deadline = time.monotonic() + 120
        while not all((folder / "port").exists() for _, folder in started):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield [
            Started(
                process=process,
                folder=folder,
                target=Target(url=f"http://127.0.0.1:{(folder / 'port').read_text()}", info=ONE, restarts=0),
            )
            for process, folder in started
        ]
    finally:
        for process, _ in started:
            process.kill()
            process.join()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"), "qwen2", tied=False)


def request(transport: str, started: list[Started], label: str = "7", deadline_s: float = 30.0) -> SendRequest:
    return SendRequest(
        transport=transport,
        targets=tuple(each.target for each in started),
        label=label,
        deadline_s=deadline_s,
        backend="gloo",
        api_key_file=None,
    )


def test_every_peer_holds_the_model_and_the_trainer_knows_its_checksums(folder, tmp_path):
    with peers(tmp_path, (), ()) as started:
        requests = [request("distributed", those, label) for those, label in ((started, "7"), (started, "8"))]
        requests.append(request("distributed", started[:1]))
        (first, second, alone), other = run_ranks(2, send, folder, requests, [ONE], BUCKET, timeout_s=120)
        assert other == [None] * 3
        whole = read_folder(folder)
        for sent in (first, second, alone):
            assert sent.failures == {}
            assert sent.checksums == {ONE: expected_checksums(folder, ONE)}
            assert sent.bytes == sum(tensor.nbytes for tensor in whole.values())
            assert sent.bytes > 2 * BUCKET
        for each, label in zip(started, ("7", "8"), strict=True):
            held, tensors = each.held()
            assert held == label  # the last request left the second peer out
            assert_same_tensors(tensors, whole)


TENSOR, STAGES = {"tensor": 2}, {"pipeline": 2}


@pytest.mark.parametrize(
    ("fault", "layout"),
    [
        (("exit", 1), TENSOR),
        (("hang", 1), STAGES),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (("refuse", 1), TENSOR),
                (("exit", -1), TENSOR),
                (("exit", -1), STAGES),
                (("hang", 1), TENSOR),
                (("exit", 1), STAGES),
                (("refuse", 1), STAGES),
            )
        ),
    ],
    ids=str,
)
def test_by_group_all_fail_in_time_and_the_next_group_works(folder, tmp_path, fault, layout):
    """The trainer is back within the deadline and the grace; it sends again to the peers that are left. Of two stages
    the other sends nothing more, and waits for no deadline of its own."""
    with peers(tmp_path, (), fault) as started:
        clock = time.monotonic()
        requests = [request("distributed", started, deadline_s=5.0), request("distributed", started[:1], "9")]
        more = ("cpu", "float32", None, layout)
        (failed, again), _ = run_ranks(2, send, folder, requests, [ONE], BUCKET, *more, timeout_s=150)
        assert time.monotonic() - clock < 80
        good, bad = started
        assert failed.failures.keys() == {good.target.url, bad.target.url}
        assert failed.failures[bad.target.url].answers is (fault[0] == "refuse")
        assert failed.checksums == {ONE: expected_checksums(folder, ONE)}
        if again.failures:  # it is still held by the broken group: the fleet restarts it
            assert not failed.failures[good.target.url].answers
        else:
            held, tensors = good.held()
            assert held == "9"
            assert_same_tensors(tensors, read_folder(folder))


def beside(started: list[Started], each: int = 1, **changes) -> SendRequest:
    """The servers in their places, of `each` ranks."""
    info = replace(ONE, tensor_parallel=each)
    targets = tuple(replace(one.target, index=index, info=info) for index, one in enumerate(started))
    return replace(request("tensor", started), targets=targets, **changes)


@pytest.mark.parametrize("each", [1, 2])
def test_beside_the_trainers_ranks_each_servers_rank_maps_the_memory_of_its_own(folder, tmp_path, each):
    """Two servers of one rank, or one of two; the first rank beside a server sends."""
    with peers(tmp_path, *[()] * (2 // each)) as started:
        asked, kind = beside(started, each), replace(ONE, tensor_parallel=each)
        again = replace(asked, label="8")
        first, second = run_ranks(2, send, folder, [asked, again], [kind], BUCKET, timeout_s=120)
        for sent in first:
            assert sent.failures == {}
            assert sent.checksums == {kind: expected_checksums(folder, kind)}
            assert sent.bytes > 2 * BUCKET
        sources = [one.sources() for one in started]
        assert [len(each_ones) for each_ones in sources] == [each] * len(started)
        assert len({pid for each_ones in sources for pid in each_ones}) == 2
        for one in started:
            held, tensors = one.held()
            assert held == "8"
            assert_same_tensors(tensors, read_folder(folder))
        assert second == [None, None]


@pytest.mark.parametrize("fault", [("exit", 1), ("hang", 1), ("refuse", 1)], ids=lambda value: value[0])
def test_beside_the_trainers_ranks_one_peer_fails_alone(folder, tmp_path, fault):
    """Rank 0 is told of it, and next time the server that is left is sent to alone."""
    with peers(tmp_path, (), fault) as started:
        good, bad = started
        asked = beside(started, deadline_s=3.0)
        alone = replace(asked, targets=asked.targets[:1], label="8")
        (sent, again), _ = run_ranks(2, send, folder, [asked, alone], [ONE], BUCKET, timeout_s=120)
        assert list(sent.failures) == [bad.target.url]
        assert sent.failures[bad.target.url].answers is (fault[0] == "refuse")
        assert again.failures == {}
        held, tensors = good.held()
        assert held == "8"
        assert_same_tensors(tensors, read_folder(folder))
