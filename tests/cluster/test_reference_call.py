"""What the ranks are sent for log-probs under the reference."""

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np

from megatron_dapo.actor.step_data import Responses
from megatron_dapo.cluster.trainer import Trainer
from megatron_dapo.config.actor_config import ActorConfig


def test_no_routing_travels_to_the_reference() -> None:
    """Its routers choose for themselves, and the rows of a batch are gigabytes."""
    sent: list[Responses] = []
    actor = SimpleNamespace(reference_log_probs=lambda *asked: sent.append(asked[0]))
    actor.log_probs = actor.reference_log_probs
    trainer: Any = Trainer.__new__(Trainer)
    trainer._config, trainer._model = SimpleNamespace(actor=ActorConfig()), SimpleNamespace(hidden_size=8)

    async def everyone(name: str, call: Any) -> None:
        call(SimpleNamespace(actor=actor))

    trainer._everyone = everyone
    pair = np.arange(3, dtype=np.int32), np.arange(2, dtype=np.int32)
    responses = Responses.of([pair], routing=[np.zeros((4, 2, 1), np.uint8)])
    for reference in (False, True):
        asyncio.run(trainer.log_probs(responses, 1.0, reference=reference))
    assert sent[0] is responses
    assert sent[1].routing is None
