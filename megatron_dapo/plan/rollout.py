"""Seconds in which the servers fill a batch: dynamic sampling in prompt order over a long tail of lengths.

All servers together are one: they hold equally many responses, which all grow by one token a decode step. A decode step
reads the weights and the KV cache of what is running once, or calculates, whichever takes longer, and has an overhead.
Of a mixture's experts it reads those that the responses on a server are sent to, each taken to be as likely.
Prompts are dispatched as `coordinator.sampler` does it, by the same two functions: in prompt order, as many as the
pass rate asks for, until the batch is full. The surplus stands still then and goes on in the next step, after its
prefixes were read again (in `sync` it goes on at once: an upper bound); or its end is awaited, or it is given up.

Left out: what the balancer leaves unequal, a server's own retractions when its KV cache is full (instead only as many
run as have room at their mean length), and rewards, which are judged meanwhile.

Assumed: the length of a response is lognormal and is cut off at `rollout.max_new_tokens`. A part of its variance lies
between prompts and goes with difficulty z, standard normal: a hard prompt has long responses. A response is right with
probability 1 / (1 + exp(k z)); k is such that the share of groups that dynamic sampling keeps is the pass rate given.
"""

import functools
import heapq
import itertools
import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_dapo.algorithm.dynamic_sampling import PassRate, keep_group
from megatron_dapo.config.algorithm_config import AlgorithmConfig

_SAMPLE = 4096
_STEEPEST, _FINE = 200, 10**9
"""k is at most the first, and found to 1 / the second."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """What the responses of a run look like."""

    mean_response: float
    """Tokens, before any is cut off."""

    sigma: float
    """Standard deviation of the logarithm of the length."""

    difficulty_share: float
    """Share of sigma squared between prompts, 0..1."""

    mean_prompt: float
    """Tokens."""

    pass_rate: float
    """Share of groups that dynamic sampling keeps, above 0 and below 1."""

    longest: int
    """`rollout.max_new_tokens`."""

    group_size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """One prompt's responses: Group(lengths=(3100, 20480, 950, 4200), correct=1)."""

    lengths: tuple[int, ...]
    correct: int

    @property
    def kept(self) -> bool:
        """Eq. 11."""
        return keep_group(self.correct, len(self.lengths))


def draw_group(workload: Workload, difficulty: float, random: np.random.Generator) -> Group:
    """All responses to a prompt of this difficulty, drawn anew each time."""
    between = workload.sigma * math.sqrt(workload.difficulty_share)
    within = workload.sigma * math.sqrt(1 - workload.difficulty_share)
    median = math.log(workload.mean_response) - workload.sigma**2 / 2
    logs = median + between * difficulty + within * random.standard_normal(workload.group_size)
    lengths = np.clip(np.exp(logs), 1, workload.longest).astype(int)
    right = random.binomial(workload.group_size, _right(_steepness(workload) * difficulty))
    return Group(lengths=tuple(lengths.tolist()), correct=int(right))


def groups(workload: Workload, seed: int) -> Iterator[Group]:
    """Groups without end, the same for the same seed."""
    return itertools.tee(_drawn(workload, seed), 2)[1]


@functools.lru_cache(maxsize=4)
def _drawn(workload: Workload, seed: int) -> Iterator[Group]:
    """Nobody advances this one: it keeps what its copies have drawn, for simulations of other servers."""
    random = np.random.default_rng(seed)
    return itertools.tee((draw_group(workload, random.standard_normal(), random) for _ in itertools.count()), 1)[0]


def _right(slope: float | np.ndarray) -> float | np.ndarray:
    return 1 / (1 + np.exp(np.clip(slope, -500, 500)))


@functools.cache
def _steepness(workload: Workload) -> float:
    """k, by bisection over a fixed sample of difficulties."""
    difficulty = np.random.default_rng(0).standard_normal(_SAMPLE)

    def filtered(steps: int) -> float:
        right = _right(steps / _FINE * difficulty)
        return float(np.mean(right**workload.group_size + (1 - right) ** workload.group_size))

    return bisect_left(range(_STEEPEST * _FINE), 1 - workload.pass_rate, key=filtered) / _FINE


@dataclass(frozen=True, kw_only=True, slots=True)
class Fleet:
    """All servers as one."""

    slots: int
    """Responses that run at the same time."""

    mean_prompt: float

    prefill_s: float
    """Seconds in which the fleet reads one response's prompt."""

    step_s: Callable[[int, float], float]
    """Seconds of one decode step with so many responses, of so many tokens of context in all."""


Carried = tuple[Group, Sequence[tuple[int, int]]]
"""A group, and of each unfinished response its length and the tokens that it has."""


def fill_batches(
    algorithm: AlgorithmConfig, fleet: Fleet, source: Iterator[Group], steps: int, *, interrupts: bool = True
) -> list["RolloutStep"]:
    """`steps` rollout steps one after the other; the first has nothing carried over.

    Args:
        interrupts: whether a surplus that is carried over stands still until the next step (where it goes on, in
            `sync`, that is sooner full); else its end is awaited.
    """
    sampling = algorithm.dynamic_sampling
    rate = PassRate.start(sampling.initial_pass_rate, memory=4.0 * algorithm.prompts_per_step)
    carried: list[Carried] = []
    limit = int((sampling.max_oversampling if sampling.filter == "refill" else 1) * algorithm.prompts_per_step)
    done = []
    for _ in range(steps):
        step = RolloutStep(fleet, source, carried)
        while missing := algorithm.prompts_per_step - len(step.kept):
            more, refill = missing - len(step.flight), sampling.filter == "refill"
            more = rate.prompts_to_send(missing, len(step.flight), sampling.surplus) if refill else max(0, more)
            step.dispatch(min(more, limit - step.groups))
            if not step.flight:
                break  # the limit: the smaller batch is trained
            group = step.head()
            rate = rate.update(kept=int(group.kept), filtered=int(not group.kept))
            if group.kept or sampling.filter == "off":
                step.kept.append(group)
        if sampling.max_staleness:
            if not interrupts:
                step.drain()
            carried = step.interrupt()
        else:  # given up, and sent again by the next step
            source = itertools.chain([group for group, _ in step.flight], source)
        done.append(step)
    return done


class RolloutStep:
    """One batch being filled, and its clock. Every running response grows alike, so one is finished when the tokens of
    a response that had run from the start reach a mark of its own: a heap of marks is all that is needed.

    `seconds` have passed; `kept` is the batch; in `flight` are the groups not looked at yet, at the end those that the
    next step begins with; `groups` were sent in this step, what was carried into it not counted; `tokens` were drawn in
    it, what is given up at its end counted as if it had been drawn whole.
    """

    def __init__(self, fleet: Fleet, source: Iterator[Group], carried: Sequence[Carried]) -> None:
        self.fleet, self.source = fleet, source
        self.flight: deque[tuple[Group, int]] = deque()
        self.kept: list[Group] = []
        self.seconds = self._full_until = 0.0
        self.tokens = self.groups = 0
        self._clock = self._context = 0.0
        self._running: list[tuple[float, int, int]] = []
        self._waiting: deque[tuple[int, int, int]] = deque()
        self._left: list[int] = []
        for group, unfinished in carried:
            self._send(group, unfinished)
        self._admit()

    @functools.cached_property
    def lengths(self) -> np.ndarray:
        """int64 [R]: response tokens of the batch's responses, once it is full."""
        return np.array([length for group in self.kept for length in group.lengths], np.int64)

    @property
    def tail_s(self) -> float:
        """From when fewer responses run than half the slots, to the end."""
        return self.seconds - self._full_until

    def dispatch(self, count: int) -> None:
        """Send the next `count` prompts."""
        for _ in range(max(0, count)):
            group = next(self.source)
            self._send(group, [(length, 0) for length in group.lengths])
            self.groups += 1
        self._admit()

    def head(self) -> Group:
        """The first group in prompt order, once it is finished."""
        group, number = self.flight.popleft()
        while self._left[number]:
            self._advance()
        return group

    def drain(self) -> None:
        """Until nothing runs."""
        while self._running:
            self._advance()

    def interrupt(self) -> list[Carried]:
        """End the step here. Returns what is in flight, in order."""
        unfinished: dict[int, list[tuple[int, int]]] = {number: [] for _, number in self.flight}
        for mark, number, length in self._running:
            unfinished[number].append((length, length - math.ceil(mark - self._clock)))
        for length, number, drawn in self._waiting:
            unfinished[number].append((length, drawn))
        self.tokens -= sum(length - drawn for left in unfinished.values() for length, drawn in left)
        return [(group, unfinished[number]) for group, number in self.flight]

    def _send(self, group: Group, unfinished: Sequence[tuple[int, int]]) -> None:
        number = len(self._left)
        self._left.append(len(unfinished))
        self._waiting.extend((length, number, drawn) for length, drawn in unfinished)
        self.flight.append((group, number))
        self.tokens += sum(length - drawn for length, drawn in unfinished)

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self.fleet.slots:
            length, number, drawn = self._waiting.popleft()
            heapq.heappush(self._running, (self._clock + length - drawn, number, length))
            self._context += self.fleet.mean_prompt + drawn
            self.seconds += self.fleet.prefill_s * (1 + drawn / max(1.0, self.fleet.mean_prompt))
        if len(self._running) * 2 >= self.fleet.slots:
            self._full_until = self.seconds

    def _advance(self) -> None:
        """To the end of the next response."""
        mark, number, length = heapq.heappop(self._running)
        running, tokens = len(self._running) + 1, mark - self._clock
        grown = running * tokens
        self.seconds += tokens * self.fleet.step_s(running, self._context + grown / 2)
        self._clock = mark
        self._left[number] -= 1
        self._context += grown - length - self.fleet.mean_prompt
        self._admit()


def mean_running_context(lengths: np.ndarray, mean_prompt: float) -> float:
    """Tokens of context that a running response has on average over its life, long ones running longer."""
    return mean_prompt + float((lengths.astype(float) ** 2).sum() / (2 * lengths.sum()))
