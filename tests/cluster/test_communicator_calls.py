"""When the ranks are told to suspend their communicators, and when to take their memory again."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_dapo.cluster.trainer import Trainer
from megatron_dapo.config.actor_config import ActorConfig, OffloadConfig


@pytest.mark.parametrize("asked", [True, False])
def test_the_trainers_turn_begins_with_its_first_call_and_a_look_begins_none(asked: bool) -> None:
    told: list[str] = []

    def says(name: str) -> Any:
        return lambda *_, **__: told.append(name)

    communicators = SimpleNamespace(suspend=says("suspend"), resume=says("resume"))
    actor = SimpleNamespace(
        communicators=communicators, export_hf=says("export"), finish_checkpoint=says("checkpoint's end")
    )
    rank = SimpleNamespace(actor=actor, device_memory=says("look"))
    trainer: Any = Trainer.__new__(Trainer)
    trainer._config = SimpleNamespace(actor=ActorConfig(offload=OffloadConfig(communicators=asked)))
    trainer.recorded_step = None

    async def each(name: str, call: Any, step: int | None = None) -> list[Any]:
        return [call(rank)]

    async def turns() -> None:
        await trainer.suspend_communicators()
        await trainer.device_memory()
        await trainer.checkpoint_finished()
        await trainer.export_hf("folder")

    trainer._each = each
    asyncio.run(turns())
    assert told == ["suspend"] * asked + ["look", "checkpoint's end", "resume", "export"]
