"""One prompt -> G responses from the fleet -> verdicts -> shaped rewards: a ScoredGroup."""

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Iterable, Sequence
from typing import Protocol, TypeVar

import torch

from megatron_dapo.algorithm.overlong import raw_reward, shaped_rewards
from megatron_dapo.config.algorithm_config import OverlongConfig
from megatron_dapo.data.detokenizer import Decoder
from megatron_dapo.data.order import PromptOrder
from megatron_dapo.data.prompts import Prompt, PromptSet
from megatron_dapo.experience.groups import ScoredGroup, ScoredResponse
from reward.disagreement import other_accuracy
from reward.verdict import Verdict, VerificationRequest
from rollout.generation import FinishReason, Generation, GenerationRequest, SamplingParams

T = TypeVar("T")


class Fleet(Protocol):
    """What is used of rollout.fleet.fleet.RolloutFleet."""

    async def generate(self, request: GenerationRequest) -> Generation: ...


class Pool(Protocol):
    """What is used of reward.pool.RewardPool."""

    async def verify(self, requests: Sequence[VerificationRequest]) -> list[Verdict]: ...


class EngineAborted(RuntimeError):
    """A server ended a response without finishing it, again and again."""

    exit_code = 5


class Unjudged(RuntimeError):
    """A response could not be judged, by no fault of its own. Counted as wrong it would teach the actor noise."""

    exit_code = 1


def verification_request(prompt: Prompt, text: str) -> VerificationRequest:
    """What the pool is asked of one response."""
    return VerificationRequest(response=text, ground_truth=prompt.answer, prompt=prompt.text, verifier=prompt.verifier)


async def judged(pool: Pool, requests: Sequence[VerificationRequest], place: str) -> list[Verdict]:
    """The verdicts, in order. One that is missing for a reason within the response (a time-out, say) counts as wrong.

    Raises:
        Unjudged: one is missing for a reason that lies elsewhere.
    """
    verdicts = await pool.verify(requests)
    for request, verdict in zip(requests, verdicts, strict=True):
        if verdict.unjudged:
            raise Unjudged(f"{place}: no verdict by {request.verifier!r}: {verdict.error}")
    return verdicts


def response_seed(seed: int, position: int, sample: int) -> int:
    """Seed of one response, 31 bits: from the run's seed, the prompt's position and the response's number in the
    group."""
    digest = hashlib.blake2b(f"{seed}:{position}:{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") & 0x7FFFFFFF


class GroupGenerator:
    """Writes and judges the groups of one run's prompts."""

    def __init__(
        self,
        *,
        fleet: Fleet,
        pool: Pool,
        decoder: Decoder,
        prompts: PromptSet,
        sampling: SamplingParams,
        group_size: int,
        overlong: OverlongConfig,
        seed: int,
    ) -> None:
        self._fleet, self._pool, self._decoder = fleet, pool, decoder
        self._prompts, self._order = prompts.prompts, PromptOrder(prompts.spans, seed)
        self._sampling, self._group_size = sampling, group_size
        self._overlong, self._seed = overlong, seed
        self._clock = RewardClock()

    async def group(self, position: int, weight_version: int) -> ScoredGroup:
        """The responses to the prompt at `position` of the shuffled order, judged."""
        index = self._order.index_at(position)
        prompt = self._prompts[index]
        with self._clock.writing():
            generations = await all_or_none(
                self._fleet.generate(self._request(prompt, position, weight_version, sample))
                for sample in range(self._group_size)
            )
        for generation in generations:
            if generation.finish_reason is FinishReason.ABORT or len(generation.token_ids) == 0:
                raise EngineAborted(
                    f"prompt {position} ({prompt.place}): a server gave up on response {generation.request_id}"
                )
        with self._clock.judging():
            responses = await self._judge(prompt, generations)
        versions = [int(generation.weight_versions.min()) for generation in generations]
        return ScoredGroup(
            position=position,
            prompt_index=index,
            prompt_ids=prompt.ids,
            weight_version=min(versions),
            responses=responses,
        )

    def take_reward_seconds(self) -> float:
        """Seconds, since the last call, in which verdicts were awaited and no response was being written."""
        return self._clock.take()

    def _request(self, prompt: Prompt, position: int, weight_version: int, sample: int) -> GenerationRequest:
        return GenerationRequest(
            request_id=f"p{position}-v{weight_version}-s{sample}.",  # the dot: SGLang aborts by prefix
            group_id=f"p{position}",
            prompt_ids=prompt.ids,
            sampling=self._sampling,
            seed=response_seed(self._seed, position, sample),
            priority=position,  # the batch waits for the earliest first
        )

    async def _judge(self, prompt: Prompt, generations: Sequence[Generation]) -> tuple[ScoredResponse, ...]:
        texts = [self._decoder.decode(g.token_ids, skip_special_tokens=True) for g in generations]
        requests = [verification_request(prompt, text) for text in texts]
        verdicts = await judged(self._pool, requests, prompt.place)
        others = [other_accuracy(request) for request in requests]
        accuracy = torch.tensor([verdict.accuracy for verdict in verdicts])
        raw = raw_reward(accuracy, dtype=torch.float64).tolist()
        shaped = shaped_rewards(
            accuracy,
            torch.tensor([len(generation.token_ids) for generation in generations]),
            shape=self._overlong.shape,
            max_length=self._sampling.max_new_tokens,
            buffer=self._overlong.buffer,
            factor=self._overlong.factor,
            dtype=torch.float64,
        ).tolist()
        return tuple(
            ScoredResponse(
                generation=generation,
                text=text,
                verdict=verdict,
                accuracy=verdict.accuracy,
                reward_raw=raw[at],
                reward_shaped=shaped[at],
                other_accuracy=others[at],
            )
            for at, (generation, text, verdict) in enumerate(zip(generations, texts, verdicts, strict=True))
        )


class RewardClock:
    """Adds up the time in which only verdicts are awaited."""

    def __init__(self) -> None:
        self._writing = 0
        self._judging = 0
        self._since = time.monotonic()
        self._seconds = 0.0

    def writing(self) -> "_Span":
        return _Span(self, writing=1, judging=0)

    def judging(self) -> "_Span":
        return _Span(self, writing=0, judging=1)

    def take(self) -> float:
        self.change(0, 0)
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def change(self, writing: int, judging: int) -> None:
        now = time.monotonic()
        if self._judging and not self._writing:
            self._seconds += now - self._since
        self._since = now
        self._writing += writing
        self._judging += judging


class _Span:
    def __init__(self, clock: RewardClock, *, writing: int, judging: int) -> None:
        self._clock, self._writing, self._judging = clock, writing, judging

    def __enter__(self) -> None:
        self._clock.change(self._writing, self._judging)

    def __exit__(self, *_: object) -> None:
        self._clock.change(-self._writing, -self._judging)


async def all_or_none(calls: Iterable[Awaitable[T]]) -> list[T]:
    """Results in order; when one call fails the others are cancelled and awaited, so that none is left behind."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
