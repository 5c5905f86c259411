"""The trainer's weights as the fleet asks for them: sent, or written for a server that has to read them."""

import asyncio
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from megatron_dapo.cluster.trainer import Trainer
from megatron_dapo.cluster.trainer_rank import TrainerRank
from megatron_dapo.cluster.waits import Waits
from megatron_dapo.config import Config, ConfigError, load_config
from megatron_dapo.coordinator.publish import TrainerWeights, publish_weights
from rollout.config import RolloutConfig
from rollout.fleet.weight_update import PublishReport
from rollout.weights.sender import Sent
from rollout.weights.transport import SendRequest, Target
from rollout.wire.client import ServerInfo
from tests.plan.conftest import RECIPES

CPU = ServerInfo(device="cpu", dtype="float32", tensor_parallel=1)
GPU = ServerInfo(device="cuda", dtype="bfloat16", tensor_parallel=1)


class Recorded(Trainer):
    """A trainer without ranks, which notes what its ranks would be asked, in order."""

    def __init__(self, *, use_gpu: bool = False) -> None:
        config = SimpleNamespace(rollout=SimpleNamespace(temperature=1.0))
        super().__init__(config, None, Path(), Waits(), use_gpu=use_gpu)  # type: ignore[arg-type]
        self.asked: list[str] = []
        self.requests: list[SendRequest] = []
        self.hashed: list[tuple[ServerInfo, ...]] = []

    async def _everyone(self, name: str, call: Callable[..., object]) -> Any:
        self.asked.append(name)
        if name == "send":
            call(SimpleNamespace(weights=SimpleNamespace(send=self._sends)))
            return Sent(checksums={kind: {} for kind in self.hashed[-1]})
        return {"write": {}}.get(name)

    def _sends(self, request: SendRequest, kinds: Sequence[ServerInfo]) -> None:
        self.requests.append(request)
        self.hashed.append(tuple(kinds))


def weights(trainer: Trainer, *, transport: str = "distributed", shared_gpu: bool = False) -> TrainerWeights:
    return TrainerWeights(context_of(trainer, transport, shared_gpu), Path("weights/v3"), transport)  # type: ignore


def context_of(
    trainer: Trainer,
    transport: str,
    shared_gpu: bool,
    mode: str = "sync",
    servers: int = 2,
    *,
    trainer_has_it: bool = True,
) -> Any:
    config = SimpleNamespace(
        rollout=RolloutConfig(weight_sync=transport, sync_deadline_s=7.0, servers=servers),
        run=SimpleNamespace(mode=mode),
    )
    config.way_of_weights = partial(Config.way_of_weights, config)
    return SimpleNamespace(
        config=config,
        handover=SimpleNamespace(shared=mode == "colocated", trainer_has_it=trainer_has_it),
        run_dir=SimpleNamespace(path=Path("/run")),
        trainer=trainer,
        fleet=SimpleNamespace(kinds=(CPU,)),
        shared_gpu=shared_gpu,
    )


@pytest.mark.parametrize(
    ("use_gpu", "shared", "mode", "servers", "way"),
    [
        (True, False, "sync", 1, "distributed"),
        (True, False, "async", 2, "distributed"),
        (True, True, "sync", 1, "disk"),
        (True, False, "colocated", 2, "tensor"),
        (True, True, "colocated", 2, "tensor"),
        (True, False, "colocated", 1, "disk"),
        (False, False, "colocated", 2, "disk"),
        (False, False, "sync", 2, "disk"),
    ],
)
def test_the_way_is_chosen_by_whose_the_gpus_are(
    use_gpu: bool, shared: bool, mode: str, servers: int, way: str
) -> None:
    assert RolloutConfig().weight_sync == "auto"
    for asked, wanted in (("auto", way), ("tensor", "tensor"), ("delta", "delta")):
        config = context_of(None, asked, False, mode, servers).config  # type: ignore[arg-type]
        assert config.way_of_weights(on_gpus=use_gpu, shared=shared) == wanted


def test_changes_alone_are_not_sent_where_gpus_are_used_in_turn() -> None:
    """The memory of a server's weights is the trainer's meanwhile."""
    with pytest.raises(ConfigError, match=r"weight_sync = delta: run\.mode=colocated needs disk, or tensor"):
        load_config(RECIPES / "h100_32_colocated.yaml", ["rollout.weight_sync=delta"])


def test_they_are_written_as_long_as_the_trainer_holds_them() -> None:
    async def test() -> None:
        trainer = Recorded()
        held, too_late = weights(trainer), weights(trainer)
        written = await held.to_disk()
        assert written is not None
        assert written.folder == Path("weights/v3")
        assert not too_late.changed
        await trainer.update([], None, 1.0)  # type: ignore[arg-type]
        assert too_late.changed
        assert await too_late.to_disk() is None
        assert await held.to_disk() is written  # the folder stays until the next publish
        assert trainer.asked == ["write", "update"]
        assert await weights(trainer).to_disk() is not None  # those of the next publish
        await trainer.load_checkpoint(Path("step_1"))
        assert await too_late.to_disk() is None

    asyncio.run(test())


def test_colocated_they_are_written_in_the_trainers_turn_only() -> None:
    """Beside servers that have their memory the weights would not fit."""

    async def test() -> None:
        trainer = Recorded(use_gpu=True)
        for mode, has_it, written in (("colocated", True, 1), ("colocated", False, 1), ("sync", False, 2)):
            context = context_of(trainer, "auto", False, mode, trainer_has_it=has_it)
            found = await TrainerWeights(context, Path("weights/v3"), "tensor").to_disk()
            assert (found is not None, trainer.asked) == (has_it or mode == "sync", ["write"] * written)

    asyncio.run(test())


@pytest.mark.parametrize(
    ("use_gpu", "info", "shared", "backend"),
    [(False, CPU, False, "gloo"), (True, GPU, False, "nccl"), (True, GPU, True, "gloo"), (False, GPU, False, "gloo")],
)
def test_the_request_names_what_the_group_is_made_of(
    use_gpu: bool, info: ServerInfo, shared: bool, backend: str
) -> None:
    async def test() -> None:
        trainer = Recorded(use_gpu=use_gpu)
        target = Target(url="http://a:1", info=info, restarts=2)
        await weights(trainer, shared_gpu=shared).send([target], "3", more=False)
        (request,) = trainer.requests
        assert (request.transport, request.backend, request.label) == ("distributed", backend, "3")
        assert (request.deadline_s, request.api_key_file) == (7.0, Path("/run/.server-key"))
        assert request.targets[0].restarts == 2

    asyncio.run(test())


def test_checksums_are_computed_once_for_both_halves_of_the_servers() -> None:
    """And for a kind of server that appears between them, and anew for the next weights."""

    async def test() -> None:
        trainer = Recorded()
        context = context_of(trainer, "distributed", False)
        first, second = (TrainerWeights(context, Path("weights/v3"), "distributed") for _ in range(2))
        await first.send([], "3", more=True)
        context.fleet.kinds = (CPU, GPU)
        await first.send([], "3", more=False)
        await second.send([], "4", more=False)
        assert [request.more for request in trainer.requests] == [True, False, False]
        assert trainer.hashed == [(CPU,), (GPU,), (CPU, GPU)]

    asyncio.run(test())


class Built(Exception):
    """Instead of an actor."""


def environment_of_an_actor(
    patch: pytest.MonkeyPatch, names: tuple[str, ...], users: dict[str, str], *, sync: str, device: str, mode: str
) -> tuple[str | None, ...]:
    """The variables `names` where a rank builds its actor; `users`: those that somebody had set."""
    found: list[tuple] = []

    def actor(*_: object, **__: object) -> None:
        found.append(tuple(os.environ.get(name) for name in names))
        raise Built

    for name in (*names, "PYTORCH_ALLOC_CONF"):
        patch.setenv(name, users.get(name, ""))  # what the rank sets goes with the test
        if name not in users:
            patch.delenv(name)
    module = ModuleType("megatron_dapo.actor.actor")
    module.MegatronActor = actor  # type: ignore[attr-defined]
    patch.setitem(sys.modules, module.__name__, module)
    patch.setattr(TrainerRank, "_log_to_file", lambda _: None)
    rank = TrainerRank.__new__(TrainerRank)
    layout = SimpleNamespace(world_size=1)
    config = SimpleNamespace(
        rollout=RolloutConfig(weight_sync=sync),
        actor=SimpleNamespace(layout=layout, device=device),
        model=None,
        algorithm=SimpleNamespace(mini_batches_per_step=1, kl=SimpleNamespace(coefficient=0.0)),
        run=SimpleNamespace(seed=1, mode=mode),
    )
    with pytest.raises(Built):
        rank.build(config, 0, "file:///nowhere", 1.0)  # type: ignore[arg-type]
    [seen] = found
    return seen


@pytest.mark.parametrize(
    ("sync", "device", "mode", "users", "wanted"),
    [
        ("distributed", "cpu", "sync", {}, ("0", "0", "0")),
        ("auto", "auto", "sync", {}, ("0", "0", "0")),
        ("auto", "cuda", "async", {"NCCL_CUMEM_ENABLE": "1"}, ("1", "0", "0")),
        ("auto", "cuda", "colocated", {}, (None, None, None)),
        ("auto", "cpu", "sync", {}, (None, None, None)),
        ("disk", "cuda", "sync", {}, (None, None, None)),
    ],
)
def test_a_rank_that_shares_a_group_with_servers_has_their_variables_before_it_uses_nccl(
    monkeypatch: pytest.MonkeyPatch, sync: str, device: str, mode: str, users: dict, wanted: tuple
) -> None:
    names = ("NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE", "TORCH_NCCL_ENABLE_MONITORING")
    assert environment_of_an_actor(monkeypatch, names, users, sync=sync, device=device, mode=mode) == wanted


@pytest.mark.parametrize(
    ("mode", "users", "wanted"),
    [
        ("sync", {}, ("expandable_segments:True", None)),
        ("async", {}, ("expandable_segments:True", None)),
        ("colocated", {}, (None, None)),
        ("sync", {"PYTORCH_ALLOC_CONF": "max_split_size_mb:512"}, ("max_split_size_mb:512", None)),
        ("sync", {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512"}, (None, "max_split_size_mb:512")),
    ],
)
def test_a_rank_with_a_gpu_to_itself_has_memory_in_segments_that_grow(
    monkeypatch: pytest.MonkeyPatch, mode: str, users: dict, wanted: tuple
) -> None:
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    assert environment_of_an_actor(monkeypatch, names, users, sync="disk", device="cuda", mode=mode) == wanted


class Turns:
    """Whose the memory is, and what happens in which turn."""

    def __init__(self, *, shared: bool) -> None:
        self.shared, self.trainer_has_it, self.told = shared, False, list[str]()

    async def to_trainer(self) -> None:
        self.trainer_has_it = self.shared
        self.told.append("the trainer's")

    async def to_servers(self, *, weights_only: bool = False) -> None:
        self.trainer_has_it = self.shared and weights_only
        self.told.append("room for weights" if weights_only else "the servers'")


@pytest.mark.parametrize(("mode", "lost"), [("colocated", 0), ("colocated", 1), ("sync", 0), ("sync", 1)])
def test_what_a_publish_does_in_whose_turn(tmp_path: Path, mode: str, lost: int) -> None:
    """Colocated, a server that comes back later finds its weights on disk, written in the trainer's turn."""

    class Noting(Recorded):
        async def _everyone(self, name: str, call: Callable[..., object]) -> Any:
            turns.told.append(name)
            return await super()._everyone(name, call)

    async def test() -> None:
        context = context_of(Noting(use_gpu=True), "tensor", False, mode)
        members = [SimpleNamespace(weight_version=3) for _ in range(2)]

        async def publish_stream(weights: TrainerWeights, version: int) -> PublishReport:
            await weights.send([Target(url="http://a:1", info=GPU, restarts=0)], str(version), more=False)
            served = {f"http://{at}": 1 for at in range(2 - lost)}
            return PublishReport(servers=served, bytes=1, by_disk={}, standstill_s=0.0, stopped_s=0.0)

        async def wait_for(what: str, owner: str, deadline: float, work: Any, *, count: Any) -> Any:
            return await work

        context.handover = turns
        context.run_dir = SimpleNamespace(path=tmp_path, check_there=lambda: None)
        for name in ("v1", "v2", ".v2.tmp", "v3"):
            (tmp_path / "weights" / name).mkdir(parents=True)
        context.fleet = SimpleNamespace(kinds=(GPU,), members=members, publish_stream=publish_stream)
        context.config.run.step_deadline_s, context.waits = 5.0, SimpleNamespace(wait_for=wait_for)
        await publish_weights(context, 3)

    turns = Turns(shared=mode == "colocated")
    asyncio.run(test())
    written = ["write"] if lost and turns.shared else []
    assert turns.told == ["the trainer's", "room for weights", "send", *written, "the servers'"]
    left = {folder.name for folder in (tmp_path / "weights").iterdir()}
    assert left == ({"v2", ".v2.tmp", "v3"} if lost else {"v3"}), (
        "a server that is starting may still read those before"
    )
