"""The queues between callers and workers: who waits for which verdict, and which work a worker takes next."""

import asyncio
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from reward.verdict import Verdict

BATCH_RESPONSES = 256
"""Responses of one batch, at most."""

BATCH_CHARACTERS = 4_000_000
"""Characters of one batch, at most, unless a single response has more."""

_CACHE_SIZE = 10_000

Row = tuple[str, str, str, str]
"""(verifier, response, ground_truth, prompt)."""


class PoolError(RuntimeError):
    """The pool can give no verdicts: it is closed, or its workers do not start, or nothing moves any more."""

    exit_code = 1


class Lane(StrEnum):
    """Which tasks a worker takes. No worker takes both, so nothing in the dear lane can hold up the cheap one."""

    CHEAP = "cheap"
    """Verifiers of linear time, in batches."""
    DEAR = "dear"
    """Algebra, and verifiers that are not registered as cheap: one at a time, under the wall-clock limit."""


class Kind(StrEnum):
    """How a worker is asked; the first word of the request (`reward.worker`)."""

    BATCH = "batch"
    SINGLE = "single"
    ALGEBRA = "algebra"


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


@dataclass(slots=True)
class Job:
    """One call of `RewardPool.verify`: its verdicts, in order, until `missing` is 0."""

    verdicts: list[Verdict | None]
    missing: int
    loop: asyncio.AbstractEventLoop
    done: "asyncio.Future[None]"
    abandoned: bool = False

    def settle(self, error: Exception | None) -> None:
        """Wakes the caller, from any thread."""
        with suppress(RuntimeError):  # its event loop has ended: nobody waits any more
            self.loop.call_soon_threadsafe(self._wake, error)

    def _wake(self, error: Exception | None) -> None:
        if self.done.done():
            return
        if error is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(error)


@dataclass(slots=True, eq=False)
class Task:
    """One request on its way."""

    job: Job
    index: int
    row: Row
    algebra: tuple[str, str, str] | None = None
    """(answer, truth, extracted), once a cheap verifier has found that only algebra can tell."""
    seconds: float = 0.0
    retried: bool = False
    sharing: list["Task"] = field(default_factory=list)
    """Tasks that wait for this one's algebra because theirs is the same: a group often agrees on its answer."""

    @property
    def abandoned(self) -> bool:
        """Whether nobody waits for it any more."""
        return self.job.abandoned and all(task.job.abandoned for task in self.sharing)


@dataclass(frozen=True, slots=True)
class Work:
    """What one worker does next: a batch of cheap tasks, or one dear task."""

    kind: Kind
    tasks: tuple[Task, ...]

    def request(self) -> tuple[Any, ...]:
        """The message to the worker."""
        if self.kind is Kind.BATCH:
            return (Kind.BATCH.value, [task.row for task in self.tasks])
        task = self.tasks[0]
        return (self.kind.value, task.row) if task.algebra is None else (self.kind.value, *task.algebra)


class Lanes:
    """Both queues, the jobs that wait for them, and what algebra has already answered. Safe between threads."""

    def __init__(self, cheap_workers: int) -> None:
        self._cheap_workers = cheap_workers
        self._lock = threading.Condition()
        self._cheap: deque[Task] = deque()
        self._dear: deque[Task] = deque()
        self._algebra_under_way: dict[tuple[str, str], Task] = {}
        self._algebra_known: OrderedDict[tuple[str, str], tuple[bool, str]] = OrderedDict()
        self._jobs: dict[int, Job] = {}
        self._failure: PoolError | None = None
        self._last_progress = time.monotonic()
        self._counts = dict.fromkeys(PoolCounters.__slots__, 0)

    def submit(self, job: Job, rows: Sequence[Row], cheap: Sequence[bool]) -> None:
        """Queues the rows of a job. Raises PoolError after `fail`."""
        with self._lock:
            if self._failure is not None:
                raise self._failure
            if not self._jobs:
                self._last_progress = time.monotonic()
            self._jobs[id(job)] = job
            for index, row in enumerate(rows):
                (self._cheap if cheap[index] else self._dear).append(Task(job, index, row))
            self._lock.notify_all()

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
            self._cheap.clear()
            self._dear.clear()
            self._lock.notify_all()
        for job in jobs:
            job.settle(self._failure)

    def count(self, name: str) -> None:
        """Adds one to a field of `PoolCounters`."""
        with self._lock:
            self._counts[name] += 1

    def counters(self) -> PoolCounters:
        """Totals so far."""
        with self._lock:
            return PoolCounters(**self._counts)

    def silent_s(self) -> float:
        """Seconds since the last verdict, or since there has been work at all."""
        return time.monotonic() - self._last_progress

    def take(self, lane: Lane) -> Work | None:
        """The next work of a lane, waiting until there is some; None once the pool ends."""
        with self._lock:
            while self._failure is None:
                if lane is Lane.CHEAP and self._cheap:
                    return Work(Kind.BATCH, self._batch())
                if lane is Lane.DEAR and self._dear:
                    task = self._dear.popleft()
                    if not task.abandoned:
                        return Work(Kind.SINGLE if task.algebra is None else Kind.ALGEBRA, (task,))
                    if task.algebra is not None:
                        self._algebra_under_way.pop(task.algebra[:2], None)
                else:
                    self._lock.wait(1.0)
        return None

    def _batch(self) -> tuple[Task, ...]:
        share = max(16, -(-len(self._cheap) // self._cheap_workers))
        tasks: list[Task] = []
        characters = 0
        while self._cheap and len(tasks) < min(share, BATCH_RESPONSES):
            characters += len(self._cheap[0].row[1])
            if tasks and characters > BATCH_CHARACTERS:
                break
            tasks.append(self._cheap.popleft())
        return tuple(tasks)

    def isolate(self, work: Work) -> None:
        """Queues each task of a lost worker again, by itself, for one more attempt."""
        with self._lock:
            for task in work.tasks:
                task.retried = True
                self._dear.append(task)
            self._lock.notify_all()

    def deliver(self, work: Work, results: Sequence[Sequence[Any]]) -> None:
        """Makes verdicts of a worker's results, or sends the tasks on to algebra."""
        with self._lock:
            for task, result in zip(work.tasks, results, strict=True):
                if len(result) == 4:
                    self._send_to_algebra(task, result)
                    continue
                accuracy, extracted, rule, seconds, error = result
                if task.algebra is None:
                    self._finish(task, accuracy, extracted, rule, seconds, error)
                else:
                    self._finish_algebra(task, accuracy, rule, seconds, error)
            self._lock.notify_all()

    def _send_to_algebra(self, task: Task, result: Sequence[Any]) -> None:
        answer, truth, extracted, task.seconds = result
        task.algebra = (answer, truth, extracted)
        self._counts["algebra"] += 1
        known = self._algebra_known.get((answer, truth))
        under_way = self._algebra_under_way.get((answer, truth))
        if known is not None:
            self._algebra_known.move_to_end((answer, truth))
            self._finish(task, known[0], extracted, known[1], task.seconds, None)
        elif under_way is not None:
            under_way.sharing.append(task)
        else:
            self._algebra_under_way[answer, truth] = task
            task.retried = False
            self._dear.append(task)

    def _finish_algebra(self, task: Task, accuracy: bool, rule: str, seconds: float, error: str | None) -> None:
        assert task.algebra is not None, "only tasks with algebra come here"
        key = task.algebra[:2]
        self._algebra_under_way.pop(key, None)
        if error is None:  # a timeout may be the machine's fault, so errors are not remembered
            self._algebra_known[key] = (accuracy, rule)
            if len(self._algebra_known) > _CACHE_SIZE:
                self._algebra_known.popitem(last=False)
        for each in (task, *task.sharing):
            extracted = each.algebra[2] if each.algebra else None
            self._finish(each, accuracy, extracted, rule, each.seconds + seconds, error)

    def _finish(
        self, task: Task, accuracy: bool, extracted: str | None, rule: str, seconds: float, error: str | None
    ) -> None:
        job = task.job
        job.verdicts[task.index] = Verdict(
            accuracy=accuracy, extracted=extracted, rule=rule, seconds=seconds, error=error
        )
        job.missing -= 1
        if job.missing == 0:
            job.settle(None)
        self._last_progress = time.monotonic()
        self._counts["verdicts"] += 1
        self._counts["errors"] += error is not None
        self._counts["timeouts"] += error == "timeout"
