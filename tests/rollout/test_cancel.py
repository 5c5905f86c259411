"""Who is told to end does so, also where a deadline passes at the same moment: after a pause of the event loop both are
due at once, and aiohttp's own deadline then takes the cancellation for its own."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace

import numpy as np
import pytest

from rollout.generation import SamplingParams
from rollout.wire.client import SglangClient
from tests.rollout.fleet_kit import FAST, closing_client, fleet_of, run
from tests.rollout.standin import StandIn

PROMPT = np.array([7], np.int32)
CALLS: dict[str, Callable[[SglangClient], Awaitable[object]]] = {
    "health": lambda client: client.health(1.5),
    "response": lambda client: client.generate("r.", PROMPT, SamplingParams(max_new_tokens=5)),
    "stream": lambda client: client.generate("r.", PROMPT, SamplingParams(max_new_tokens=5), segments=[]),
}


async def pause(seconds: float) -> None:
    """The event loop stands still, as in a collection of garbage or on a machine that is busy elsewhere."""
    time.sleep(seconds)
    await asyncio.sleep(0)


@pytest.mark.parametrize("call", list(CALLS))
def test_a_call_that_is_cancelled_as_its_deadline_passes_is_cancelled(call: str) -> None:
    async def test() -> None:
        server = StandIn()
        await server.start()
        server.hangs, server.healthy = True, False
        async with closing_client(SglangClient(server.url, request_deadline_s=0.75, control_deadline_s=0.75)) as client:
            asked = asyncio.ensure_future(CALLS[call](client))
            await asyncio.sleep(0.2)
            await pause(1.7)
            asked.cancel()
            (result,) = await asyncio.gather(asked, return_exceptions=True)
        await server.close()
        assert isinstance(result, asyncio.CancelledError)

    run(test)


def test_a_fleet_whose_servers_are_silent_is_closed_after_a_pause() -> None:
    async def test() -> None:
        servers = [StandIn() for _ in range(4)]
        async with fleet_of(*servers, timing=replace(FAST, failed_probes=1000, probe_deadline_s=0.3)) as fleet:
            for server in servers:
                server.healthy = False
            await asyncio.sleep(0.2)
            await pause(0.5)
            async with asyncio.timeout(5):
                await fleet.close()

    run(test)
