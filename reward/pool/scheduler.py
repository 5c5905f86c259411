"""The queues between callers and workers: who waits for which verdict, and which work a worker takes next."""

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from enum import StrEnum

from reward.pool.messages import Batch, Order, Result, Single
from reward.verdict import Deferred, PoolError, Verdict, VerificationRequest

BATCH_RESPONSES = 256
"""Responses of one batch, at most."""

BATCH_CHARACTERS = 4_000_000
"""Characters of one batch, at most, unless a single response has more."""

_CACHE_SIZE = 10_000


class Queue(StrEnum):
    """Which tasks a worker takes. No worker takes both, so nothing in the slow queue can hold up the fast one."""

    FAST = "fast"
    """Verifiers of linear time, in batches."""
    SLOW = "slow"
    """Algebra, and verifiers that are not registered as fast: one at a time, under the wall-clock limit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolCounters:
    """What a pool has done since it was made."""

    verdicts: int = 0
    algebra: int = 0
    """Verdicts that needed math-verify, whether it ran or an equal comparison was known."""
    timeouts: int = 0
    errors: int = 0
    """Verdicts with an error, timeouts included."""
    restarts: int = 0
    """Workers that were replaced, for whatever reason."""


class Job:
    """One call of `RewardPool.verify`: its verdicts, in order, until `missing` is 0 and `done` is set."""

    def __init__(self, size: int) -> None:
        self.verdicts: list[Verdict | None] = [None] * size
        self.missing = size
        self.done: Future[None] = Future()
        self.done.set_running_or_notify_cancel()  # a caller that gives up cancels its waiting, not this
        self.abandoned = False


@dataclass(slots=True, eq=False)
class Task:
    """One request on its way."""

    job: Job
    index: int
    request: VerificationRequest
    deferred: Deferred | None = None
    """Set once a fast verifier has found that only algebra can tell."""
    retried: bool = False
    sharing: list["Task"] = field(default_factory=list)
    """Tasks that wait for this one's algebra because theirs is the same: a group often agrees on its answer."""

    @property
    def abandoned(self) -> bool:
        """Whether nobody waits for it any more."""
        return self.job.abandoned and all(task.job.abandoned for task in self.sharing)


@dataclass(frozen=True, slots=True)
class Work:
    """What one worker does next: a batch of fast tasks, or one slow task."""

    tasks: tuple[Task, ...]
    order: Order


class Scheduler:
    """Both queues, the jobs that wait for them, and what algebra has already answered. Safe between threads."""

    def __init__(self, fast_workers: int) -> None:
        self._fast_workers = fast_workers
        self._lock = threading.Condition()
        self._fast: deque[Task] = deque()
        self._slow: deque[Task] = deque()
        self._algebra_under_way: dict[tuple[str, str], Task] = {}
        self._algebra_known: OrderedDict[tuple[str, str], Verdict] = OrderedDict()
        self._jobs: dict[int, Job] = {}
        self._failure: PoolError | None = None
        self._last_progress = time.monotonic()
        self._counts = dict.fromkeys(PoolCounters.__slots__, 0)

    def submit(self, requests: Sequence[VerificationRequest], fast: Sequence[bool]) -> Job:
        """Queues requests. Raises PoolError after `fail`."""
        job = Job(len(requests))
        with self._lock:
            if self._failure is not None:
                raise self._failure
            if not self._jobs:
                self._last_progress = time.monotonic()
            self._jobs[id(job)] = job
            for index, request in enumerate(requests):
                (self._fast if fast[index] else self._slow).append(Task(job, index, request))
            self._lock.notify_all()
        return job

    def forget(self, job: Job) -> None:
        """Nobody waits for this job any more: what is left of it is not done."""
        with self._lock:
            job.abandoned = True
            self._jobs.pop(id(job), None)

    def fail(self, reason: str) -> None:
        """Ends every job with an error, and all later ones, and sends the workers home. The first reason stays."""
        with self._lock:
            if self._failure is None:
                self._failure = PoolError(f"reward pool: {reason}")
            jobs = list(self._jobs.values())
            self._jobs.clear()
            self._fast.clear()
            self._slow.clear()
            self._lock.notify_all()
        for job in jobs:
            job.done.set_exception(self._failure)

    def count_restart(self) -> None:
        """One more worker was replaced."""
        with self._lock:
            self._counts["restarts"] += 1

    def counters(self) -> PoolCounters:
        """Totals so far."""
        with self._lock:
            return PoolCounters(**self._counts)

    def silent_s(self) -> float:
        """Seconds since the last verdict, or since there has been work at all."""
        return time.monotonic() - self._last_progress

    def take(self, queue: Queue) -> Work | None:
        """The next work of a queue, waiting until there is some; None once the pool ends."""
        with self._lock:
            while self._failure is None:
                if queue is Queue.FAST and self._fast:
                    return self._batch()
                if queue is Queue.SLOW and self._slow:
                    task = self._slow.popleft()
                    if not task.abandoned:
                        return Work((task,), Single(task.deferred or task.request))
                    if task.deferred is not None:
                        self._algebra_under_way.pop(_comparison(task.deferred), None)
                else:
                    self._lock.wait(1.0)
        return None

    def _batch(self) -> Work:
        share = max(16, -(-len(self._fast) // self._fast_workers))
        tasks: list[Task] = []
        characters = 0
        while self._fast and len(tasks) < min(share, BATCH_RESPONSES):
            characters += len(self._fast[0].request.response)
            if tasks and characters > BATCH_CHARACTERS:
                break
            tasks.append(self._fast.popleft())
        return Work(tuple(tasks), Batch([task.request for task in tasks]))

    def isolate(self, work: Work) -> None:
        """Queues each task of a lost worker again, by itself, for one more attempt."""
        with self._lock:
            for task in work.tasks:
                task.retried = True
                self._slow.append(task)
            self._lock.notify_all()

    def deliver(self, work: Work, results: Sequence[Result]) -> None:
        """Passes verdicts on to their callers, or the tasks on to algebra."""
        with self._lock:
            for task, result in zip(work.tasks, results, strict=True):
                if isinstance(result, Deferred):
                    self._send_to_algebra(task, result)
                elif task.deferred is None:
                    self._finish(task, result)
                else:
                    self._finish_algebra(task, task.deferred, result)
            self._lock.notify_all()

    def _send_to_algebra(self, task: Task, deferred: Deferred) -> None:
        task.deferred = deferred
        self._counts["algebra"] += 1
        key = _comparison(deferred)
        if (known := self._algebra_known.get(key)) is not None:
            self._algebra_known.move_to_end(key)
            self._finish(task, replace(known, extracted=deferred.extracted, seconds=deferred.seconds))
        elif (under_way := self._algebra_under_way.get(key)) is not None:
            under_way.sharing.append(task)
        else:
            self._algebra_under_way[key] = task
            task.retried = False
            self._slow.append(task)

    def _finish_algebra(self, task: Task, deferred: Deferred, verdict: Verdict) -> None:
        key = _comparison(deferred)
        self._algebra_under_way.pop(key, None)
        if verdict.error is None:  # a timeout may be the machine's fault, so errors are not remembered
            self._algebra_known[key] = verdict
            if len(self._algebra_known) > _CACHE_SIZE:
                self._algebra_known.popitem(last=False)
        for each in (task, *task.sharing):
            own = each.deferred or deferred
            self._finish(each, replace(verdict, extracted=own.extracted, seconds=own.seconds + verdict.seconds))

    def _finish(self, task: Task, verdict: Verdict) -> None:
        job = task.job
        job.verdicts[task.index] = verdict
        job.missing -= 1
        if job.missing == 0 and self._jobs.pop(id(job), None) is not None:
            job.done.set_result(None)
        self._last_progress = time.monotonic()
        self._counts["verdicts"] += 1
        self._counts["errors"] += verdict.error is not None
        self._counts["timeouts"] += verdict.error == "timeout"


def _comparison(deferred: Deferred) -> tuple[str, str]:
    return deferred.answer, deferred.truth
