"""A place at a server that is lent to another process, which draws there: a response, or an episode turn by turn.

The fleet chooses the server, counts failures and interrupts; the other process asks the server, with
`RequestLoop.attempt`. Until its answer is back it may draw, and no weights change at the server. So whatever ends the
requests of a server first tells the other process to stop (`Member.stop_lent`): it begins nothing more there, ends what
does not wait for the server, and the server's answers to the abort end the rest.
"""

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from rollout.fleet.member import Member, State
from rollout.fleet.request_loop import RequestLoop
from rollout.generation import GenerationRequest, ServedPart
from rollout.wire.client import ServerInfo


@dataclass(frozen=True, kw_only=True, slots=True)
class Lease:
    """Lease(url="http://127.0.0.1:30000", info=ServerInfo(...), weight_version=6, weight_label="6", since=None)"""

    url: str
    info: ServerInfo
    weight_version: int
    weight_label: str | None
    since: int | None
    """Weight version when the turn under way came to the server (`Response.home`); None: it was not there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawn:
    """What came of it. Drawn(over=False, failure="http://...: no answer within 1800 s", state=State.SUSPECT)"""

    over: bool
    """Whether all is drawn."""
    failure: str | None = None
    """Why the server did not do its part; None: it did, or was interrupted."""
    state: State = State.READY
    """What the failure says of the server."""
    since: int | None = None
    """As in `Lease`, of the turn that is not complete."""
    parts: tuple[ServedPart, ...] = ()


Draw = Callable[[Lease], Awaitable[Drawn]]
Stop = Callable[[str, bool], None]
"""As `Member.stop_lent`."""


async def lend(loop: RequestLoop, request: GenerationRequest, draw: Draw, stop: Stop) -> None:
    """See `RolloutFleet.lend`."""
    home: tuple[Member, int | None] | None = None
    over = False

    async def attempt(member: Member) -> str | None:
        nonlocal home, over
        assert member.info is not None
        version, before, member.stop_lent = member.weight_version, member.interruptions, stop
        since = home[1] if home is not None and home[0] is member else None
        label, info = member.weight_label, member.info
        loop.lent[attempt] = time.monotonic()
        member.drawing += 1
        try:
            drawn = await draw(
                Lease(url=member.url, info=info, weight_version=version, weight_label=label, since=since)
            )
        finally:
            member.drawing -= 1
            del loop.lent[attempt]
        over, home = drawn.over, (member, drawn.since)
        if drawn.parts:
            member.last_answer = time.monotonic()
        for part in drawn.parts:
            loop.served(part)
        # It may learn of an interruption by the server's answer first, which looks like a failure to it.
        if drawn.failure is None or (
            loop.interrupted_since(member, before) and member.serving and member.engine.alive()
        ):
            return None
        if drawn.state is State.DOWN or (drawn.state is State.SUSPECT and member.state is State.READY):
            member.enter(drawn.state, drawn.failure)
        return drawn.failure

    loop.check_vocabulary(request)
    await loop.until(lambda: over, request, attempt)
