"""Runs a function on ranks whose process groups are strict, on tensors of the emulated device."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_dapo.actor.ranks import RankPlace, RankPool
from tests.emulated import strict_board


@dataclass(frozen=True, kw_only=True)
class Broken:
    """What a rank's function raised instead of returning: a rule that it broke, or a hang."""

    kind: str
    text: str


class StrictRanks:
    """Fresh processes, for nothing else: each is patched for good by its first call."""

    def __init__(self) -> None:
        self._pool = RankPool()

    def run(
        self,
        n: int,
        function: Callable[..., Any],
        *args: Any,
        patience_s: float = 60,
        timeout_s: float = 240,
    ) -> list[Any]:
        """Results of `function(place, *args)` in rank order; a `Broken` where it raised a StrictError."""
        return self._pool.run(n, _on_rank, function, args, patience_s, timeout_s=timeout_s)

    def close(self) -> None:
        """End the processes."""
        self._pool.close()


def _on_rank(place: RankPlace, function: Callable[..., Any], args: tuple[Any, ...], patience_s: float) -> Any:
    os.environ[strict_board.PATIENCE] = str(patience_s)
    _install_once()
    try:
        return function(place, *args)
    except strict_board.StrictError as error:
        return Broken(kind=type(error).__name__, text=str(error))


def _install_once() -> None:
    from tests.emulated import strict_device, strict_nccl, strict_stream

    if not isinstance(strict_stream.device, strict_device.EmulatedDevice):
        strict_nccl.install(emulated_device=True)
        strict_device.answer_megatron(strict_stream.device)
    strict_stream.device.flying.clear()
    strict_nccl.faults.clear()
    strict_nccl.log.clear()
