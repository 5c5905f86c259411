"""RewardPool: verdicts from processes that may be killed, behind one asyncio call.

Two lanes with workers of their own. Verifiers registered as cheap (linear time) go in batches. Algebra and all other
verifiers go one at a time under the wall-clock limit: whatever a response makes sympy do, cheap verdicts keep flowing.
A worker past the limit is killed and replaced.

    pool = RewardPool(RewardConfig(workers=4))
    verdicts = await pool.verify([VerificationRequest(response="Answer: 42", ground_truth="42")])
    pool.close()
"""

import asyncio
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from reward.config import RewardConfig
from reward.lanes import Job, Kind, Lane, Lanes, PoolCounters, PoolError, Work
from reward.process import START_LIMIT_S, WorkerProcess, WorkerStartError
from reward.registry import Entry, find
from reward.remote import RemoteVerifier
from reward.verdict import Verdict, VerificationRequest

SLOW_AFTER_S = 0.5
"""A dear verdict that takes more CPU goes on at the lowest priority: most of them take hundredths of a second. CPU and
not wall-clock time, for on a busy machine a harmless one may wait long, and would then wait for ever."""

_DEAR_NICENESS = 5
_LOOK_EVERY_S = 0.25
_START_ATTEMPTS = 3
_CLOSE_LIMIT_S = 15.0

__all__ = ["PoolCounters", "PoolError", "RewardPool"]


class RewardPool:
    """Judges responses in processes of its own. May be used from several event loops at once."""

    def __init__(self, config: RewardConfig) -> None:
        """Starts the cheap workers in the background; the first verdicts wait for them (about 0.1 s)."""
        self._config = config
        self._lanes = Lanes(config.workers)
        self._closed = threading.Event()
        lanes = [Lane.CHEAP] * config.workers + [Lane.DEAR] * config.algebra_workers
        self._processes: list[WorkerProcess | None] = [None] * len(lanes)
        self._processes_lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._serve, args=(slot, lane), name=f"reward-{lane}-{slot}", daemon=True)
            for slot, lane in enumerate(lanes)
        ]
        for thread in self._threads:
            thread.start()

    async def verify(self, requests: Sequence[VerificationRequest]) -> list[Verdict]:
        """One verdict for each request, in order. One that could not be given has `error` set and is not correct.

        Raises:
            VerifierError: a request names a verifier that is not known.
            PoolError: the pool is closed, its workers do not start, or nothing has moved for much too long.
        """
        entries = {name: find(name) for name in {request.verifier for request in requests}}
        local = [request for request in requests if not entries[request.verifier].remote]
        if len(local) == len(requests):
            return await self._verify_here(requests, entries)
        distant = [request for request in requests if entries[request.verifier].remote]
        service = asyncio.ensure_future(RemoteVerifier(self._config.remote).verify(distant))
        try:
            here = iter(await self._verify_here(local, entries))
            there = iter(await service)
        finally:
            service.cancel()
        return [next(there if entries[request.verifier].remote else here) for request in requests]

    async def _verify_here(
        self, requests: Sequence[VerificationRequest], entries: Mapping[str, Entry]
    ) -> list[Verdict]:
        """`verify` by the pool's own processes."""
        if not requests:
            return []
        loop = asyncio.get_running_loop()
        job = Job([None] * len(requests), len(requests), loop, loop.create_future())
        rows = [(each.verifier, each.response, each.ground_truth, each.prompt) for each in requests]
        self._lanes.submit(job, rows, [entries[request.verifier].cheap for request in requests])
        try:
            await self._wait(job)
        finally:
            self._lanes.forget(job)
        return [verdict for verdict in job.verdicts if verdict is not None]

    async def _wait(self, job: Job) -> None:
        """Waits for the job; gives up if the whole pool has delivered nothing for longer than any one task may take."""
        stuck_after_s = 2 * self._config.timeout_s + _START_ATTEMPTS * START_LIMIT_S
        while not job.done.done():
            await asyncio.wait([job.done], timeout=10.0)
            if not job.done.done() and self._lanes.silent_s() > stuck_after_s:
                raise PoolError(
                    f"reward pool: no verdict for {self._lanes.silent_s():.0f} s, {job.missing} missing; "
                    f"workers {self.worker_pids()}"
                )
        job.done.result()

    def counters(self) -> PoolCounters:
        """Totals since the pool was made."""
        return self._lanes.counters()

    def worker_pids(self) -> list[int]:
        """Process ids of the workers that run now, for reports of who waits for whom."""
        with self._processes_lock:
            return [process.pid for process in self._processes if process is not None]

    def close(self) -> None:
        """Kills the workers and ends their threads; calls of `verify` that still wait raise PoolError. Repeatable."""
        self._closed.set()
        self._lanes.fail("it is closed")
        with self._processes_lock:
            for process in self._processes:
                if process is not None:
                    process.end()
        deadline = time.monotonic() + _CLOSE_LIMIT_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _serve(self, slot: int, lane: Lane) -> None:
        """A worker's thread. What it cannot handle ends the pool, so that no caller waits for a thread that is gone."""
        try:
            self._serve_until_closed(slot, lane)
        except Exception as error:
            self._lanes.fail(f"{lane} worker {slot}: {type(error).__name__}: {error}")

    def _serve_until_closed(self, slot: int, lane: Lane) -> None:
        """Starts the process, feeds it, replaces it when it is lost. A dear one starts when there is work for it."""
        process = self._start(slot, lane) if lane is Lane.CHEAP else None
        while (work := self._lanes.take(lane)) is not None:
            process = process or self._start(slot, lane)
            if process is None:
                return
            if not self._do(process, work):
                self._end(slot, process)
                self._lanes.count("restarts")
                process = self._start(slot, lane) if lane is Lane.CHEAP else None
        if process is not None:
            self._end(slot, process)

    def _end(self, slot: int, process: WorkerProcess) -> None:
        with self._processes_lock:
            self._processes[slot] = None
        process.kill()

    def _start(self, slot: int, lane: Lane) -> WorkerProcess | None:
        """A worker that is ready; None if the pool was closed, or if none comes up, which ends the pool."""
        niceness = _DEAR_NICENESS if lane is Lane.DEAR else 0
        for attempt in range(1, _START_ATTEMPTS + 1):
            with self._processes_lock:
                if self._closed.is_set():
                    return None
                process = self._processes[slot] = WorkerProcess(self._config.memory_mb, niceness)
            try:
                process.wait_ready()
                return process
            except WorkerStartError as error:
                if attempt == _START_ATTEMPTS:
                    self._lanes.fail(f"{error} ({attempt} attempts)")
        return None

    def _do(self, process: WorkerProcess, work: Work) -> bool:
        """Has the process do the work and passes the results on; False if the process must be replaced."""
        fresh = process.works_done == 0
        process.works_done += 1
        start = time.monotonic()
        try:
            results = self._ask(process, work)
        except TimeoutError:
            return self._lost(work, "timeout", time.monotonic() - start, again=len(work.tasks) > 1)
        except (EOFError, OSError, ValueError) as error:
            # one that sent nonsense still runs: nothing to wait for
            reason = f"worker: {error}"[:200] if isinstance(error, ValueError) else process.how_it_died()
            again = len(work.tasks) > 1 or not (fresh or work.tasks[0].retried)
            return self._lost(work, reason, time.monotonic() - start, again=again)
        if work.kind is not Kind.BATCH and results[0][-1] == "memory":
            # what earlier work left behind may have filled the worker: one more attempt, in a new one
            return self._lost(work, "memory", time.monotonic() - start, again=not (fresh or work.tasks[0].retried))
        self._lanes.deliver(work, results)
        return not process.slowed

    def _lost(self, work: Work, reason: str, seconds: float, *, again: bool) -> bool:
        if again:
            self._lanes.isolate(work)
        else:
            self._lanes.deliver(work, [[False, None, "", seconds, reason]] * len(work.tasks))
        return False

    def _ask(self, process: WorkerProcess, work: Work) -> list[list[Any]]:
        """The worker's results. Raises TimeoutError, EOFError, OSError, ValueError (what it sent is no result)."""
        limit_s = self._config.timeout_s
        if work.kind is Kind.BATCH:
            process.ask(work.request(), limit_s)
            return process.reply(limit_s)
        process.ask(work.request(), START_LIMIT_S)
        if process.reply(START_LIMIT_S) != "started":
            raise ValueError("an answer that nobody asked for: the next one would be another response's")
        deadline = time.monotonic() + limit_s
        cpu_before_s = process.cpu_seconds()
        while not process.has_answered(min(_LOOK_EVERY_S, max(deadline - time.monotonic(), 0.0))):
            if time.monotonic() >= deadline:
                raise TimeoutError
            if not process.slowed and process.cpu_seconds() - cpu_before_s > SLOW_AFTER_S:
                process.lower_priority()
        result = process.reply(limit_s)
        if not isinstance(result, list) or len(result) not in (4, 5):
            raise ValueError("a reply that is no result")
        return [result]
