"""What runs at the servers, and what they have drawn."""

import asyncio

from tests.rollout.fleet_kit import fleet_of, request, run, until
from tests.rollout.standin import StandIn


def test_the_load_is_what_runs_and_what_was_drawn() -> None:
    async def test() -> None:
        server = StandIn(seconds_a_token=0.02)
        server.stream_interval = 4
        async with fleet_of(server, stream_every=4) as fleet:
            assert fleet.load() == (0, 0, 0.0)
            await fleet.generate(request("short", tokens=5))
            assert fleet.load() == (5, 0, 0.0)
            answers = [asyncio.ensure_future(fleet.generate(request(name, tokens=30))) for name in ("long", "other")]
            await until(lambda: fleet.load()[0] >= 5 + 2 * 8)
            tokens, running, longest_s = fleet.load()
            assert tokens <= 5 + 2 * 28, "of what runs, what was streamed"
            assert running == 2
            assert 0.1 < longest_s < 5.0
            await asyncio.gather(*answers)
            assert fleet.load() == (65, 0, 0.0)

    run(test)
