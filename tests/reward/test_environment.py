"""Steps of environments in the pool: what they may return, and what becomes of those that raise, hang, flood or die."""

import asyncio
import math
import os
import time

import psutil
import pytest

from reward.check import check_environments
from reward.config import RewardConfig
from reward.environment import End, Episode, Observation, Turn, checked, shortened
from reward.pool.messages import decode_reply
from reward.pool.pool import RewardPool
from reward.verdict import PoolError, VerificationRequest, VerifierError
from tests.docs.documents import ROOT, blocks

ENVIRONMENTS = """
import asyncio, collections, os, subprocess, time
from reward.environment import End, Observation
from reward.verdict import VerifierError

def guess(episode):
    number, goal = int(episode.response), int(episode.ground_truth)
    return End(accuracy=True) if number == goal else Observation("higher" if number < goal else "lower")

async def counting(episode):
    await asyncio.sleep(0)
    state = (episode.state or 0) + 1
    if state > 2 or episode.last:
        return End(accuracy=False, reward=0.25, extracted=str(state))
    return Observation(f"{state} of {len(episode.turns)}", state=state, reward=0.5, role="tool")

def leaves_it(episode): return None
def hangs(episode):
    while True: pass
def sleeps(episode): time.sleep(60)
def dies(episode): os._exit(3)
def kills(episode): os.kill(os.getpid(), 9)
def exits(episode): raise SystemExit("enough")
def floods(episode): return Observation("x" * 50_000_000)
def fills(episode): return Observation("x" * 4_000_000_000)
def number(episode): return 7
def not_json(episode): return Observation("a", state={1, 2})
def large(episode): return Observation("a", state="x" * 70_000)
def half(episode): return Observation("a \\ud800 b")
def endless(episode): return Observation("a", reward=float("inf"))
def refuses(episode): raise VerifierError("the service is away")
async def late(episode): await asyncio.sleep(60)
def waits(episode):
    path = episode.ground_truth
    if os.path.exists(path):
        return Observation("again")
    with open(path + ".tmp", "w") as file:
        file.write(str(os.getpid()))
    os.rename(path + ".tmp", path)
    time.sleep(15)
LOCK = asyncio.Semaphore()
async def locks(episode):
    await LOCK.acquire()
    asyncio.get_running_loop().call_later(0.01, LOCK.release)
    await LOCK.acquire()  # waits, which ties it to the loop
    LOCK.release()
    return Observation("locked")
def dictionary(episode): return Observation("a", state=collections.defaultdict(int, {1: 2}))
def orphans(episode):
    with open(episode.ground_truth, "a") as file:
        file.write(f"{subprocess.Popen(['sleep', '300']).pid}\\n")
    os._exit(3)
def prints(episode):
    print("x" * 1_000_000); os.write(2, b"y" * 1_000_000); return Observation("said")
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "own_environments.py").write_text(ENVIRONMENTS)
    monkeypatch.syspath_prepend(tmp_path)
    return "own_environments:{}".format


def episode(*responses, truth="7", **fields):
    return Episode("?", truth, tuple(Turn(response) for response in responses), **fields)


def stepped(*steps, **config):
    async def ask():
        pool = RewardPool(RewardConfig(workers=1, memory_mb=512, **{"timeout_s": 1.0} | config))
        try:
            return [await pool.step(name, each) for name, each in steps]
        finally:
            pool.close()

    return asyncio.run(asyncio.wait_for(ask(), 90))


def test_an_environment_of_three_lines_goes_on_and_ends(own):
    low, right, wrong = stepped(
        (own("guess"), episode("5")), (own("guess"), episode("5", "7")), (own("guess"), episode("seven"))
    )
    assert (low.outcome, low.error) == (Observation("higher"), None)
    assert right.outcome == End(accuracy=True)
    assert (wrong.outcome, wrong.error[:10], wrong.unjudged) == (None, "ValueError", False)


def test_a_coroutine_gets_its_state_back_and_may_leave_the_verdict_to_the_verifier(own):
    one, two, over, left = stepped(
        (own("counting"), episode("a")),
        (own("counting"), episode("a", "b", state=1)),
        (own("counting"), episode("a", state=1, last=True)),
        (own("leaves_it"), episode("a")),
    )
    assert one.outcome == Observation("1 of 1", state=1, reward=0.5, role="tool")
    assert two.outcome == Observation("2 of 2", state=2, reward=0.5, role="tool")
    assert over.outcome == End(accuracy=False, reward=0.25, extracted="2")
    assert (left.outcome, left.error) == (None, None)


def test_one_that_hangs_dies_or_takes_all_memory_costs_its_own_episode_a_message(own):
    names = ("hangs", "sleeps", "late", "dies", "kills", "exits", "fills", "guess")
    *found, last = stepped(*[(own(name), episode("7")) for name in names])
    assert [each.error for each in found] == [
        *("timeout", "timeout", "timeout"),
        *("worker died (exit code 3)", "worker died (signal 9)", "SystemExit: enough", "memory"),
    ]
    assert not any(each.unjudged or each.outcome for each in found)
    assert last.outcome == End(accuracy=True)


def test_what_a_coroutine_keeps_serves_the_next_step_and_a_state_is_what_json_holds(own):
    locked, again, held = stepped(*[(own(name), episode("7")) for name in ("locks", "locks", "dictionary")])
    assert locked.outcome == again.outcome == Observation("locked")
    assert held.outcome == Observation("a", state={"1": 2})


def test_what_a_worker_started_ends_with_it_even_where_it_ended_itself(own, tmp_path):
    (died,) = stepped((own("orphans"), episode("7", truth=str(tmp_path / "pids"))))
    assert died.error == "worker died (exit code 3)"
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert pids
    deadline = time.monotonic() + 10
    while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_one_that_floods_is_cut_and_what_it_prints_goes_nowhere(own):
    flooded, printed, half = stepped(*[(own(name), episode("7")) for name in ("floods", "prints", "half")])
    assert 100_000 < len(flooded.outcome.text) < 200_000
    assert "characters left out" in flooded.outcome.text
    assert printed.outcome == Observation("said")
    assert half.outcome == Observation("a ? b")


def test_a_tool_that_hangs_delays_neither_verdicts_nor_other_steps_and_verdicts_no_step(own):
    async def ask():
        pool = RewardPool(RewardConfig(workers=1, algebra_workers=1, environment_workers=2, timeout_s=20.0))
        waiting = [asyncio.ensure_future(pool.step(own("sleeps"), episode("7")))]
        try:
            await asyncio.sleep(0.2)
            slow = VerificationRequest(response="{", ground_truth='{"equals": 7}', verifier="json")
            for _ in range(3):
                assert (await pool.step(own("guess"), episode("7"))).outcome == End(accuracy=True)
                (verdict,) = await pool.verify([slow])
                assert verdict.error is None
            long = VerificationRequest(response="15", ground_truth="15", verifier="tests.reward.hostile:sleep")
            waiting.append(asyncio.ensure_future(pool.verify([long])))
            await asyncio.sleep(0.2)
            assert (await pool.step(own("guess"), episode("7"))).outcome == End(accuracy=True)
            assert not any(each.done() for each in waiting)
        finally:
            await asyncio.to_thread(pool.close)
            errors = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(error) for error in errors] == [PoolError, PoolError]

    asyncio.run(asyncio.wait_for(ask(), 90))


def test_a_state_that_is_too_long_costs_the_episode_a_message(own):
    (found,) = stepped((own("large"), episode("7")))
    assert found.error.startswith("ValueError: the state has 70002 characters of JSON")
    assert not found.unjudged


@pytest.mark.parametrize("name", ["number", "not_json", "endless"])
def test_what_is_no_outcome_stops_the_run_and_is_refused_by_the_trial(own, name):
    (found,) = stepped((own(name), episode("7")))
    assert "it returned " in found.error or "JSON cannot hold the state" in found.error
    assert found.unjudged
    truths = {own(name): [("train.jsonl:1", "?", "7")]}
    with pytest.raises(VerifierError, match=r"data.environment = .*exit code"):
        check_environments({own(name): "data.environment"}, RewardConfig(), truths)


def test_what_no_response_is_to_blame_for_stops_the_run(own):
    refused, missing = stepped((own("refuses"), episode("7")), ("no_such_module:f", episode("7")))
    assert (refused.error, refused.unjudged) == ("the service is away", True)
    assert missing.unjudged
    assert "no_such_module" in missing.error
    (unknown,) = stepped(("gues", episode("7")))
    assert (unknown.error[:33], unknown.unjudged) == ("environment 'gues' is not known; ", True)


def test_a_closed_pool_says_so_and_a_step_that_is_given_up_leaves_its_worker_to_others(own):
    async def ask():
        pool = RewardPool(RewardConfig(workers=1, timeout_s=2.0))
        waiting = asyncio.ensure_future(pool.step(own("sleeps"), episode("7")))
        queued = asyncio.ensure_future(pool.step(own("guess"), episode("7")))
        await asyncio.sleep(0.3)
        waiting.cancel()
        found = await queued
        verdicts = await pool.verify([VerificationRequest(response="Answer: 7", ground_truth="7")])
        ending = asyncio.ensure_future(pool.step(own("sleeps"), episode("7")))
        await asyncio.sleep(0.5)
        await asyncio.to_thread(pool.close)
        with pytest.raises(PoolError):
            await ending
        with pytest.raises(PoolError):
            await pool.step(own("guess"), episode("7"))
        return found, verdicts

    found, verdicts = asyncio.run(asyncio.wait_for(ask(), 60))
    assert found.outcome == End(accuracy=True)
    assert verdicts[0].accuracy


@pytest.mark.parametrize("used", [False, True])
def test_a_worker_that_was_killed_by_others_is_replaced_and_the_step_asked_again(own, tmp_path, used):
    mark = tmp_path / "mark"

    async def ask():
        pool = RewardPool(RewardConfig(workers=1, environment_workers=1, timeout_s=20.0))
        try:
            if used:
                await pool.step(own("guess"), episode("7"))
            waiting = asyncio.ensure_future(pool.step(own("waits"), episode("7", truth=str(mark))))
            while not mark.exists():
                await asyncio.sleep(0.05)
            workers = pool.worker_pids()
            os.kill(int(mark.read_text()), 9)
            return workers, await waiting
        finally:
            pool.close()

    workers, found = asyncio.run(asyncio.wait_for(ask(), 60))
    assert int(mark.read_text()) in workers
    assert found.outcome == Observation("again")


def test_a_step_is_one_order_and_one_reply_and_wakes_each_thread_once(own, monkeypatch):
    replies, steps = [], 20

    def counted(content):
        replies.append(content)
        return decode_reply(content)

    async def ask():
        pool = RewardPool(RewardConfig(workers=1, environment_workers=1, timeout_s=20.0))
        try:
            await pool.verify([VerificationRequest(response="Answer: 7", ground_truth="7")])
            await pool.step(own("guess"), episode("5"))  # it imports the environment, and says when it has
            replies.clear()
            woken = []
            for loop in (pool._loop, asyncio.get_running_loop()):
                wake = loop.call_soon_threadsafe
                monkeypatch.setattr(
                    loop, "call_soon_threadsafe", lambda *what, wake=wake, **how: (woken.append(1), wake(*what, **how))
                )
            found = [await pool.step(own("guess"), episode("5")) for _ in range(steps)]
            monkeypatch.undo()
            return found, len(woken)
        finally:
            pool.close()

    monkeypatch.setattr("reward.pool.worker_process.decode_reply", counted)
    found, woken = asyncio.run(asyncio.wait_for(ask(), 60))
    assert [each.outcome for each in found] == [Observation("higher")] * steps
    assert len(replies) == steps
    assert woken == 2 * steps


def test_an_environment_that_can_be_run_passes_the_trial_and_one_that_cannot_is_named(own):
    truths = {own("guess"): [("train.jsonl:1", "?", "7"), ("train.jsonl:2", "?", "seven")]}
    check_environments({own("guess"): "data.environment"}, RewardConfig(), truths)
    with pytest.raises(VerifierError, match=r"data.mixture.1.environment = own_environments:nothing"):
        check_environments({own("nothing"): "data.mixture.1.environment"}, RewardConfig())
    with pytest.raises(VerifierError, match=r"evaluation.environment = own: .*environment 'own' is not known"):
        check_environments({"own": "evaluation.environment"}, RewardConfig())
    with pytest.raises(VerifierError, match=r"train.jsonl:1: the service is away"):
        check_environments({own("refuses"): "x"}, RewardConfig(), {own("refuses"): [("train.jsonl:1", "?", "7")]})


def test_a_conversation_reads_as_a_chat():
    turns = (Turn("5", "higher"), Turn("call", "12", role="tool"), Turn("7"))
    assert [tuple(message.values()) for message in Episode("?", "7", turns).messages] == [
        *(("user", "?"), ("assistant", "5"), ("user", "higher"), ("assistant", "call"), ("tool", "12")),
        ("assistant", "7"),
    ]


@pytest.mark.parametrize(
    "reply",
    [
        b'[{"kind": "Observation", "outcome": {"text": 7}, "seconds": 0.1}]',
        b'[{"kind": "End", "outcome": {"accuracy": 1}, "seconds": 0.1}]',
        b'[{"kind": "End", "outcome": null, "seconds": 0.1}]',
        b'[{"kind": "End", "seconds": 0.1}]',
        b'[{"kind": "Observation", "outcome": {"text": "a", "more": 1}, "seconds": 0.1}]',
        b'[{"kind": "NoneType", "outcome": null}]',
    ],
)
def test_a_reply_that_no_worker_of_ours_sends_is_refused(reply):
    with pytest.raises(ValueError, match="no result"):
        decode_reply(reply)


def test_a_text_is_shortened_in_its_middle():
    assert shortened("abc", 3) == "abc"
    found = shortened("a" * 500 + "b" * 500, 100)
    assert (found[0], found[-1], len(found)) == ("a", "b", 100)
    assert "[... 900 characters left out ...]" in found


@pytest.mark.parametrize("outcome", [End(accuracy=1), End(accuracy=True, reward=math.nan), Observation("a", role="x")])
def test_outcomes_that_cannot_be_used(outcome):
    with pytest.raises(VerifierError):
        checked(outcome)


def said(source):
    return episode(f"I compute.\n```python\n{source}\n```\n")


def test_python_runs_the_last_block_where_verifier_code_would():
    printed, failed, loops, floods, silent, prose, broken = stepped(
        *[
            ("python", said(source))
            for source in (
                "import math\nprint(math.comb(30, 15))",
                "print('so far')\n1 / 0",
                "while True:\n    pass",
                "while True:\n    print('x' * 1000)",
                "x = 1",
            )
        ],
        ("python", episode("The answer is 7.")),
        ("python", said("def")),
        timeout_s=20.0,
    )
    assert printed.outcome == Observation("155117520", role="tool")
    assert failed.outcome.text.startswith("so far\nTraceback")
    assert failed.outcome.text.endswith("ZeroDivisionError: division by zero")
    assert loops.outcome.text == "error: stopped after 2 s"
    assert 60_000 < len(floods.outcome.text) <= 66_000
    assert silent.outcome == Observation("(no output, exit code 0)", role="tool")
    assert (prose.outcome, prose.error) == (None, None), "the verifier judges it"
    assert broken.outcome == Observation("error: this is no Python program", role="tool")
    check_environments({"python": "data.environment"}, RewardConfig(), {"python": [("f:1", "?", "7")]})


def test_the_example_of_the_page_runs_as_it_stands_there(tmp_path, monkeypatch):
    (block,) = [each for each in blocks((ROOT / "docs" / "environments.md").read_text()) if "file" in each.options]
    (tmp_path / block.options["file"]).write_text(block.body)
    monkeypatch.syspath_prepend(tmp_path)
    low, right = stepped(("guess:step", episode("5")), ("guess:step", episode("5", "7")))
    assert (low.outcome, right.outcome) == (Observation("higher"), End(accuracy=True))
