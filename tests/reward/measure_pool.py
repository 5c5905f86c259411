"""Measures the pool: `python -m tests.reward.measure_pool` (minutes). Prints each figure beside its reference.

1. Verdicts a second on responses of 5000 characters with integer answers, per second and per second of CPU (pool,
   workers and calling process together), against math-verify and verl's math_dapo (where that is installed) on the
   same responses, in the same run.
2. The same with 1% hostile requests against those without, in alternation: verdicts a second while verifiers hang until
   they are killed; verdicts per second of CPU where texts attack the algebra.
"""

import asyncio
import importlib.util
import itertools
import logging
import os
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from reward.config import RewardConfig
from reward.pool.pool import RewardPool
from reward.verdict import Judgement, VerificationRequest
from reward.verifiers import robust

TEXT = "so we have that the sum of all x where x^2 = 4 and y > 0 is then equal to $2y + 3$, thus"
ATTACKS = ("9^{9^{9^9}}", "9" * 5000, "{" * 2000, "((9!)!)!", "\\sqrt{" * 200, "10^{10^{10}}", "\\binom{10^9}{10^8}")
ATTACKS += ("\x00" * 2000, "\ud83d\udc00" * 1000, "\\boxed{" * 5000, "Answer: " * 5000, "9" * 1_000_000)


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """Verdicts per second of the wall clock, and per second of CPU of all processes."""

    per_second: float
    per_cpu_second: float


def responses(count: int, seed: int = 0) -> list[VerificationRequest]:
    """Responses of 5000 characters that end in an integer answer; half of them right."""
    choose = random.Random(seed)
    requests = []
    for index in range(count):
        reasoning = " ".join(choose.choices(TEXT.split(), k=2000))[:4980]
        answer = choose.randrange(1000)
        truth = answer if index % 2 else answer + 1
        requests.append(VerificationRequest(response=f"{reasoning}\n\nAnswer: {answer}", ground_truth=str(truth)))
    return requests


def cpu_seconds(pool: RewardPool) -> float:
    """CPU seconds of this process and the pool's."""
    own = time.process_time()
    for pid in pool.worker_pids():
        times = psutil.Process(pid).cpu_times()
        own += times.user + times.system
    return own


async def pool_throughput(requests: list[VerificationRequest], *, workers: int, rounds: int) -> Throughput:
    """Groups of 16 in many concurrent calls, as the coordinator makes them."""
    pool = RewardPool(RewardConfig(workers=workers))
    groups = [requests[at : at + 16] for at in range(0, len(requests), 16)]
    await pool.verify(requests[:512])
    cpu, start = cpu_seconds(pool), time.monotonic()
    for _ in range(rounds):
        await asyncio.gather(*(pool.verify(group) for group in groups))
    seconds, cpu = time.monotonic() - start, cpu_seconds(pool) - cpu
    pool.close()
    verdicts = rounds * len(requests)
    return Throughput(per_second=verdicts / seconds, per_cpu_second=verdicts / cpu)


def math_verify_throughput(requests: list[VerificationRequest]) -> Throughput:
    """math-verify as a verifier by itself: its extraction and comparison on the whole response, in this process."""
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)

    def judge(request: VerificationRequest) -> bool:
        gold = parse(f"${request.ground_truth}$", parsing_timeout=None)
        return verify(gold, parse(request.response, parsing_timeout=None), timeout_seconds=None)

    return judge_throughput(judge, requests)


def math_dapo() -> Callable[[str, str], bool] | None:
    """verl's rule for DAPO: (response, ground truth) -> verdict; None where verl is not installed."""
    package = importlib.util.find_spec("verl")
    if package is None or package.origin is None:
        return None
    path = Path(package.origin).parent / "utils" / "reward_score" / "math_dapo.py"  # by itself: verl imports torch
    spec = importlib.util.spec_from_file_location("math_dapo", path)
    assert spec is not None, "a file's path has a spec"
    assert spec.loader is not None, "of a source file"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return lambda response, truth: bool(module.compute_score(response, truth)["acc"])


def judge_throughput(judge: Callable[[VerificationRequest], bool], requests: list[VerificationRequest]) -> Throughput:
    """Of a function, in this process."""
    judge(requests[0])
    start, cpu = time.monotonic(), time.process_time()
    for request in requests:
        judge(request)
    seconds, cpu = time.monotonic() - start, time.process_time() - cpu
    return Throughput(per_second=len(requests) / seconds, per_cpu_second=len(requests) / cpu)


async def benign_throughput(requests: list[VerificationRequest], *, hanging_share: float, seconds: float) -> float:
    """Benign verdicts a second of 16 callers, while requests that hang are put in at `hanging_share` of theirs."""
    pool = RewardPool(RewardConfig(workers=2, timeout_s=2.0))
    hang = VerificationRequest(response="", ground_truth="1", verifier="tests.reward.hostile:hang")
    await pool.verify(requests[:512])
    groups = itertools.cycle([requests[at : at + 16] for at in range(0, len(requests) - 15, 16)])
    start = time.monotonic()
    done = 0
    hanging: list[asyncio.Task] = []

    async def caller() -> None:
        nonlocal done
        while time.monotonic() - start < seconds:
            await asyncio.gather(*(pool.verify(next(groups)) for _ in range(8)))
            done += 8 * 16
            while len(hanging) < hanging_share * done:
                hanging.append(asyncio.create_task(pool.verify([hang])))

    await asyncio.gather(*(caller() for _ in range(16)))
    rate = done / (time.monotonic() - start)
    for task in hanging:
        task.cancel()
    await asyncio.gather(*hanging, return_exceptions=True)
    await asyncio.to_thread(pool.close)
    return rate


async def one_call_throughput(requests: list[VerificationRequest], attack_share: float) -> float:
    """Verdicts per second of CPU of one call, some of its texts attacks on the algebra."""
    pool = RewardPool(RewardConfig(workers=2))
    mixed = list(requests)
    if attack_share:
        for place, at in enumerate(range(0, len(mixed), round(1 / attack_share))):
            text = mixed[at].response + f"\nAnswer: ${ATTACKS[place % len(ATTACKS)]}$"
            mixed[at] = VerificationRequest(response=text, ground_truth=mixed[at].ground_truth)
    await pool.verify(requests[:512])
    cpu = cpu_seconds(pool)
    for _ in range(3):
        await pool.verify(mixed)
    rate = 3 * len(mixed) / (cpu_seconds(pool) - cpu)
    pool.close()
    return rate


def main() -> None:
    """Prints the figures."""
    requests = responses(8192)
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {len(requests)} responses of 5000 characters")
    theirs = math_verify_throughput(requests[:200])
    rule = math_dapo()
    if rule is not None:
        dapo = judge_throughput(lambda each: rule(each.response, each.ground_truth), requests)
        print(
            f"verl's math_dapo, one process, in a loop: {dapo.per_second:.0f} and {dapo.per_cpu_second:.0f} verdicts/s"
        )
        alone = judge_throughput(lambda each: isinstance(robust.judge(each), Judgement), requests)
        print(f"robust, one process, in a loop: {alone.per_second:.0f} and {alone.per_cpu_second:.0f}")
    for workers in (1, 2):
        ours = asyncio.run(pool_throughput(requests, workers=workers, rounds=4))
        print(
            f"pool, {workers} workers: {ours.per_second:8.0f} verdicts/s {ours.per_cpu_second:8.0f} per CPU second; "
            f"math-verify alone: {theirs.per_second:6.0f} and {theirs.per_cpu_second:6.0f}; "
            f"ratio per CPU second {ours.per_cpu_second / theirs.per_cpu_second:.0f}"
        )
    print("verdicts/s with 1% that hang until killed:", describe(hanging_pairs(requests)))
    print("verdicts per CPU second with 1% that attack the algebra, in one call:", describe(attack_pairs(requests)))


def hanging_pairs(requests: list[VerificationRequest], pairs: int = 5) -> list[tuple[float, float]]:
    """(without, with) in verdicts a second, measured in alternation because a machine's load drifts."""

    def measure(share: float) -> float:
        return asyncio.run(benign_throughput(requests, hanging_share=share, seconds=3.0))

    return [(measure(0.0), measure(0.01)) for _ in range(pairs)]


def attack_pairs(requests: list[VerificationRequest], pairs: int = 9) -> list[tuple[float, float]]:
    """As `hanging_pairs`, for texts that attack the algebra."""

    def measure(share: float) -> float:
        return asyncio.run(one_call_throughput(requests, share))

    return [(measure(0.0), measure(0.01)) for _ in range(pairs)]


def median_ratio(pairs: list[tuple[float, float]]) -> float:
    """The median over the pairs of with / without."""
    return statistics.median(with_hostile / without for without, with_hostile in pairs)


def describe(pairs: list[tuple[float, float]]) -> str:
    """One line for a set of pairs."""
    without, with_hostile = (statistics.median(side) for side in zip(*pairs, strict=True))
    ratios = " ".join(f"{with_hostile / without:.2f}" for without, with_hostile in pairs)
    return f"{with_hostile:.0f} against {without:.0f} without; median ratio {median_ratio(pairs):.2f} of {ratios}"


if __name__ == "__main__":
    main()
