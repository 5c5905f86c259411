"""What `eval`, `ask` and tools start on this machine, without Ray: rollout servers with no trainer beside them."""

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from megatron_dapo.cluster.engines import KEY_FILE, api_key, own_engines, servers_ready, visible_gpus
from megatron_dapo.cluster.waits import Waits, ready_after
from megatron_dapo.config import Config
from rollout.config import QUANTIZATION
from rollout.fleet.fleet import RolloutFleet


def local_device(config: Config) -> Literal["cpu", "cuda"]:
    """What `actor.device` means on this machine."""
    return "cuda" if config.actor.device != "cpu" and torch.cuda.is_available() else "cpu"


def with_own_servers(config: Config, model: Path) -> Config:
    """The same config, its servers started here with `model`, on free ports; in FP8 if its weights are."""
    config_file = model / "config.json"
    fields = json.loads(config_file.read_bytes()) if config_file.is_file() else {}
    quantization: Any = "fp8" if fields.get("quantization_config") == QUANTIZATION else "none"
    own: dict[str, Any] = {"urls": (), "api_key_file": None, "port": 0, "weight_sync": "disk"}
    rollout = replace(config.rollout, quantization=quantization, **own)
    run = replace(config.run, mode="sync")  # nobody trains beside them
    return replace(config, run=run, rollout=rollout, model=replace(config.model, path=str(model)))


@asynccontextmanager
async def local_fleet(
    config: Config, folder: Path, waits: Waits, *, vocab_size: int, report: Callable[[str], None]
) -> AsyncIterator[RolloutFleet]:
    """The servers of `rollout.urls`, or started ones that load `model.path`; those end with the context.

    Args:
        folder: gets the servers' logs and key.

    Raises:
        RolloutError, PlacementError: a server did not start.
        Stalled, StopRequested: as `Waits.wait_for`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    gpus = visible_gpus(torch.cuda.device_count()) if local_device(config) == "cuda" else ()
    engines = own_engines(config, folder / "logs", gpus=gpus)
    key = api_key(config, folder)
    wanted: dict[str, Any] = {"fp32_head": config.model.upcasts_head, "routed_experts": config.actor.routing_replay}
    fleet = RolloutFleet(config.rollout, engines, vocab_size=vocab_size, report=report, api_key=key, **wanted)
    deadline = config.run.start_deadline_s
    try:
        report(f"{'asking' if config.rollout.urls else 'starting'} {len(engines)} server(s)")
        count, answer = partial(servers_ready, fleet), fleet.start(deadline)
        starting = waits.wait_for("server start", "SGLang servers", deadline + 30, answer, stoppable=True, count=count)
        await ready_after(report, "servers", starting)
        yield fleet
    finally:
        await fleet.close()
        (folder / KEY_FILE).unlink(missing_ok=True)
