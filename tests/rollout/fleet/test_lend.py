"""A server that is lent to another process: what it answers counts as far as it is about the server of then."""

import asyncio

import pytest

from rollout.errors import RolloutError
from rollout.fleet.member import Member, State
from rollout.fleet.request_loop import Drawn
from rollout.generation import FinishReason, ServedPart
from tests.rollout.fleet_kit import fleet_of, request, run, until
from tests.rollout.standin import StandIn


def test_what_is_said_of_a_lost_server_is_no_word_on_the_next_one() -> None:
    """Nor does it take the place of the reason that is known."""

    async def test() -> None:
        reports: list[str] = []
        leases: list[int] = []
        answered = asyncio.Event()

        async def draw(member: Member) -> Drawn:
            leases.append(member.restarts)
            if len(leases) == 1:
                await answered.wait()
                return Drawn(over=False, failure=f"{member.url}: it went down", state=State.DOWN)
            return Drawn(over=True)

        async with fleet_of(StandIn(), reports=reports) as fleet:
            (member,) = fleet.members
            lending = asyncio.ensure_future(fleet.lend(request(), draw))
            await until(lambda: leases)
            member.enter(State.DOWN, "the reason")
            await until(lambda: member.restarts == 1 and member.state is State.READY)
            answered.set()
            await lending
            assert (leases, member.restarts, member.state) == ([0, 1], 1, State.READY)
            assert "the reason" in reports[0]

    run(test)


def test_a_server_that_failed_a_play_is_probed_before_it_is_lent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[tuple[State, str]] = []
    enter = Member.enter

    def noted(member: Member, state: State, reason: str = "") -> None:
        entered.append((state, reason))
        enter(member, state, reason)

    async def test() -> None:
        leases: list[int] = []

        async def draw(member: Member) -> Drawn:
            leases.append(len(entered))
            last = len(leases) == 2
            return Drawn(over=last, failure=None if last else "500", state=State.SUSPECT)

        async with fleet_of(StandIn()) as fleet:
            monkeypatch.setattr(Member, "enter", noted)
            await fleet.lend(request(), draw)
            assert entered == [(State.SUSPECT, "500"), (State.READY, "")]
            assert leases == [0, 2]

    run(test)


def test_attempts_are_counted_for_each_turn() -> None:
    turn = ServedPart(
        request_id="a.",
        url="",
        start=0.0,
        end=1.0,
        prompt_tokens=1,
        tokens=2,
        weight_version=0,
        finish_reason=FinishReason.STOP,
    )

    async def test() -> None:
        leases: list[Member] = []

        async def draw(member: Member) -> Drawn:
            """Fails, behind a turn that is complete."""
            leases.append(member)
            last = len(leases) == 6
            return Drawn(over=last, failure=None if last else "500", parts=(turn,))

        async def fail(member: Member) -> Drawn:
            return Drawn(over=False, failure="500")

        async with fleet_of(StandIn(), max_attempts=2) as fleet:
            await fleet.lend(request(), draw)
            assert len(leases) == 6
            with pytest.raises(RolloutError, match="max_attempts = 2 attempts; last words: 500"):
                await fleet.lend(request(), fail)

    run(test)
