"""Fleets of stand-in servers, and what tests of them share."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from rollout.config import RolloutConfig
from rollout.fleet.fleet import RolloutFleet
from rollout.fleet.member import Timing
from rollout.generation import Generation, GenerationRequest, SamplingParams, ServedPart
from rollout.wire.client import SglangClient
from tests.rollout.folders import VOCABULARY
from tests.rollout.standin import StandIn

FAST = Timing(
    probe_interval_s=0.05,
    probe_deadline_s=0.5,
    failed_probes=2,
    scheduler_interval_s=0.1,
    scheduler_deadline_s=0.8,
    load_interval_s=0.05,
    control_deadline_s=2.0,
    load_deadline_s=10.0,
    first_backoff_s=0.05,
    longest_backoff_s=0.1,
    report_interval_s=0.2,
)


def request(
    name: str = "r", group: str | None = None, tokens: int = 5, prompt: Sequence[int] = (7,)
) -> GenerationRequest:
    return GenerationRequest(
        request_id=name,
        group_id=group or name,
        prompt_ids=np.array(prompt, np.int32),
        sampling=SamplingParams(max_new_tokens=tokens),
        seed=0,
    )


@asynccontextmanager
async def fleet_of(
    *engines: StandIn,
    reports: list[str] | None = None,
    timing: Timing = FAST,
    observe: Callable[[ServedPart], None] = lambda part: None,
    start_s: float = 5.0,
    routed_experts: bool = False,
    **settings: Any,
) -> AsyncIterator[RolloutFleet]:
    config = RolloutConfig(**({"request_deadline_s": 5.0, "fleet_deadline_s": 3.0} | settings))
    lines = [] if reports is None else reports
    options: dict[str, Any] = {"timing": timing, "observe": observe, "routed_experts": routed_experts}
    fleet = RolloutFleet(config, engines, vocab_size=VOCABULARY, report=lines.append, **options)
    await fleet.start(start_s)
    try:
        yield fleet
    finally:
        await fleet.close()


@asynccontextmanager
async def closing_client(client: SglangClient) -> AsyncIterator[SglangClient]:
    try:
        yield client
    finally:
        await client.close()


async def until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(30):
            await test()

    asyncio.run(bounded())


def check_tokens(generation: Generation, prompt: int, tokens: int) -> None:
    """Every token was drawn at its place, and by the version it says it was."""
    assert generation.token_ids.dtype == generation.weight_versions.dtype == np.int32
    assert generation.log_probs.dtype == np.float32
    assert generation.token_ids.size == generation.log_probs.size == generation.weight_versions.size == tokens
    positions = (prompt + np.arange(tokens)) % 10
    np.testing.assert_array_equal(generation.token_ids, 10 * generation.weight_versions + positions)
    np.testing.assert_array_equal(generation.log_probs, -generation.weight_versions.astype(np.float32))
