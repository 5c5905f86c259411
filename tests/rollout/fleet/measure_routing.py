"""`python -m tests.rollout.fleet.measure_routing`: which server gets which request, ours against round-robin.

In virtual time, the product's balancer stands before modelled servers
(tests/simulation/modelled_engine.py), one of which is slow. All responses of one batch are asked for at
once; lengths are long-tailed. A server reads a prompt once for all responses that it gets of the group (prefix cache).
"""

import asyncio
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from statistics import fmean
from typing import Protocol, cast

from megatron_dapo.plan.rollout import Workload
from rollout.fleet.balancer import Balancer
from rollout.fleet.member import Member, State
from rollout.server.engine import RemoteServer
from rollout.wire.client import SglangClient
from tests.simulation.modelled_engine import Engine, Response, Speed
from tests.simulation.modelled_fleet import Prompts
from tests.simulation.virtual_time import run_virtually

SERVERS, SLOTS, GROUPS, GROUP_SIZE = 16, 32, 128, 16
SEEDS = 6
WORKLOAD = Workload(
    mean_response=4700,
    sigma=0.9,
    difficulty_share=0.5,
    mean_prompt=1000,
    pass_rate=0.72,
    longest=20480,
    group_size=GROUP_SIZE,
)


@dataclass(frozen=True, kw_only=True)
class Routed:
    """One batch of responses."""

    seconds: float
    """Until the last one has ended."""
    mean_seconds: float
    """Until a group has ended, from the beginning of the batch."""
    prefills: float
    """Servers that read a group's prompt, mean over the groups."""
    slow_share: float
    """Of the requests, at the slow server; 1 / servers is its share by number."""


class Router(Protocol):
    """A place for each request."""

    async def acquire(self, group_id: str) -> Member: ...

    def release(self, member: Member) -> None: ...


class RoundRobin:
    """Request i goes to server i modulo their number, and waits there for a place."""

    def __init__(self, members: list[Member], limit: int) -> None:
        self._members, self._next = members, 0
        self._places = {id(member): asyncio.Semaphore(limit) for member in members}

    async def acquire(self, group_id: str) -> Member:
        member = self._members[self._next % len(self._members)]
        self._next += 1
        await self._places[id(member)].acquire()
        return member

    def release(self, member: Member) -> None:
        self._places[id(member)].release()


async def route(make: Callable[[list[Member], int], Router], slowness: float, seed: int) -> Routed:
    """One batch; server 0 takes `slowness` times as long as the others for everything."""
    loop = asyncio.get_running_loop()
    base = Speed()
    slow = Speed(
        fixed_s=base.fixed_s * slowness, context_s=base.context_s * slowness, prefill_s=base.prefill_s * slowness
    )
    engines = [Engine(slow if number == 0 else base, SLOTS, lambda _: None) for number in range(SERVERS)]
    connect = partial(SglangClient, request_deadline_s=1.0)
    members = [Member(RemoteServer(f"http://server{number}"), connect) for number in range(SERVERS)]
    for member in members:
        member.enter(State.READY)
    router, number_of = make(members, SLOTS), {id(member): number for number, member in enumerate(members)}
    prompts, requests, readers = Prompts(WORKLOAD, seed), Counter[int](), set[tuple[int, int]]()

    async def one(group: int, length: int) -> None:
        member = await router.acquire(f"p{group}")
        number, ended = number_of[id(member)], cast("asyncio.Future[Response]", loop.create_future())
        requests[number] += 1
        read = 0 if (group, number) in readers else round(WORKLOAD.mean_prompt)
        readers.add((group, number))
        engines[number].add(Response(length, read, ended.set_result))
        engines[number].set_timer()
        await ended
        router.release(member)

    async def whole(group: int) -> float:
        await asyncio.gather(*(one(group, length) for length in prompts.group(group).lengths))
        return loop.time()

    ends = await asyncio.gather(*(whole(group) for group in range(GROUPS)))
    return Routed(
        seconds=max(ends),
        mean_seconds=sum(ends) / GROUPS,
        prefills=len(readers) / GROUPS,
        slow_share=requests[0] / (GROUPS * GROUP_SIZE),
    )


def compare(slowness: float, seeds: int = SEEDS) -> tuple[Routed, Routed]:
    """(ours, round-robin) on the same responses; means over as many batches as `seeds`."""

    def mean(make: Callable[[list[Member], int], Router]) -> Routed:
        routed = [run_virtually(route(make, slowness, seed)) for seed in range(seeds)]
        return Routed(**{field.name: fmean(getattr(one, field.name) for one in routed) for field in fields(Routed)})

    return mean(lambda members, limit: cast(Router, Balancer(members, limit))), mean(RoundRobin)


def main() -> int:
    print(f"{SERVERS} servers x {SLOTS} slots, one of them slow; {SEEDS} batches of {GROUPS} x {GROUP_SIZE} responses")
    print("\n| slow server | routing | batch, s | mean group, s | prompts read a group | share of the slow server |")
    print("|---|---|---|---|---|---|")
    for slowness in (1.0, 2.0, 4.0):
        for name, routed in zip(("ours", "round-robin"), compare(slowness), strict=True):
            print(
                f"| {slowness:g}x | {name} | {routed.seconds:.0f} | {routed.mean_seconds:.0f} | {routed.prefills:.2f} "
                f"| {routed.slow_share:.1%} |"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
