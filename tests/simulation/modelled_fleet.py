"""Modelled servers behind one queue, and the groups that they write: what a sampler asks for, in virtual time."""

import asyncio
from collections import deque
from dataclasses import dataclass

import numpy as np

from megatron_dapo.algorithm.dynamic_sampling import keep_group
from megatron_dapo.experience.groups import ScoredGroup, ScoredResponse
from megatron_dapo.plan.rollout import Group, Workload, draw_group
from reward.verdict import Verdict
from rollout.generation import FinishReason, Generation
from tests.simulation.modelled_engine import Engine, Response, Speed

_PROMPT = np.zeros(1, np.int32)


class Prompts:
    """The endless order of prompts. A prompt has one difficulty; each attempt at it draws its responses anew."""

    def __init__(self, workload: Workload, seed: int) -> None:
        self.workload = workload
        self._seed = seed

    def group(self, position: int, attempt: int = 0) -> Group:
        """Lengths and right answers, the same for the same arguments and seed."""
        difficulty = np.random.default_rng((self._seed, position)).standard_normal()
        return draw_group(self.workload, difficulty, np.random.default_rng((self._seed, position, attempt)))


@dataclass(slots=True, eq=False)
class _Writing:
    """A group whose responses are under way."""

    responses: list[Response]
    missing: int
    done: "asyncio.Future[None]"


class ModelledFleet:
    """Engines that share one queue: a response goes to the engine that runs fewest, in the order of the queue."""

    def __init__(self, prompts: Prompts, *, engines: int, slots: int, speed: Speed) -> None:
        """`slots`: responses that one engine runs at once."""
        self.version = 0
        self.aborted_tokens = 0
        """Of responses that were ended before their last token, and of finished ones of groups that were given up."""
        self._finished_tokens = 0
        self._prompts = prompts
        self._engines = [Engine(speed, slots, self._fill) for _ in range(engines)]
        self._queue: deque[Response] = deque()
        self._attempts: dict[int, int] = {}
        self._filling: asyncio.Handle | None = None
        self._held = False
        self._zeros = np.zeros(prompts.workload.longest, np.int32), np.zeros(prompts.workload.longest, np.float32)

    @property
    def drawn_tokens(self) -> int:
        """All tokens until now, whatever became of them."""
        running = sum(engine.drawn(response) for engine in self._engines for response in engine.running)
        held = sum(response.drawn for response in self._queue)
        return self._finished_tokens + self.aborted_tokens + running + held

    async def generate(self, position: int, weight_version: int) -> ScoredGroup:
        """One group; `coordinator.sampler.GenerateGroup`. Cancelled, it gives up what is under way."""
        attempt = self._attempts.get(position, 0)
        self._attempts[position] = attempt + 1
        drawn = self._prompts.group(position, attempt)
        writing = _Writing([], len(drawn.lengths), asyncio.get_running_loop().create_future())

        def ended(response: Response) -> None:
            response.look(response.length, self.version)
            self._finished_tokens += response.length
            writing.missing -= 1
            if not writing.missing and not writing.done.done():
                writing.done.set_result(None)

        prompt_tokens = round(self._prompts.workload.mean_prompt)
        writing.responses = [Response(length, prompt_tokens, ended) for length in drawn.lengths]
        self._queue.extend(writing.responses)
        self._fill()
        try:
            await writing.done
        except asyncio.CancelledError:
            self._give_up(writing)
            raise
        return self._scored(position, drawn, writing)

    async def publish(self, seconds: float) -> None:
        """New weights, for which every engine stops for `seconds` and then reads again what it runs."""
        for engine in self._engines:
            engine.interrupt(self.version, seconds)
        self.version += 1
        await asyncio.sleep(seconds)

    async def hold(self) -> None:
        """Interrupt all that runs; it waits, first in the queue, until `let_go`."""
        self._held = True
        for engine in self._engines:
            interrupted = tuple(engine.running)
            for response in interrupted:
                engine.remove(response, self.version)
            self._queue.extendleft(reversed(interrupted))

    def let_go(self) -> None:
        """What was interrupted goes on, once its prefix is read again."""
        self._held = False
        self._fill()

    def _fill(self, engine: Engine | None = None) -> None:
        """Places for those who wait; of `engine` alone, if it is known where they are."""
        if self._held:
            return
        changed: dict[Engine, None] = {}
        while self._queue:
            chosen = engine or min(self._engines, key=lambda one: len(one.running))
            if len(chosen.running) >= chosen.slots:
                break
            chosen.add(self._queue.popleft())
            changed[chosen] = None
        for one in changed:
            if one is not engine:  # who calls for itself sets its own
                one.set_timer()

    def _give_up(self, writing: _Writing) -> None:
        waiting = set()
        for response in writing.responses:
            if response.engine is not None:
                response.engine.remove(response, self.version)
            elif response.drawn < response.length:
                waiting.add(response)
            else:
                self._finished_tokens -= response.length
            self.aborted_tokens += response.drawn
        if waiting:
            self._queue = deque(response for response in self._queue if response not in waiting)
        if not self._filling:  # once all that are given up now are gone: one of them must not get the place of another
            self._filling = asyncio.get_running_loop().call_soon(self._fill_later)

    def _fill_later(self) -> None:
        self._filling = None
        self._fill()

    def _scored(self, position: int, drawn: Group, writing: _Writing) -> ScoredGroup:
        responses = tuple(
            self._scored_response(response, correct=sample < drawn.correct)
            for sample, response in enumerate(writing.responses)
        )
        return ScoredGroup(
            position=position,
            prompt_index=position,
            prompt_ids=_PROMPT,
            weight_version=min(version for response in writing.responses for version, _ in response.versions),
            responses=responses,
        )

    def _scored_response(self, response: Response, *, correct: bool) -> ScoredResponse:
        ids, log_probs = self._zeros
        versions, tokens = zip(*response.versions, strict=True)
        limit = self._prompts.workload.longest
        return ScoredResponse(
            generation=Generation(
                request_id="",
                token_ids=ids[: response.length],
                log_probs=log_probs[: response.length],
                weight_versions=np.repeat(np.array(versions, np.int32), tokens),
                finish_reason=FinishReason.LENGTH if response.length == limit else FinishReason.STOP,
            ),
            text="",
            verdict=Verdict(accuracy=correct, extracted=None, rule="model", seconds=0.0),
            accuracy=correct,
            reward_raw=1.0 if correct else -1.0,
            reward_shaped=1.0 if correct else -1.0,
        )


def useful(group: ScoredGroup) -> bool:
    """Eq. 11."""
    return keep_group(group.correct, len(group.responses))
