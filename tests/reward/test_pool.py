"""The pool under everything a response or a verifier may do to it. Every wait here has a limit."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from reward.config import RewardConfig
from reward.pool import pool as pool_module
from reward.pool.pool import RewardPool
from reward.verdict import EXTRACTED_LIMIT, PoolError, Verdict, VerificationRequest, VerifierError

ROOT = Path(__file__).parents[2]
LIMIT_S = 60.0
NO_VERDICT = ", not a Judgement (accuracy True or False, extracted a text or None, rule a text), nor a bool"
SCORE = "Judgement(accuracy=0.7, extracted=None, rule='own')"


def ask(response: str, ground_truth: str = "42", verifier: str = "robust") -> VerificationRequest:
    return VerificationRequest(response=response, ground_truth=ground_truth, verifier=verifier)


def hostile(name: str, response: str = "") -> VerificationRequest:
    return ask(response, verifier=f"tests.reward.hostile:{name}")


def verify(pool, *requests) -> list[Verdict]:
    return asyncio.run(asyncio.wait_for(pool.verify(requests), LIMIT_S))


def test_verdicts_come_in_order_from_both_queues(make_pool):
    pool = make_pool(workers=2)
    requests = []
    for i in range(60):
        requests.append(ask(f"Answer: {i}", "7"))
        requests.append(ask(f"Answer: \\sqrt{{{i * i}}}", "7"))
        requests.append(ask(f"Answer: {i}", "7", "exact"))
        requests.append(ask(str(i), "7", "tests.reward.hostile:judge"))
    verdicts = verify(pool, *requests)
    assert [verdict.accuracy for verdict in verdicts] == [i == 7 for i in range(60) for _ in range(4)]
    assert [verdict.rule for verdict in verdicts[:4]] == ["integer", "symbolic", "exact", "own"]
    assert not any(verdict.error for verdict in verdicts)
    assert all(0 <= verdict.seconds < LIMIT_S for verdict in verdicts)


def test_a_weighted_sum_is_judged_by_each_of_its_verifiers(make_pool):
    pool = make_pool(workers=1)
    summed = "robust + 0.5 * tests.reward.hostile:judge + -2 * exact"
    one = summed.removeprefix("robust + ")
    both, one, plain = verify(pool, ask("Answer: 7.", "7", summed), ask("7", "7", one), ask("7", "7"))
    assert (both.accuracy, both.extracted, both.rule) == (True, "7", "integer")
    assert both.rewards == {"robust": 1.0, "tests.reward.hostile:judge": -1.0, "exact": -1.0}
    assert both.reward == 1 - 0.5 + 2
    assert (one.accuracy, one.reward, one.rule) == (True, 0.5 + 2, "own")
    assert (plain.rewards, plain.reward) == (None, None)


def test_another_reward_without_a_verdict_is_named_and_leaves_the_accuracy_as_it_is(make_pool):
    (verdict,) = verify(make_pool(workers=1), ask("Answer: 42", "42", "robust + 0.5 * tests.reward.hostile:fail"))
    assert verdict.accuracy
    assert verdict.reward == 0.5
    assert "hostile:fail: " in verdict.error


def test_no_requests_no_verdicts(make_pool):
    assert verify(make_pool(workers=1)) == []


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("hang", "timeout"),
        ("hang_in_c", "timeout"),
        ("die", "worker died (signal 9)"),
        ("crash", "worker died (signal 11)"),
        ("leave", "SystemExit: 3"),
        ("devour", "memory"),
        ("fail", "KeyError: 'x'"),
        ("confused", f"verifier 'tests.reward.hostile:confused' returned 'correct'{NO_VERDICT}"),
        ("score", f"verifier 'tests.reward.hostile:score' returned {SCORE}{NO_VERDICT}"),
    ],
)
def test_a_hostile_verdict_is_an_error_and_harms_no_other(make_pool, name, error):
    pool = make_pool(workers=1, timeout_s=2.0, memory_mb=300)
    first, second, third = verify(pool, ask("Answer: 42"), hostile(name, "x"), hostile("judge"))
    assert first.accuracy
    assert not second.accuracy
    assert second.error == error
    assert third.error is None
    assert verify(pool, ask("Answer: 42"))[0].accuracy


def test_what_a_verifier_prints_is_not_taken_for_its_verdict(make_pool):
    assert verify(make_pool(workers=1), hostile("babble"))[0].accuracy


def test_what_a_verifier_extracts_can_be_written_and_is_cut(make_pool):
    (verdict,) = verify(make_pool(workers=1), hostile("halves"))
    assert (verdict.accuracy, verdict.extracted, verdict.rule) == (True, "?" + "x" * (EXTRACTED_LIMIT - 1), "?")


FORGED = '[[true, "forged", "forged", 0.0, null]]'


@pytest.mark.parametrize("frame", [FORGED, '"started"', "[1, 2, 3]", "{}", "no json", "[" * 100_000])
def test_what_a_verifier_sends_itself_harms_no_other(make_pool, frame):
    pool = make_pool(algebra_workers=1)
    for _ in range(2):
        verify(pool, hostile("write_to_the_pool", frame))
        (verdict,) = verify(pool, hostile("sleep", "0"))
        assert (verdict.accuracy, verdict.rule) == (True, "tests.reward.hostile:sleep")


def test_a_worker_that_dies_once_costs_no_verdict(make_pool, tmp_path):
    """Earlier work may be to blame: what dies in a worker that is not new gets a second attempt in a new one."""
    pool = make_pool(workers=1)
    mark = tmp_path / "mark"
    verdicts = verify(pool, hostile("judge"), hostile("die_once", str(mark)))
    assert verdicts[1].accuracy
    assert mark.exists()


def test_the_limit_is_kept(make_pool):
    pool = make_pool(workers=1, timeout_s=0.5)
    verify(pool, ask("Answer: 42"))
    verdict = verify(pool, hostile("sleep", "30"))[0]
    assert verdict.error == "timeout"
    assert 0.5 <= verdict.seconds < 10.0
    assert verify(pool, hostile("sleep", "0.01"))[0].accuracy


def test_fast_verdicts_flow_while_others_hang(make_pool):
    pool = make_pool(workers=1, timeout_s=4.0)

    async def race() -> None:
        await pool.verify([ask("Answer: 42")])
        hanging = asyncio.create_task(pool.verify([hostile("sleep", "600")]))
        await asyncio.sleep(0.3)
        for _ in range(20):
            assert all(verdict.accuracy for verdict in await pool.verify([ask("Answer: 42")] * 50))
        assert not hanging.done()
        assert [verdict.error for verdict in await hanging] == ["timeout"]

    asyncio.run(asyncio.wait_for(race(), LIMIT_S))


def test_a_worker_killed_from_outside_is_replaced(make_pool):
    pool = make_pool(workers=1)
    assert verify(pool, ask("Answer: 42"))[0].accuracy
    (before,) = pool.worker_pids()
    os.kill(before, signal.SIGKILL)
    assert all(verdict.accuracy for verdict in verify(pool, *[ask("Answer: 42")] * 300))
    assert pool.worker_pids() != [before]


def test_a_worker_that_stands_still_is_replaced(make_pool):
    pool = make_pool(workers=1, timeout_s=2.0)
    assert verify(pool, ask("Answer: 42"))[0].accuracy
    os.kill(pool.worker_pids()[0], signal.SIGSTOP)
    assert all(verdict.accuracy for verdict in verify(pool, *[ask("Answer: 42")] * 5))


def test_large_and_broken_texts_pass_through(make_pool):
    pool = make_pool(workers=2)
    texts = ["9" * 5_000_000, "\ud83d" * 1000, "\x00", "", "Answer: " * 100_000, "\\boxed{" * 100_000, "Answer: \ud83d"]
    verdicts = verify(pool, *[ask(text) for text in texts], *[ask(text + "\nAnswer: 42") for text in texts])
    assert [verdict.accuracy for verdict in verdicts] == [False] * 7 + [True] * 7
    assert not any(verdict.error for verdict in verdicts)


@pytest.mark.parametrize("truth", ["", "  ", "$$", "4" * 5000])
def test_an_unusable_ground_truth_is_an_error_of_its_verdict_alone(make_pool, truth):
    bad, good = verify(make_pool(workers=1), ask("Answer: 42", truth), ask("Answer: 42"))
    assert not bad.accuracy
    assert "ground truth" in (bad.error or "")
    assert good.accuracy


def test_a_group_that_agrees_pays_for_algebra_once(make_pool):
    pool = make_pool(workers=2)
    verify(pool, ask("Answer: 42"))
    fast = pool.worker_pids()
    verdicts = verify(pool, *[ask(f"{i} words\nAnswer: $\\sqrt{{1764}}$") for i in range(200)])
    assert all(verdict.accuracy and verdict.rule == "symbolic" for verdict in verdicts)
    (algebra,) = set(pool.worker_pids()) - set(fast)
    os.kill(algebra, signal.SIGSTOP)  # so whoever asks it gets no verdict
    assert verify(pool, ask("Answer: \\sqrt{1764}"))[0].accuracy


def test_an_unknown_verifier_is_named_with_the_nearest(make_pool):
    with pytest.raises(VerifierError, match="'robust'"):
        verify(make_pool(workers=1), ask("Answer: 42", verifier="robusst"))


def test_a_verifier_that_cannot_be_imported_is_an_error_of_its_verdicts(make_pool):
    missing, nothing = verify(
        make_pool(workers=1), ask("x", verifier="no_such_module:f"), ask("x", verifier="tests.reward.hostile:no_such")
    )
    assert "import of no_such_module failed" in (missing.error or "")
    assert "no function or class no_such" in (nothing.error or "")


def test_close_wakes_who_waits_and_leaves_no_process(make_pool):
    pool = make_pool(workers=2, timeout_s=60.0)
    verify(pool, ask("Answer: 42"))
    pids = pool.worker_pids()

    async def closed_while_waiting() -> None:
        waiting = asyncio.create_task(pool.verify([hostile("sleep", "600")]))
        await asyncio.sleep(0.5)
        await asyncio.to_thread(pool.close)
        await waiting

    with pytest.raises(PoolError, match="closed"):
        asyncio.run(asyncio.wait_for(closed_while_waiting(), LIMIT_S))
    pool.close()
    with pytest.raises(PoolError, match="closed"):
        verify(pool, ask("Answer: 42"))
    assert len(pids) == 2
    assert not [pid for pid in pids if psutil.pid_exists(pid)]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("reward-") and thread.is_alive()]


def test_a_cancelled_call_is_not_worked_off(make_pool):
    pool = make_pool(workers=1, timeout_s=1.0)

    async def cancel() -> float:
        await pool.verify([ask("Answer: 42")])
        given_up = asyncio.create_task(pool.verify([hostile("sleep", "600")] * 50))
        await asyncio.sleep(0.2)
        given_up.cancel()
        start = time.monotonic()
        assert (await pool.verify([ask("Answer: 42")]))[0].accuracy
        return time.monotonic() - start

    assert asyncio.run(asyncio.wait_for(cancel(), LIMIT_S)) < 30.0


def test_a_comparison_goes_on_for_others_when_one_caller_gives_up(make_pool):
    pool = make_pool(workers=1, timeout_s=4.0)

    async def give_up() -> None:
        busy = asyncio.create_task(pool.verify([hostile("sleep", "2")]))
        await asyncio.sleep(0.2)
        shared = ask("Answer: \\sqrt{1764}")
        given_up = asyncio.create_task(pool.verify([shared]))
        await asyncio.sleep(0.2)
        waiting = asyncio.create_task(pool.verify([shared]))
        await asyncio.sleep(0.3)
        given_up.cancel()
        assert not busy.done()
        assert (await waiting)[0].accuracy

    asyncio.run(asyncio.wait_for(give_up(), LIMIT_S))


def test_timeouts_are_progress(make_pool, monkeypatch):
    """Verdicts that all time out end no run, though together they take longer than any single one may."""
    monkeypatch.setattr(pool_module, "START_LIMIT_S", 1.0)
    monkeypatch.setattr(pool_module, "_LOOK_EVERY_S", 0.1)
    verdicts = verify(make_pool(workers=1, timeout_s=1.0), *[hostile("sleep", "600")] * 7)
    assert [verdict.error for verdict in verdicts] == ["timeout"] * 7


def batches_of(requests: list[VerificationRequest], workers: int) -> list[list[VerificationRequest]]:
    """What workers take one after the other of a fast queue that holds `requests`."""

    async def take() -> list[list[VerificationRequest]]:
        queue, loop, batches = asyncio.Queue(), asyncio.get_running_loop(), []
        for request in requests:
            queue.put_nowait(pool_module._Work(request, loop.create_future()))
        pool = SimpleNamespace(_fast=queue, _config=RewardConfig(workers=workers))
        while not queue.empty():
            batches.append([work.job for work in await RewardPool._take(pool, queue)])
        return batches

    return asyncio.run(take())


def test_batches_are_limited_in_responses_and_characters():
    sizes = [10] * 600 + [1_500_000] * 4 + [9_000_000, 10]
    requests = [ask("x" * size) for size in sizes]
    batches = batches_of(requests, workers=1)
    assert [request for batch in batches for request in batch] == requests
    assert [len(batch) for batch in batches] == [256, 256, 91, 2, 1]


def test_many_responses_are_shared_out_and_a_group_is_not():
    assert [len(batch) for batch in batches_of([ask("Answer: 42")] * 16, workers=4)] == [16]
    assert [len(batch) for batch in batches_of([ask("Answer: 42")] * 400, workers=4)][:3] == [100, 75, 57]


def test_a_large_reply_takes_time_in_proportion(make_pool):
    """One loop reads for all workers; and what a verifier sends itself may be large."""
    pool = make_pool(workers=1, timeout_s=30.0)
    verify(pool, ask("Answer: 42"))
    start = time.process_time()
    (verdict,) = verify(pool, hostile("write_much", str(64 << 20)))
    assert "another order" in (verdict.error or "")
    assert time.process_time() - start < 2.0


def test_several_event_loops_share_a_pool(make_pool):
    pool = make_pool(workers=2)
    results: list[bool] = []

    def one_loop() -> None:
        verdicts = verify(pool, *[ask("Answer: 42")] * 100)
        results.append(all(verdict.accuracy for verdict in verdicts))

    threads = [threading.Thread(target=one_loop) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert results == [True] * 4


def test_workers_that_do_not_start_end_the_pool_with_their_words(make_pool, monkeypatch, tmp_path):
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho no such interpreter here >&2\nexit 7\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    with pytest.raises(PoolError, match=r"exit code 7.*no such interpreter here"):
        verify(make_pool(workers=1), ask("Answer: 42"))


def test_workers_die_with_their_parent():
    """Even one that hangs, and even if the parent has no chance to clean up."""
    code = (
        "import asyncio, os, signal\n"
        "from reward.pool.pool import RewardPool\n"
        "from reward.config import RewardConfig\n"
        "from reward.verdict import VerificationRequest as R\n"
        "async def main():\n"
        "    pool = RewardPool(RewardConfig(workers=2, timeout_s=300.0))\n"
        "    await pool.verify([R(response='Answer: 1', ground_truth='1')])\n"
        "    hang = R(response='', ground_truth='1', verifier='tests.reward.hostile:hang')\n"
        "    asyncio.create_task(pool.verify([hang]))\n"
        "    await asyncio.sleep(1.0)\n"
        "    print(*pool.worker_pids(), flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "asyncio.run(main())\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    parent = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_S, cwd=ROOT, env=environment
    )
    pids = [int(pid) for pid in parent.stdout.split()]
    assert len(pids) == 3, parent.stderr  # two for fast verdicts, one that hangs
    deadline = time.monotonic() + 10.0
    while any(_runs(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not [pid for pid in pids if _runs(pid)]


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_worker_has_one_thread_and_nothing_heavy(make_pool):
    pool = make_pool(workers=1)
    verify(pool, ask("Answer: 42"))
    process = psutil.Process(pool.worker_pids()[0])
    assert process.environ()["OMP_NUM_THREADS"] == "1"
    assert process.num_threads() == 1
    assert process.memory_info().rss < 60 << 20
