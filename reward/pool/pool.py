"""RewardPool: verdicts from processes that may be killed, behind one asyncio call.

Two queues with workers of their own. Verifiers registered as fast (linear time) are served in batches. Algebra and all
other verifiers are served one at a time under the wall-clock limit: whatever a response makes sympy do, fast verdicts
keep flowing. A worker past the limit is killed and replaced.

    pool = RewardPool(RewardConfig(workers=4))
    verdicts = await pool.verify([VerificationRequest(response="Answer: 42", ground_truth="42")])
    pool.close()
"""

import asyncio
import threading
import time
from collections.abc import Sequence

from reward.config import RewardConfig
from reward.pool.messages import Result, Signal, Single
from reward.pool.remote import RemoteVerifier
from reward.pool.scheduler import Job, PoolCounters, Queue, Scheduler, Work
from reward.pool.worker_process import START_LIMIT_S, WorkerProcess, WorkerStartError
from reward.registry import find
from reward.verdict import PoolError, Verdict, VerificationRequest

LOW_PRIORITY_AFTER_S = 0.5
"""A slow verdict that takes more CPU goes on at the lowest priority: most of them take hundredths of a second. CPU and
not wall-clock time, for on a busy machine a harmless one may wait long, and would then wait for ever."""

_SLOW_NICENESS = 5
_CHECK_EVERY_S = 0.25
_START_ATTEMPTS = 3
_CLOSE_LIMIT_S = 15.0


class RewardPool:
    """Judges responses in processes of its own. May be used from several event loops at once."""

    def __init__(self, config: RewardConfig) -> None:
        """Starts the fast workers in the background; the first verdicts wait for them (about 0.1 s)."""
        self._config = config
        self._scheduler = Scheduler(config.workers)
        self._closed = threading.Event()
        queues = [Queue.FAST] * config.workers + [Queue.SLOW] * config.algebra_workers
        self._processes: list[WorkerProcess | None] = [None] * len(queues)
        self._processes_lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._serve, args=(slot, queue), name=f"reward-{queue}-{slot}", daemon=True)
            for slot, queue in enumerate(queues)
        ]
        for thread in self._threads:
            thread.start()

    async def verify(self, requests: Sequence[VerificationRequest]) -> list[Verdict]:
        """One verdict for each request, in order. One that could not be given has `error` set and is not correct.

        Raises:
            VerifierError: a request names a verifier that is not known.
            PoolError: the pool is closed, its workers do not start, or nothing has moved for much too long.
        """
        remote = {name: find(name).remote for name in {request.verifier for request in requests}}
        local = [request for request in requests if not remote[request.verifier]]
        if len(local) == len(requests):
            return await self._verify_locally(requests)
        distant = [request for request in requests if remote[request.verifier]]
        service = asyncio.ensure_future(RemoteVerifier(self._config.remote).verify(distant))
        try:
            here = iter(await self._verify_locally(local))
            there = iter(await service)
        finally:
            service.cancel()
        return [next(there if remote[request.verifier] else here) for request in requests]

    async def _verify_locally(self, requests: Sequence[VerificationRequest]) -> list[Verdict]:
        """`verify` by the pool's own processes."""
        if not requests:
            return []
        fast = {name: find(name).fast for name in {request.verifier for request in requests}}
        job = self._scheduler.submit(requests, [fast[request.verifier] for request in requests])
        try:
            await self._wait(job)
        finally:
            self._scheduler.forget(job)
        return [verdict for verdict in job.verdicts if verdict is not None]

    async def _wait(self, job: Job) -> None:
        """Waits for the job; gives up if the whole pool has delivered nothing for longer than any one task may take."""
        stuck_after_s = 2 * self._config.timeout_s + _START_ATTEMPTS * START_LIMIT_S
        done = asyncio.wrap_future(job.done)
        while not done.done():
            await asyncio.wait([done], timeout=10.0)
            if not done.done() and self._scheduler.silent_s() > stuck_after_s:
                raise PoolError(
                    f"reward pool: no verdict for {self._scheduler.silent_s():.0f} s, {job.missing} missing; "
                    f"workers {self.worker_pids()}"
                )
        done.result()

    def counters(self) -> PoolCounters:
        """Totals since the pool was made."""
        return self._scheduler.counters()

    def worker_pids(self) -> list[int]:
        """Process ids of the workers that run now, for reports of who waits for whom."""
        with self._processes_lock:
            return [process.pid for process in self._processes if process is not None]

    def close(self) -> None:
        """Kills the workers and ends their threads; calls of `verify` that still wait raise PoolError. Repeatable."""
        self._closed.set()
        self._scheduler.fail("it is closed")
        with self._processes_lock:
            for process in self._processes:
                if process is not None:
                    process.end()
        deadline = time.monotonic() + _CLOSE_LIMIT_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _serve(self, slot: int, queue: Queue) -> None:
        """A worker's thread. What it cannot handle ends the pool, so that no caller waits for a thread that is gone."""
        try:
            self._serve_until_closed(slot, queue)
        except Exception as error:
            self._scheduler.fail(f"{queue} worker {slot}: {type(error).__name__}: {error}")

    def _serve_until_closed(self, slot: int, queue: Queue) -> None:
        """Starts the process, feeds it, replaces it when it is lost. A slow one starts when there is work for it."""
        process = self._start(slot, queue) if queue is Queue.FAST else None
        while (work := self._scheduler.take(queue)) is not None:
            process = process or self._start(slot, queue)
            if process is None:
                return
            if not self._do(process, work):
                self._end(slot, process)
                self._scheduler.count_restart()
                process = self._start(slot, queue) if queue is Queue.FAST else None
        if process is not None:
            self._end(slot, process)

    def _end(self, slot: int, process: WorkerProcess) -> None:
        with self._processes_lock:
            self._processes[slot] = None
        process.kill()

    def _start(self, slot: int, queue: Queue) -> WorkerProcess | None:
        """A worker that is ready; None if the pool was closed, or if none comes up, which ends the pool."""
        niceness = _SLOW_NICENESS if queue is Queue.SLOW else 0
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
                    self._scheduler.fail(f"{error} ({attempt} attempts)")
        return None

    def _do(self, process: WorkerProcess, work: Work) -> bool:
        """Has the process do the work and passes the results on; False if the process must be replaced.

        A task of a batch that was lost gets another attempt by itself. A single one gets another if its worker had done
        earlier work, which may be to blame.
        """
        again = len(work.tasks) > 1 or (process.used and not work.tasks[0].retried)
        process.used = True
        start = time.monotonic()
        try:
            results = self._results(process, work)
            memory = isinstance(work.order, Single) and isinstance(results[0], Verdict) and results[0].error == "memory"
            if not memory:
                self._scheduler.deliver(work, results)
                return not process.low_priority
            reason = "memory"
        except TimeoutError:
            reason, again = "timeout", len(work.tasks) > 1
        except ValueError as error:  # one that sent nonsense still runs: nothing to wait for
            reason = f"worker: {error}"[:200]
        except (EOFError, OSError):
            reason = process.how_it_died()
        if again:
            self._scheduler.isolate(work)
        else:
            seconds = time.monotonic() - start
            lost = Verdict(accuracy=False, extracted=None, rule="", seconds=seconds, error=reason)
            self._scheduler.deliver(work, [lost] * len(work.tasks))
        return False

    def _results(self, process: WorkerProcess, work: Work) -> list[Result]:
        """The worker's results. Raises TimeoutError, EOFError, OSError, ValueError (what it sent is no result)."""
        limit_s = self._config.timeout_s
        if isinstance(work.order, Single):
            process.send(work.order, START_LIMIT_S)
            if process.receive(START_LIMIT_S) != Signal.STARTED:
                raise ValueError("an answer that nobody asked for: the next one would be another response's")
            self._await_answer(process, time.monotonic() + limit_s)
        else:
            process.send(work.order, limit_s)
        results = process.receive(limit_s)
        if isinstance(results, Signal) or len(results) != len(work.tasks):
            raise ValueError("a reply that is no result")
        return results

    def _await_answer(self, process: WorkerProcess, deadline: float) -> None:
        """Waits for the answer to begin, and lowers the worker's priority if it computes for long."""
        cpu_before_s = process.cpu_seconds()
        while not process.has_answered(min(_CHECK_EVERY_S, max(deadline - time.monotonic(), 0.0))):
            if time.monotonic() >= deadline:
                raise TimeoutError
            if not process.low_priority and process.cpu_seconds() - cpu_before_s > LOW_PRIORITY_AFTER_S:
                process.lower_priority()
