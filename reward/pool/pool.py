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
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from reward.config import RewardConfig
from reward.environment import REMOTE, Episode, Step, Stepped
from reward.pool import remote
from reward.pool.messages import Job, Result
from reward.pool.worker_process import START_LIMIT_S, WorkerLost, WorkerProcess
from reward.registry import find, is_sum, weighted
from reward.verdict import Deferred, PoolError, Verdict, VerificationRequest

T = TypeVar("T")

_BATCH_RESPONSES = 256
"""Responses of one call that stay together in the fast queue, at most."""
_BATCH_CHARACTERS = 4_000_000
"""Characters of these, unless a single response has more: one time limit holds for all that a worker is sent."""

_SLOW_NICENESS = 10
"""One that computes until it is killed takes a tenth of what a fast worker takes."""
_LOOK_EVERY_S = 10.0
_START_ATTEMPTS = 3
_CLOSE_LIMIT_S = 15.0
_COMPARISONS_KEPT = 10_000


@dataclass(frozen=True, slots=True, eq=False)
class _Work:
    """Jobs that wait for a worker, and who waits for their results."""

    jobs: Sequence[Job]
    results: "asyncio.Future[Sequence[Result]]"

    @property
    def characters(self) -> int:
        return sum(len(job.response) for job in self.jobs if isinstance(job, VerificationRequest))


class RewardPool:
    """Judges responses in processes of its own. May be used from several event loops at once."""

    def __init__(self, config: RewardConfig, *, judges: bool = True) -> None:
        """Starts the fast workers in the background; the first verdicts wait for them (about 0.1 s).

        `judges`: False for one that only steps environments.
        """
        self._judges = judges
        self._config = config
        self._loop = asyncio.new_event_loop()
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
        names = {request.verifier for request in requests}
        if any(map(is_sum, names)):
            parts = [replace(each, verifier=name) for each in requests for _, name in weighted(each.verifier)]
            judged = iter(await self.verify(parts))
            return [_sum(each.verifier, [next(judged) for _ in weighted(each.verifier)]) for each in requests]
        queues = {name: _queue(name) for name in names}
        asked: dict[str, list[VerificationRequest]] = {"fast": [], "slow": [], "remote": []}
        for request in requests:
            asked[queues[request.verifier]].append(request)
        service = asyncio.ensure_future(remote.verify(self._config.remote, asked["remote"]))
        try:
            fast, slow = await self._in_pool(self._judge(asked["fast"], asked["slow"]))
            verdicts = {"fast": iter(fast), "slow": iter(slow), "remote": iter(await service)}
        finally:
            service.cancel()
        return [next(verdicts[queues[request.verifier]]) for request in requests]

    async def step(self, environment: str, episode: Episode) -> Stepped:
        """What the environment makes of the newest turn, under the limits of a slow verifier. Whatever it does, there
        is an answer.

        Raises:
            PoolError: as `verify`.
        """
        remotely = environment == REMOTE
        asking = self._service.step(episode) if remotely else self._alone(self._steps, Step(environment, episode))
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
        queues = [self._slow] * self._config.algebra_workers
        queues += [self._fast] * self._config.workers if self._judges else []
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
            works = await self._take(queue)
            if works:
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
        """The next work: one slow job, or fast batches, without what was given up.

        Small fast batches are taken together, up to a worker's share of them, until they are as large as one may be.
        """
        works = [await queue.get()]
        if queue is self._fast:
            share = 1 + queue.qsize() // self._config.workers
            responses, characters = len(works[0].jobs), works[0].characters
            while len(works) < share and responses < _BATCH_RESPONSES and characters < _BATCH_CHARACTERS:
                works.append(queue.get_nowait())
                responses += len(works[-1].jobs)
                characters += works[-1].characters
        return [work for work in works if not work.results.done()]

    async def _do(self, process: WorkerProcess, works: list[_Work], *, slow: bool) -> bool:
        """Has the process do the work and passes the results on; False if the process must be replaced."""
        jobs = [job for work in works for job in work.jobs]
        try:
            results = iter(await process.judge(jobs, slow=slow, limit_s=self._config.timeout_s))
        except WorkerLost as lost:
            for work in works:
                if not work.results.done():  # else its caller has just given up
                    work.results.set_exception(lost)
            return False
        finally:  # a timeout is a verdict too
            self._last_progress = time.monotonic()
        for work in works:
            own = [next(results) for _ in work.jobs]
            if not work.results.done():
                work.results.set_result(own)
        return True

    async def _judge(
        self, fast: Sequence[VerificationRequest], slow: Sequence[VerificationRequest]
    ) -> tuple[list[Verdict], list[Verdict]]:
        """Verdicts of the workers."""
        batches = asyncio.gather(*map(self._judge_batch, _batches(fast)))
        judged, alone = await asyncio.gather(batches, asyncio.gather(*map(self._judge_alone, slow)))
        return [verdict for batch in judged for verdict in batch], alone

    async def _judge_batch(self, batch: Sequence[VerificationRequest]) -> Sequence[Verdict]:
        try:
            results = await self._worked(self._fast, batch)
        except WorkerLost:  # each request gets another attempt by itself
            return await asyncio.gather(*(self._judge_alone(request, last=True) for request in batch))
        verdicts = [result for result in results if isinstance(result, Verdict)]
        return verdicts if len(verdicts) == len(results) else await asyncio.gather(*map(self._settle, results))

    async def _worked(self, queue: asyncio.Queue[_Work], jobs: Sequence[Job]) -> Sequence[Result]:
        """Results of a worker. Raises WorkerLost."""
        work = _Work(jobs, self._loop.create_future())
        queue.put_nowait(work)
        return await work.results

    async def _judge_alone(self, job: VerificationRequest | Deferred, *, last: bool = False) -> Verdict:
        """The verdict of a worker that has nothing else to do meanwhile."""
        return await self._settle(await self._alone(self._slow, job, last=last))

    async def _alone(self, queue: asyncio.Queue[_Work], job: Job, *, last: bool = False) -> Result:
        """The result of a worker that has nothing else to do meanwhile.

        If a worker is lost and something else may be to blame, such as earlier work, the job gets a second and last
        attempt.
        """
        try:
            (result,) = await self._worked(queue, [job])
            return result
        except WorkerLost as lost:
            if lost.again and not last:
                return await self._alone(queue, job, last=True)
            if isinstance(job, Step):
                return Stepped(seconds=lost.seconds, error=str(lost))
            return Verdict(accuracy=False, extracted=None, rule="", seconds=lost.seconds, error=str(lost))

    async def _settle(self, result: Result) -> Verdict:
        """A verdict as it is; for a comparison the verdict of algebra.

        A group often agrees on its answer: equal comparisons wait for one, and later ones take its verdict.
        """
        if isinstance(result, Verdict):
            return result
        assert isinstance(result, Deferred)
        key = (result.answer, result.truth)
        comparison = self._comparisons.get(key)
        known = comparison is not None and comparison.done()
        if comparison is None:
            comparison = self._comparisons[key] = asyncio.create_task(self._judge_alone(result))
            if len(self._comparisons) > _COMPARISONS_KEPT:
                del self._comparisons[next(iter(self._comparisons))]
        verdict = await asyncio.shield(comparison)  # for the others, if this caller gives up
        if verdict.error is not None:  # not remembered: a timeout may be the machine's fault
            self._comparisons.pop(key, None)
        seconds = result.seconds + (0.0 if known else verdict.seconds)
        return replace(verdict, extracted=result.extracted, seconds=seconds)


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


def _batches(requests: Sequence[VerificationRequest]) -> Iterator[list[VerificationRequest]]:
    batch: list[VerificationRequest] = []
    characters = 0
    for request in requests:
        characters += len(request.response)
        if batch and (len(batch) == _BATCH_RESPONSES or characters > _BATCH_CHARACTERS):
            yield batch
            batch, characters = [], len(request.response)
        batch.append(request)
    if batch:
        yield batch


def _queue(verifier: str) -> str:
    entry = find(verifier)
    return "remote" if entry.remote else "fast" if entry.fast else "slow"
