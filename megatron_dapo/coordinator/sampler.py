"""Dynamic sampling (eq. 11) with admission in prompt order (laws 2 and 3).

Positions of the shuffled order are dispatched one after another and decided one after another:

    decided | finished or in flight, not yet decided | not yet dispatched
            ^ cursor                                 ^ next

The group at the cursor is awaited, however many later ones are finished, so a long response is never passed over for
a short
one. How many to dispatch is computed from what was decided, never from what happened to finish first: the same run
gives the
same batches. When the batch is full, what lies between cursor and next is finished and waits for the next step
("carried").
"""

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from megatron_dapo.algorithm.dynamic_sampling import PassRate, keep_group, prompts_to_dispatch
from megatron_dapo.config.algorithm import AlgorithmConfig
from megatron_dapo.coordinator.messages import Admission, ScoredGroup
from megatron_dapo.data.ledger import Event, Ledger

GenerateGroup = Callable[[int, int], Awaitable[ScoredGroup]]
"""(position, weight_version) -> the group's responses, judged."""


class OversamplingLimit(RuntimeError):
    """The batch could not be filled within `algorithm.dynamic_sampling.max_oversampling`."""


@dataclass(frozen=True, kw_only=True)
class SamplerState:
    """What a checkpoint holds of the sampler."""

    cursor: int
    pass_rate: PassRate
    carried: tuple[ScoredGroup, ...]
    """The groups of positions cursor, cursor + 1, ..."""


class DynamicSampler:
    """Fills batches of `prompts_per_step` groups, in prompt order."""

    def __init__(self, config: AlgorithmConfig, generate: GenerateGroup, ledger: Ledger, state: SamplerState) -> None:
        self._config = config
        self._generate = generate
        self._ledger = ledger
        self._cursor = state.cursor
        self._pass_rate = state.pass_rate
        self._carried = deque(state.carried)
        self._flight: deque[asyncio.Task[ScoredGroup]] = deque()

    @property
    def state(self) -> SamplerState:
        """Valid between two calls of `fill`."""
        return SamplerState(cursor=self._cursor, pass_rate=self._pass_rate, carried=tuple(self._carried))

    async def fill(
        self, rollout_step: int, weight_version: int, on_kept: Callable[[ScoredGroup], None] = lambda group: None
    ) -> Admission:
        """One batch. Returns when it is full (or the limit is reached) and nothing is in flight.

        `on_kept` is called for each group of the batch as soon as it is kept, in prompt order.

        Raises:
            OversamplingLimit: the limit was reached and `on_limit` is `stop`, or not one group could be kept.
        """
        failure: asyncio.Future[ScoredGroup] = asyncio.get_running_loop().create_future()
        batch = _Batch(start_pass_rate=self._pass_rate, limit=self._limit(), failure=failure, on_kept=on_kept)
        try:
            expired = self._take_up_carried(batch, rollout_step, weight_version)
            wanted = self._config.prompts_per_step
            while len(batch.kept) < wanted:
                self._dispatch(batch, wanted, rollout_step, weight_version)
                if not self._flight:
                    break  # the limit: nothing in flight and nothing may be dispatched
                group = await self._head(batch)
                self._flight.popleft()
                self._decide(group, batch, rollout_step, weight_version)
            carried = await asyncio.gather(*self._flight)
        except BaseException:
            for task in self._flight:
                task.cancel()
            await asyncio.gather(*self._flight, return_exceptions=True)
            raise
        self._flight.clear()
        self._carried = deque(carried)
        for group in carried:
            self._record(Event.CARRIED, group, rollout_step)
        self._check_limit(batch, wanted)
        return Admission(
            kept=tuple(batch.kept),
            filtered=tuple(batch.filtered),
            carried=len(carried),
            expired=expired,
            generated=tuple(sorted(batch.generated, key=lambda group: group.position)),
            pass_rate=batch.start_pass_rate.mean,
            predicted_groups=batch.predicted,
            limit_reached=len(batch.kept) < wanted,
        )

    async def _head(self, batch: "_Batch") -> ScoredGroup:
        """The group at the cursor; a failure of any other group is raised at once, not when its turn comes."""
        head = self._flight[0]
        await asyncio.wait({head, batch.failure}, return_when=asyncio.FIRST_COMPLETED)
        return batch.failure.result() if batch.failure.done() else head.result()

    def _limit(self) -> int:
        sampling = self._config.dynamic_sampling
        if not sampling.enabled:
            return self._config.prompts_per_step
        return int(sampling.max_oversampling * self._config.prompts_per_step)

    def _take_up_carried(self, batch: "_Batch", rollout_step: int, weight_version: int) -> int:
        """Put the carried groups first in line; generate those again that are too old. Returns how many were."""
        expired = 0
        position = self._cursor
        for group in self._carried:
            if weight_version - group.weight_version > self._config.dynamic_sampling.max_staleness:
                expired += 1
                self._send(position, batch, rollout_step, weight_version)
            else:
                self._flight.append(asyncio.ensure_future(_already(group)))
            position += 1
        self._carried.clear()
        return expired

    def _dispatch(self, batch: "_Batch", wanted: int, rollout_step: int, weight_version: int) -> None:
        missing = wanted - len(batch.kept)
        more = missing - len(self._flight)
        if self._config.dynamic_sampling.enabled:
            more = prompts_to_dispatch(missing, len(self._flight), self._pass_rate.mean)
        more = min(more, batch.limit - batch.dispatched)
        for _ in range(max(0, more)):
            self._send(self._cursor + len(self._flight), batch, rollout_step, weight_version)
        if batch.predicted == 0:
            batch.predicted = len(self._flight)

    def _send(self, position: int, batch: "_Batch", rollout_step: int, weight_version: int) -> None:
        self._ledger.record(Event.DISPATCHED, prompt=position, rollout_step=rollout_step, weight_version=weight_version)
        batch.dispatched += 1
        self._flight.append(asyncio.create_task(self._finish(position, batch, rollout_step, weight_version)))

    async def _finish(self, position: int, batch: "_Batch", rollout_step: int, weight_version: int) -> ScoredGroup:
        try:
            group = await self._generate(position, weight_version)
        except Exception as error:
            if not batch.failure.done():
                batch.failure.set_exception(error)
            raise
        batch.generated.append(group)
        self._record(Event.FINISHED, group, rollout_step)
        return group

    def _decide(self, group: ScoredGroup, batch: "_Batch", rollout_step: int, weight_version: int) -> None:
        self._cursor += 1
        useful = keep_group(group.correct, len(group.responses))
        self._pass_rate = self._pass_rate.update(kept=int(useful), filtered=int(not useful))
        if useful or not self._config.dynamic_sampling.enabled:
            batch.kept.append(group)
            batch.on_kept(group)
        else:
            batch.filtered.append(group)
            self._record(Event.FILTERED, group, rollout_step)

    def _record(self, event: Event, group: ScoredGroup, rollout_step: int) -> None:
        self._ledger.record(
            event,
            prompt=group.position,
            rollout_step=rollout_step,
            weight_version=group.weight_version,
            correct=group.correct,
            tokens=group.tokens,
        )

    def _check_limit(self, batch: "_Batch", wanted: int) -> None:
        if len(batch.kept) == wanted:
            return
        found = (
            f"{len(batch.kept)} of {wanted} groups after {batch.dispatched} prompts "
            f"(algorithm.dynamic_sampling.max_oversampling = {self._config.dynamic_sampling.max_oversampling:g})"
        )
        if not batch.kept:
            raise OversamplingLimit(
                f"{found}: no group had both right and wrong responses; the prompts are all too hard or too easy, or "
                f"the verifier does not fit them; verdicts: {_verdicts(batch.filtered)}"
            )
        if self._config.dynamic_sampling.on_limit == "stop":
            raise OversamplingLimit(f"{found}: raise the limit or set algorithm.dynamic_sampling.on_limit=train")


def _verdicts(groups: Sequence[ScoredGroup]) -> str:
    """How many were right, and by which rules or errors: "0 of 96 right; 90 x no answer found, 6 x timeout"."""
    responses = [response for group in groups for response in group.responses]
    reasons = Counter(response.verdict.error or response.verdict.rule for response in responses)
    right = sum(group.correct for group in groups)
    named = ", ".join(f"{count} x {reason}" for reason, count in reasons.most_common(5))
    return f"{right} of {len(responses)} right; {named}"


@dataclass(kw_only=True)
class _Batch:
    """What one call of `fill` has gathered so far."""

    start_pass_rate: PassRate
    limit: int
    on_kept: Callable[[ScoredGroup], None]
    failure: "asyncio.Future[ScoredGroup]"
    """Gets the first failure of any group."""
    dispatched: int = 0
    predicted: int = 0
    kept: list[ScoredGroup] = field(default_factory=list)
    filtered: list[ScoredGroup] = field(default_factory=list)
    generated: list[ScoredGroup] = field(default_factory=list)


async def _already(group: ScoredGroup) -> ScoredGroup:
    return group
