"""Dynamic sampling (eq. 11) with admission in prompt order (laws 2 and 3).

Positions of the shuffled order are dispatched one after another and decided one after another:

    decided | finished or in flight, not yet decided | not yet dispatched
            ^ cursor                                 ^ next

The sampler waits for the group at the cursor: a short response never overtakes a long one. How many prompts to dispatch
follows from the groups decided so far, never from which ones finished first.

What is unfinished when a batch is full belongs to the next steps. It goes on while the actor trains and survives the
new weights; before the last update, or where that needs the GPUs, it is interrupted. With `max_staleness` = 0 all is
given up at once; where timing may decide nothing, its end is awaited. With `ahead` the next batches are sent as well.
A group that could hold tokens of weights more than `max_staleness` versions old is expired when the next batch begins,
and generated again. Its age counts from its dispatch: expiry follows from its position, and favours no length.
"""

import asyncio
import math
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import InitVar, dataclass, field, replace
from typing import Any

from megatron_dapo.algorithm.dynamic_sampling import keep_group
from megatron_dapo.config import Config
from megatron_dapo.config.algorithm_config import AlgorithmConfig
from megatron_dapo.coordinator.prompt_history import PromptHistory
from megatron_dapo.experience.groups import Admission, SamplerState, ScoredGroup
from megatron_dapo.storage.ledger import Event, Ledger
from rollout.fleet.fleet import RolloutFleet
from rollout.fleet.member import end_all

GenerateGroup = Callable[[int, int], Awaitable[ScoredGroup]]
"""(position, weight_version) -> the group's responses, judged."""
OnKept = Callable[[ScoredGroup], None]
Refresh = Callable[[], Awaitable[None]]
"""Brings in what other processes have drawn by now."""


async def nothing_new() -> None:
    """Where there are no others."""


class OversamplingLimit(RuntimeError):
    """The batch could not be filled within `algorithm.dynamic_sampling.max_oversampling`."""

    exit_code = 1


class NothingKept(OversamplingLimit):
    """Not one group is of use; a verifier that is repaired must judge others."""


def groups_ahead(config: Config, step: int) -> int:
    """Groups of later batches that the servers write while the actor trains on this step's: 0 unless `run.mode` is
    `async`, and after the last step."""
    if config.run.mode != "async":
        return 0
    later = config.run.rollout_steps - step
    return math.ceil(min(config.algorithm.dynamic_sampling.ahead, later) * config.algorithm.prompts_per_step)


@dataclass(kw_only=True, slots=True)
class _Sent:
    """A position between cursor and next that is not passed over."""

    position: int
    version: int
    """Weights at its dispatch: no token of it is older."""
    group: "asyncio.Future[ScoredGroup]"

    @property
    def finished(self) -> bool:
        return self.group.done() and not self.group.cancelled() and self.group.exception() is None


@dataclass(eq=False)
class DynamicSampler:
    """Fills batches of `prompts_per_step` groups, in prompt order. Belongs to the event loop of its first `fill`."""

    config: AlgorithmConfig
    generate: GenerateGroup
    ledger: Ledger
    state: InitVar[SamplerState]
    prompt_at: Callable[[int], int] = lambda position: position
    """Position -> which prompt stands there."""
    stages: Sequence[int] = ()
    """Rollout steps from which responses are drawn in another way; what was sent before is then generated again."""
    holding: RolloutFleet | None = None
    """Draws what is unfinished when a batch is full; None: its end is awaited."""
    unfinished: Callable[[int, int], ScoredGroup | None] = lambda position, version: None
    """(position, weight version at its dispatch) -> what was drawn of a group, after `refresh`; what `state` has of it,
    `generate` goes on from."""
    refresh: Refresh = nothing_new

    def __post_init__(self, state: SamplerState) -> None:
        self._next, self._pass_rate = state.cursor, state.pass_rate
        self._history = PromptHistory(self.config.dynamic_sampling, state.history)
        self._skipped = set(state.passed_over)
        """Positions passed over that the next snapshot may hold."""
        self._resumed_next = state.next
        """`next` of the state until `fill` has taken it up, then 0."""
        sent = zip(state.carried, state.sent_with, strict=True)
        self._restored = {group.position: (group, version) for group, version in sent}
        self._saved = {group.position: (group, version) for group, version in state.drawn}
        """Finished before a resume, until their positions are sent again."""
        begun = (*((group, group.weight_version) for group in state.unfinished), *state.drawn)
        self._begun = {group.position: version for group, version in begun}
        """Weight versions of the groups in flight that go on."""
        self._drawn_before = {group.position: group.tokens for group, _ in begun}
        """Their tokens, until they are finished."""
        self._flight: deque[_Sent] = deque()
        self._decided: list[_Sent] = []
        """Since the last snapshot."""
        self._begin = replace(state, carried=(), sent_with=(), unfinished=(), drawn=())
        """The last snapshot, but for groups."""
        self._left: SamplerState | None = None
        """What `under_way` gave when `fill` failed."""
        self._generated: list[ScoredGroup] = []
        """Finished since the last batch was full."""
        self._failure: asyncio.Future[ScoredGroup] | None = None
        """Gets the first failure of any group."""

    def record_trained(self, groups: Sequence[ScoredGroup], rollout_step: int, weight_version: int) -> None:
        """Write down, durably, what `rollout_step` trained on: the step that began with `weight_version`."""
        for group in groups:
            versions = {"weight_version": weight_version, "generated_by": group.weight_version}
            self._record(Event.TRAINED, group, rollout_step, **versions)
        self.ledger.commit()

    def snapshot(self, rollout_step: int) -> SamplerState:
        """What a checkpoint after `rollout_step` holds; between two calls of `fill`, after `refresh`. Finished groups
        are written down as carried; of those in flight it has what was drawn."""
        cursor = self._flight[0].position if self._flight else self._next
        self._skipped = {position for position in self._skipped if position >= cursor}
        self._decided, self._saved = [], {}
        self._begin = replace(
            self._begin,
            cursor=cursor,
            next=max(self._next, self._resumed_next),
            passed_over=tuple(sorted(self._skipped)),
            history=dict(self._history.groups),
            pass_rate=self._pass_rate,
        )
        state = self.under_way()
        for group in state.carried:
            self._record(Event.CARRIED, group, rollout_step)
        return state

    def under_way(self) -> SamplerState:
        """The state of the last snapshot with what is drawn by now, finished groups as `carried` whether decided or
        not: from both a resume decides the same again. After a failed `fill`: what that had."""
        sent = {each.position: each for each in (*self._decided, *self._flight) if not each.group.cancelled()}
        done = self._restored | self._saved
        done |= {position: (each.group.result(), each.version) for position, each in sent.items() if each.finished}
        versions = self._begun | {position: each.version for position, each in sent.items()}
        carried, sent_with = tuple(group for group, _ in done.values()), tuple(version for _, version in done.values())
        unfinished = tuple(one for at, by in versions.items() if at not in done and (one := self.unfinished(at, by)))
        return self._left or replace(self._begin, carried=carried, sent_with=sent_with, unfinished=unfinished)

    async def fill(
        self, rollout_step: int, version: int, on_kept: OnKept = lambda _: None, *, ahead: int = 0, hold: bool = False
    ) -> Admission:
        """One batch. Returns when it is full or the limit is reached.

        Args:
            version: weights of the servers; it does not change before this returns.
            on_kept: called for each group of the batch as soon as it is kept, in prompt order.
            ahead: groups of the next batches that the prompts in flight on return are expected to give.
            hold: no token is drawn after the return; what is unfinished goes on in the next call.

        Raises:
            OversamplingLimit: the limit was reached and `on_limit` is `stop`, or not one group could be kept.
        """
        if self._failure is None:
            self._failure = asyncio.get_running_loop().create_future()
        sampling, wanted = self.config.dynamic_sampling, self.config.prompts_per_step
        times = sampling.max_oversampling if sampling.filter == "refill" else 1.0
        limit = int(times * wanted)
        try:
            self._history.begin_step(rollout_step)
            expired, expired_tokens = await self._take_up(rollout_step, version)
            if self.holding is not None:
                self.holding.let_go()
            batch = _Batch(rollout_step, version, on_kept, wanted, ahead, int(times * (wanted + ahead)))
            predicted = min(limit, self._needed(wanted, 0, ahead, max(0.0, sampling.surplus)))
            while len(batch.kept) < wanted and batch.decided < limit:
                self._dispatch(batch)
                self._decide(await self._head(self._failure), batch)
            self._check_limit(batch)
            self._dispatch(batch)
            discarded, discarded_tokens = 0, 0
            if ahead == 0 and sampling.max_staleness == 0:
                discarded = len(self._flight)
                discarded_tokens = await self._expire(range(discarded), rollout_step)
                self._next = self._flight[0].position if self._flight else self._next
                self._flight.clear()
                self._skipped = {position for position in self._skipped if position < self._next}
                self._history.passed = {at: rate for at, rate in self._history.passed.items() if at < self._next}
            elif ahead == 0 and self.holding is None:
                await asyncio.gather(*(sent.group for sent in self._flight))
            elif hold and self.holding and not all(sent.finished for sent in self._flight):
                await self.holding.hold()
        except BaseException:
            await self.refresh()
            self._left = self.under_way()
            await self.close()
            raise
        generated, self._generated = self._generated, []
        finished = [sent.group.result().tokens for sent in self._flight if sent.finished]
        return Admission(
            kept=tuple(batch.kept),
            filtered=tuple(batch.filtered),
            carried=len(finished),
            carried_tokens=sum(finished),
            in_flight=len(self._flight) - len(finished),
            expired=expired,
            expired_tokens=expired_tokens,
            discarded=discarded,
            discarded_tokens=discarded_tokens,
            passed_over=tuple(self._history.passed.values()),
            generated=tuple(sorted(generated, key=lambda group: group.position)),
            predicted_groups=predicted,
            resumed_tokens=sum(self._drawn_before.pop(group.position, 0) for group in generated),
            limit_reached=len(batch.kept) < wanted and sampling.filter == "refill",
        )

    async def close(self) -> None:
        """End what is in flight. No batch can be filled afterwards."""
        flight, self._flight = self._flight, deque()
        await end_all([sent.group for sent in flight])
        if self._failure is not None and self._failure.done():
            self._failure.exception()  # else asyncio complains that nobody asked

    def _needed(self, missing: int, in_flight: int, ahead: int, surplus: float) -> int:
        """Prompts to send so that `missing` groups may be expected from all that are in flight."""
        sampling, rate = self.config.dynamic_sampling, self._pass_rate
        if sampling.filter != "refill":
            return max(0, missing - in_flight)
        # Ahead: reserve enough; more of it would only be too old when its turn comes, and less keeps servers idle.
        return rate.prompts_to_send(missing, in_flight, 0.0 if ahead else surplus)

    async def _take_up(self, rollout_step: int, weight_version: int) -> tuple[int, int]:
        """After a resume, put the carried groups in line, and what was in flight: it goes on from its tokens, or is
        sent again. Then send again whatever is too old. Returns how many groups that were, and the tokens of the
        finished ones."""
        end, self._resumed_next = max(self._next, self._resumed_next), 0
        restored, self._restored = self._restored, {}
        for position in range(self._next, end):
            if position in restored:
                group, version = restored[position]
                self._flight.append(_Sent(position=position, version=version, group=_already(group)))
            elif position in self._begun:
                self._flight.append(self._write_group(position, rollout_step, self._begun.pop(position)))
            elif position not in self._skipped:  # what was sent stays sent, whatever is retired by now
                self._flight.append(self._send(position, rollout_step, weight_version))
        self._next = end
        begun = [step - 1 for step in self.stages if step <= rollout_step]  # the version that a stage began with
        oldest = max(weight_version - self.config.dynamic_sampling.max_staleness, *begun, 0)
        too_old = [at for at, sent in enumerate(self._flight) if sent.version < oldest]
        tokens = await self._expire(too_old, rollout_step)
        for at in too_old:
            self._flight[at] = self._send(self._flight[at].position, rollout_step, weight_version)
        return len(too_old), tokens

    async def _expire(self, places: Sequence[int], rollout_step: int) -> int:
        """End what is in flight at these places, and write it down. Returns the tokens of what was finished."""
        groups = [self._flight[at] for at in places]
        await end_all([sent.group for sent in groups])
        tokens = [sent.group.result().tokens if sent.finished else None for sent in groups]
        for sent, spent in zip(groups, tokens, strict=True):
            self._write(Event.EXPIRED, sent.position, rollout_step, sent.version, tokens=spent)
        return sum(spent or 0 for spent in tokens)

    def _dispatch(self, batch: "_Batch") -> None:
        sampling = self.config.dynamic_sampling
        filled = len(batch.kept) if sampling.filter == "refill" else batch.decided
        missing = batch.wanted - filled + batch.ahead
        more = self._needed(missing, len(self._flight), batch.ahead, sampling.surplus)
        goal = min(len(self._flight) + more, batch.most - batch.decided)
        before, passed = len(self._flight), len(self._history.passed)
        while len(self._flight) < goal:
            self._send_next(batch.rollout_step, batch.weight_version)
            if len(self._history.passed) - passed > self._history.most_passed(goal - before):
                sent = [self.prompt_at(each.position) for each in list(self._flight)[before:]]
                if len(sent) < 5 * len(set(sent)):  # another file has enough
                    before, passed = len(self._flight), len(self._history.passed)
                    continue
                why = "the others are retired (algorithm.dynamic_sampling.retire_at) or in a pool whose share is 0"
                remedy = "end the run, raise retire_at, or set retire_for"
                raise OversamplingLimit(f"hardly any prompt is left: {why}; {remedy}")

    def _send_next(self, rollout_step: int, weight_version: int) -> None:
        """Send the next position, or pass it over."""
        if self._history.passes_over(self.prompt_at(self._next), self._next):
            self._skipped.add(self._next)
            self._write(Event.RETIRED, self._next, rollout_step, weight_version)
        else:
            self._flight.append(self._send(self._next, rollout_step, weight_version))
        self._next += 1

    def _send(self, position: int, rollout_step: int, weight_version: int) -> _Sent:
        self._write(Event.DISPATCHED, position, rollout_step, weight_version)
        return self._write_group(position, rollout_step, weight_version)

    def _write_group(self, position: int, rollout_step: int, weight_version: int) -> _Sent:
        task = asyncio.create_task(self._finish(position, rollout_step, weight_version))
        return _Sent(position=position, version=weight_version, group=task)

    async def _finish(self, position: int, rollout_step: int, weight_version: int) -> ScoredGroup:
        saved, version = self._saved.pop(position, (None, None))
        try:
            group = saved if saved and version == weight_version else await self.generate(position, weight_version)
        except Exception as error:
            task = asyncio.current_task()
            given_up = task is not None and task.cancelling() > 0
            if not given_up and self._failure is not None and not self._failure.done():
                self._failure.set_exception(error)
            raise
        self._generated.append(group)
        self._record(Event.FINISHED, group, rollout_step)
        return group

    async def _head(self, failure: "asyncio.Future[ScoredGroup]") -> ScoredGroup:
        """The group at the cursor; a failure of any other group is raised at once, not when its turn comes."""
        head = self._flight[0].group
        await asyncio.wait({head, failure}, return_when=asyncio.FIRST_COMPLETED)
        return failure.result() if failure.done() else head.result()

    def _decide(self, group: ScoredGroup, batch: "_Batch") -> None:
        self._decided.append(self._flight.popleft())
        self._history.add(group, batch.rollout_step)
        useful = keep_group(group.correct, len(group.responses))
        self._pass_rate = self._pass_rate.update(kept=int(useful), filtered=int(not useful))
        if useful or self.config.dynamic_sampling.filter == "off":
            batch.kept.append(group)
            batch.on_kept(group)
        else:
            batch.filtered.append(group)
            self._record(Event.FILTERED, group, batch.rollout_step)

    def _record(self, event: Event, group: ScoredGroup, rollout_step: int, **details: int) -> None:
        about = {"weight_version": group.weight_version, "correct": group.correct, "tokens": group.tokens} | details
        self._write(event, group.position, rollout_step, row=group.prompt_index, **about)

    def _write(self, event: Event, position: int, rollout_step: int, weight_version: int, **details: Any) -> None:
        self.ledger.record(event, prompt=position, rollout_step=rollout_step, weight_version=weight_version, **details)

    def _check_limit(self, batch: "_Batch") -> None:
        if len(batch.kept) == batch.wanted:
            return
        sampling, kept = self.config.dynamic_sampling, len(batch.kept)
        refill = sampling.filter == "refill"
        key = f"max_oversampling = {sampling.max_oversampling:g}" if refill else f"filter = {sampling.filter}"
        found = f"{kept} of {batch.wanted} groups after {batch.decided} prompts (algorithm.dynamic_sampling.{key})"
        if not kept:
            why = "the prompts are all too hard or too easy, or the verifier does not fit them"
            told = "no group had both right and wrong responses"
            raise NothingKept(f"{found}: {told}; {why}; verdicts: {_verdicts(batch.filtered)}")
        if refill and sampling.on_limit == "stop":
            raise OversamplingLimit(f"{found}: raise the limit or set algorithm.dynamic_sampling.on_limit=train")


def _verdicts(groups: Sequence[ScoredGroup]) -> str:
    """How many were right, and by which rules or errors: "0 of 96 right; 90 x no answer found, 6 x timeout"."""
    responses = [response for group in groups for response in group.responses]
    reasons = Counter(response.verdict.error or response.verdict.rule for response in responses)
    right = sum(group.correct for group in groups)
    named = ", ".join(f"{count} x {reason}" for reason, count in reasons.most_common(5))
    return f"{right} of {len(responses)} right; {named}"


@dataclass
class _Batch:
    """What one call of `fill` wants and has gathered so far."""

    rollout_step: int
    weight_version: int
    on_kept: OnKept
    wanted: int
    ahead: int
    most: int
    """Groups that may be decided or in flight."""
    kept: list[ScoredGroup] = field(default_factory=list)
    filtered: list[ScoredGroup] = field(default_factory=list)

    @property
    def decided(self) -> int:
        return len(self.kept) + len(self.filtered)


def _already(group: ScoredGroup) -> "asyncio.Future[ScoredGroup]":
    done: asyncio.Future[ScoredGroup] = asyncio.get_running_loop().create_future()
    done.set_result(group)
    return done
