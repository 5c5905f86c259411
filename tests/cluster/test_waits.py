"""Law 5: every wait ends, by its answer or with an explanation, and what it asked has ended then."""

import asyncio

import pytest

from megatron_dapo.cluster.waits import Stalled, StopRequested, Waits
from megatron_dapo.monitor.console import Count


class Asked:
    """Something that answers after `seconds`, and knows whether it was ended before."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.ended = seconds, False

    async def answer(self) -> str:
        try:
            await asyncio.sleep(self.seconds)
            return "answer"
        except asyncio.CancelledError:
            await asyncio.sleep(0.01)  # cleaning up takes a moment
            self.ended = True
            raise


def test_an_answer_in_time_is_returned_and_the_wait_is_over():
    async def test():
        waits = Waits()
        assert await waits.wait_for("batch", "servers", 5, Asked(0.01).answer()) == "answer"
        assert waits.lines() == []

    asyncio.run(test())


def test_a_deadline_names_every_open_wait_and_where_tasks_stand():
    async def test():
        waits, asked = Waits(), Asked(60)
        other = asyncio.ensure_future(waits.wait_for("checkpoint", "2 trainer rank(s)", 60, Asked(60).answer()))
        await asyncio.sleep(0)
        with pytest.raises(Stalled) as caught:
            await waits.wait_for("batch of groups", "rollout servers", 0.05, asked.answer())
        assert asked.ended
        for part in ("batch of groups", "rollout servers", "0.05 s", "checkpoint: waiting for 2 trainer", "answer ("):
            assert part in str(caught.value)
        other.cancel()

    asyncio.run(test())


def test_the_loss_of_a_part_ends_open_waits_and_later_ones():
    async def test():
        waits, asked = Waits(), Asked(60)
        waiting = asyncio.ensure_future(waits.wait_for("batch", "servers", 60, asked.answer()))
        await asyncio.sleep(0.01)
        waits.lose(RuntimeError("rank 1 is gone"))
        with pytest.raises(RuntimeError, match="rank 1 is gone"):
            await waiting
        assert asked.ended
        with pytest.raises(RuntimeError, match="rank 1 is gone"):
            await waits.wait_for("update", "trainer", 60, Asked(60).answer())

    asyncio.run(test())


def test_a_stop_ends_only_the_waits_that_may_be_given_up():
    async def test():
        stop = asyncio.get_running_loop().create_future()
        waits = Waits(stop)
        filling = asyncio.ensure_future(waits.wait_for("batch", "servers", 60, Asked(60).answer(), stoppable=True))
        update = asyncio.ensure_future(waits.wait_for("update", "trainer", 60, Asked(0.1).answer()))
        await asyncio.sleep(0.01)
        stop.set_result(None)
        with pytest.raises(StopRequested):
            await filling
        assert await update == "answer"

    asyncio.run(test())


def test_the_parts_own_timeout_is_not_the_waits():
    async def own():
        raise TimeoutError("the server's")

    async def test():
        with pytest.raises(TimeoutError, match="the server's"):
            await Waits().wait_for("batch", "servers", 60, own())

    asyncio.run(test())


def test_a_wait_says_how_far_its_answer_is():
    async def test():
        waits, done = Waits(), 0
        count = lambda: Count(done, 9, "answers", {"tokens/s": 12.6})  # noqa: E731
        other = asyncio.ensure_future(waits.wait_for("start", "servers", 60, Asked(60).answer()))
        waiting = asyncio.ensure_future(
            waits.wait_for("held-out answers", "servers", 0.2, Asked(60).answer(), count=count)
        )
        await asyncio.sleep(0.01)
        assert waits.counts() == {"held-out answers": Count(0, 9, "answers", {"tokens/s": 12.6})}
        done = 5
        assert waits.lines()[1].endswith(" of 0.2 s; 5 of 9 answers, 13 tokens/s")
        with pytest.raises(Stalled, match=r"held-out answers: waiting for .*; 5 of 9 answers, 13 tokens/s"):
            await waiting
        assert waits.counts() == {}
        other.cancel()

    asyncio.run(test())


def test_several_waits_of_one_name_are_one_line_and_one_count():
    """The oldest's: it is answered first."""
    waits = []

    async def test():
        open_waits = Waits()
        with (
            open_waits.register("trainer log_probs", "ranks", 60, lambda: Count(1, 2, "ranks")),
            open_waits.register("batch", "servers", 60),
            open_waits.register("trainer log_probs", "ranks", 60, lambda: Count(0, 2, "ranks")),
        ):
            waits.extend(open_waits.lines())
            assert open_waits.counts() == {"trainer log_probs": Count(1, 2, "ranks")}

    asyncio.run(test())
    assert [line.partition(" for 0 of")[0] for line in waits] == [
        "2 x trainer log_probs: waiting for ranks",
        "batch: waiting for servers",
    ]
    assert waits[0].endswith("; 1 of 2 ranks")
