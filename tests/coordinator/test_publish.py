"""The trainer's weights as the fleet asks for them: sent, or written for a server that has to read them."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_dapo.coordinator.publish import TrainerWeights
from megatron_dapo.coordinator.trainer import Trainer
from megatron_dapo.coordinator.waits import Waits
from rollout.client import ServerInfo
from rollout.config import RolloutConfig
from rollout.send import SendRequest, Sent
from rollout.transport import Target

CPU = ServerInfo(version="x", device="cpu", dtype="float32", tensor_parallel=1)
GPU = ServerInfo(version="x", device="cuda", dtype="bfloat16", tensor_parallel=1)


class Recorded(Trainer):
    """A trainer without ranks, which notes what its ranks would be asked, in order."""

    def __init__(self, *, use_gpu: bool = False) -> None:
        config = SimpleNamespace(rollout=SimpleNamespace(temperature=1.0))
        super().__init__(config, None, Path(), Waits(), use_gpu=use_gpu)  # type: ignore[arg-type]
        self.asked: list[str] = []
        self.requests: list[SendRequest] = []

    async def _everyone(self, method: str, *arguments: object, **_: object) -> object:
        self.asked.append(method)
        if method == "send":
            self.requests.append(arguments[0])  # type: ignore[arg-type]
        return {"write": {}, "send": Sent()}.get(method)


def weights(trainer: Trainer, *, transport: str = "distributed", shared_gpu: bool = False) -> TrainerWeights:
    services = SimpleNamespace(
        trainer=trainer, fleet=SimpleNamespace(kinds=(CPU,)), key_file=Path("key"), shared_gpu=shared_gpu
    )
    config = RolloutConfig(weight_sync=transport, sync_deadline_s=7.0)
    return TrainerWeights(services, config, Path("weights/v3"))


def test_they_are_written_as_long_as_the_trainer_holds_them() -> None:
    async def test() -> None:
        trainer = Recorded()
        held = weights(trainer)
        written = await held.to_disk()
        assert written is not None
        assert written.folder == Path("weights/v3")
        await trainer.update([], None)  # type: ignore[arg-type]
        assert await held.to_disk() is None
        assert trainer.asked == ["write", "update"]
        assert await weights(trainer).to_disk() is not None  # those of the next publish
        await trainer.load_checkpoint(Path("step_1"))
        assert await held.to_disk() is None

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
        await weights(trainer, shared_gpu=shared).send([Target(url="http://a:1", info=info, starts=2)], "3")
        (request,) = trainer.requests
        assert (request.transport, request.backend, request.label) == ("distributed", backend, "3")
        assert (request.deadline_s, request.api_key_file) == (7.0, Path("key"))
        assert request.targets[0].starts == 2

    asyncio.run(test())
