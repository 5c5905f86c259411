"""RewardPool: verdicts from processes that may be killed, behind one asyncio call.

Three queues with workers of their own, served by one event loop in a thread. Verifiers registered as fast (linear
time) are served in batches. Algebra and all other verifiers are served one at a time under the wall-clock limit, and so
are the turns of environments: whatever a response makes sympy or a tool do, all else keeps flowing. A worker past the
limit is killed and replaced.

    pool = RewardPool(RewardConfig(workers=4))
    verdicts = await pool.verify([VerificationRequest(response="Answer: 42", ground_truth="42")])
    pool.close()
"""

import asyncio
import threading
import time
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from reward.config import RewardConfig
from reward.environment import REMOTE, Episode, Step, Stepped
from reward.pool import remote
from reward.pool.messages import Job, Result
from reward.pool.worker_process import START_LIMIT_S, WorkerLost, WorkerProcess
from reward.registry import Entry, find, is_sum, weighted
from reward.verdict import Deferred, PoolError, Verdict, VerificationRequest

T = TypeVar("T")

_BATCH_RESPONSES = 256
"""Fast responses that a worker is sent at a time, at most."""
_SHARED_FROM = 32
"""Where fewer wait for each worker, they are not shared out: to be sent some costs more than to judge a few."""
_BATCH_CHARACTERS = 4_000_000
"""Characters of a batch, beyond which its last response may go: one time limit holds for all of them."""

_SLOW_NICENESS = 10
"""One that computes until it is killed takes a tenth of what a fast worker takes."""
_LOOK_EVERY_S, _CLOSE_LIMIT_S = 10.0, 15.0
_START_ATTEMPTS = 3
_COMPARISONS_KEPT = 10_000


@dataclass(frozen=True, slots=True, eq=False)
class _Work:
    """A job that waits for a worker, and who waits for its result."""

    job: Job
    result: "asyncio.Future[Result]"

    @property
    def characters(self) -> int:
        return len(self.job.response) if isinstance(self.job, VerificationRequest) else 0


class RewardPool:
    """Judges responses in processes of its own. May be used from several event loops at once."""

    def __init__(self, config: RewardConfig) -> None:
        """Starts the fast workers in the background; the first verdicts wait for them (about 0.1 s)."""
        self._config, self._loop = config, asyncio.new_event_loop()
        self._closing = asyncio.Event()
        self._failure: PoolError | None = None
        self._last_progress = 0.0
        self._fast: asyncio.Queue[_Work] = asyncio.Queue()
        self._slow: asyncio.Queue[_Work] = asyncio.Queue()
        self._steps: asyncio.Queue[_Work] = asyncio.Queue()
        self._service = remote.RemoteEnvironment(config.remote_environment)
        self._processes: set[WorkerProcess] = set()
        self._comparisons: dict[tuple[str, str], asyncio.Task[Verdict]] = {}
        self._thread = threading.Thread(target=self._run, name="reward-pool", daemon=True)
        self._thread.start()

    async def verify(self, requests: Sequence[VerificationRequest]) -> list[Verdict]:
        """One verdict for each request, in order. One that could not be given has `error` set and is not correct.

        Raises:
            VerifierError: a request names a verifier that is not known.
            PoolError: the pool is closed, its workers do not start, or nothing has moved for much too long.
        """
        entries = {name: find(name) for name in {request.verifier for request in requests}}
        if any(map(is_sum, entries)):
            parts = [replace(each, verifier=name) for each in requests for _, name in weighted(each.verifier)]
            judged = iter(await self.verify(parts))
            return [_sum(each.verifier, [next(judged) for _ in weighted(each.verifier)]) for each in requests]
        ours = [request for request in requests if not entries[request.verifier].remote]
        theirs = [request for request in requests if entries[request.verifier].remote]
        service = asyncio.ensure_future(remote.verify(self._config.remote, theirs))
        try:
            own, answered = iter(await self._in_pool(self._judge(ours, entries))), iter(await service)
        finally:
            service.cancel()
        return [next(answered if entries[request.verifier].remote else own) for request in requests]

    async def step(self, environment: str, episode: Episode) -> Stepped:
        """What the environment makes of the newest turn, under the limits of a slow verifier. Whatever it does, there
        is an answer.

        Raises:
            PoolError: as `verify`.
        """
        remotely = environment == REMOTE
        asking = self._service.step(episode) if remotely else self._result(self._steps, Step(environment, episode))
        stepped = await self._in_pool(asking)
        self._last_progress = time.monotonic()
        assert isinstance(stepped, Stepped)
        return stepped

    async def _in_pool(self, work: Coroutine[Any, Any, T]) -> T:
        """What `work` gives, which runs in the pool's thread and ends with the caller; gives up if no worker has
        delivered for longer than any job may take."""
        if self._failure is not None:
            work.close()
            raise self._failure
        services_s = self._config.remote_environment.deadline_s if self._config.remote_environment.url else 0
        stuck_after_s = 2 * self._config.timeout_s + _START_ATTEMPTS * START_LIMIT_S + services_s
        began = time.monotonic()
        waiting = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))
        try:
            while not waiting.done():
                await asyncio.wait([waiting], timeout=_LOOK_EVERY_S)
                silent_s = time.monotonic() - max(began, self._last_progress)
                if not waiting.done() and (self._failure or silent_s > stuck_after_s):
                    workers = self.worker_pids()
                    raise self._failure or PoolError(f"reward pool: no verdict for {silent_s:.0f} s; workers {workers}")
        finally:
            waiting.cancel()
        if waiting.cancelled() and self._failure is not None:
            raise self._failure
        return waiting.result()

    def worker_pids(self) -> list[int]:
        """Process ids of the workers that run now, for reports of who waits for whom."""
        return [process.pid for process in self._processes.copy()]

    def close(self) -> None:
        """Kills the workers and ends their thread; calls of `verify` that still wait raise PoolError. Repeatable."""
        self._failure = self._failure or PoolError("reward pool: it is closed")
        with suppress(RuntimeError):  # the loop has ended already
            self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join(_CLOSE_LIMIT_S)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve_until_closed())

    async def _serve_until_closed(self) -> None:
        """Runs the workers. An error of one ends the pool, so that no caller waits for a worker that is gone."""
        queues = [self._fast] * self._config.workers + [self._slow] * self._config.algebra_workers
        queues += [self._steps] * self._config.environment_workers
        tasks = [asyncio.create_task(each) for each in (self._closing.wait(), *map(self._serve, queues))]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            done.pop().result()
        except PoolError as error:
            self._failure = self._failure or error
        except Exception as error:
            self._failure = PoolError(f"reward pool: {type(error).__name__}: {error}")
        finally:
            for task in tasks:
                task.cancel()  # before it sees its process gone, and gives verdicts that say so
            for process in self._processes.copy():
                await self._end(process)
            await self._service.close()

    async def _serve(self, queue: asyncio.Queue[_Work]) -> None:
        """Starts a process, feeds it, replaces it when it is lost. A slow one starts when there is work for it."""
        fast = queue is self._fast
        process = await self._start(0) if fast else None
        while True:
            if works := await self._take(queue):
                process = process or await self._start(_SLOW_NICENESS)
                if not await self._do(process, works, slow=not fast):
                    await self._end(process)
                    process = await self._start(0) if fast else None

    async def _start(self, niceness: int, attempt: int = 1) -> WorkerProcess:
        """A worker that is ready. Raises PoolError: none comes up."""
        process = WorkerProcess(self._config, niceness)
        self._processes.add(process)
        try:
            await process.wait_ready()
            return process
        except PoolError as error:
            await self._end(process)
            if attempt == _START_ATTEMPTS:
                raise PoolError(f"reward pool: {error} ({attempt} attempts)") from None
        return await self._start(niceness, attempt + 1)

    async def _end(self, process: WorkerProcess) -> None:
        self._processes.discard(process)
        await process.end()

    async def _take(self, queue: asyncio.Queue[_Work]) -> list[_Work]:
        """The next work: one slow job, or a worker's share of the fast ones, without what was given up."""
        works = [await queue.get()]
        if queue is self._fast:
            share = min(_BATCH_RESPONSES, max(_SHARED_FROM, 1 + queue.qsize() // self._config.workers))
            characters = works[0].characters
            while len(works) < share and characters < _BATCH_CHARACTERS and not queue.empty():
                works.append(queue.get_nowait())
                characters += works[-1].characters
        return [work for work in works if not work.result.done()]

    async def _do(self, process: WorkerProcess, works: list[_Work], *, slow: bool) -> bool:
        """Has the process do the work and passes the results on; False if the process must be replaced."""
        try:
            results = await process.judge([work.job for work in works], slow=slow, limit_s=self._config.timeout_s)
        except WorkerLost as lost:
            for work in works:
                if not work.result.done():  # else its caller has just given up
                    work.result.set_exception(lost)
            return False
        finally:  # a timeout is a verdict too
            self._last_progress = time.monotonic()
        for work, result in zip(works, results, strict=True):
            if not work.result.done():
                work.result.set_result(result)
        return True

    async def _judge(self, requests: Sequence[VerificationRequest], entries: Mapping[str, Entry]) -> list[Verdict]:
        """Verdicts of the workers. `entries`: of the verifiers, by name."""
        queues = (self._fast if entries[each.verifier].fast else self._slow for each in requests)
        return await asyncio.gather(*map(self._verdict, queues, requests))

    async def _verdict(self, queue: asyncio.Queue[_Work], job: VerificationRequest | Deferred) -> Verdict:
        """The verdict of a worker; where it leaves that to a comparison, the verdict of algebra.

        A group often agrees on its answer: equal comparisons wait for one, and later ones take its verdict.
        """
        result = await self._result(queue, job)
        if isinstance(result, Verdict):
            return result
        assert isinstance(result, Deferred)
        key = (result.answer, result.truth)
        comparison = self._comparisons.get(key)
        known = comparison is not None and comparison.done()
        if comparison is None:
            comparison = self._comparisons[key] = asyncio.create_task(self._verdict(self._slow, result))
            if len(self._comparisons) > _COMPARISONS_KEPT:
                del self._comparisons[next(iter(self._comparisons))]
        verdict = await asyncio.shield(comparison)  # for the others, if this caller gives up
        if verdict.error is not None:  # not remembered: a timeout may be the machine's fault
            self._comparisons.pop(key, None)
        seconds = result.seconds + (0.0 if known else verdict.seconds)
        return replace(verdict, extracted=result.extracted, seconds=seconds)

    async def _result(self, queue: asyncio.Queue[_Work], job: Job, *, last: bool = False) -> Result:
        """The result of a worker; but for the fast queue, of one that has nothing else to do meanwhile.

        If a worker is lost and something else may be to blame, such as other responses or earlier work, the job gets a
        second and last attempt by itself.
        """
        work = _Work(job, self._loop.create_future())
        queue.put_nowait(work)
        try:
            return await work.result
        except WorkerLost as lost:
            fast = queue is self._fast
            if fast or (lost.again and not last):
                return await self._result(self._slow if fast else queue, job, last=True)
            if isinstance(job, Step):
                return Stepped(seconds=lost.seconds, error=str(lost))
            return Verdict(accuracy=False, extracted=None, rule="", seconds=lost.seconds, error=str(lost))


def _sum(name: str, verdicts: Sequence[Verdict]) -> Verdict:
    """The verdict by a weighted sum, from those by its parts. One that is unjudged stands for all."""
    if not is_sum(name):
        return verdicts[0]
    rewards, total, error = {}, 0.0, verdicts[0].error
    for (weight, part), verdict in zip(weighted(name), verdicts, strict=True):
        if verdict.unjudged:
            return replace(verdict, accuracy=False, error=f"{part}: {verdict.error}")
        rewards[part] = 1.0 if verdict.accuracy else -1.0
        total += weight * rewards[part]
        error = error or (verdict.error and f"{part}: {verdict.error}")
    return replace(verdicts[0], seconds=sum(v.seconds for v in verdicts), error=error, rewards=rewards, reward=total)
