"""One prompt -> G responses from the fleet -> verdicts -> shaped rewards: a ScoredGroup."""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import torch

from megatron_dapo.algorithm.overlong import raw_reward, shaped_rewards
from megatron_dapo.config.algorithm_config import OverlongConfig
from megatron_dapo.data.order import PromptOrder
from megatron_dapo.data.prompts import Prompt, PromptSet
from megatron_dapo.experience.groups import ScoredGroup, ScoredResponse
from megatron_dapo.experience.responder import Responder, gather_or_cancel, response_seed
from reward.registry import other_accuracy
from rollout.generation import Generation, GenerationRequest, SamplingParams


class GroupGenerator:
    """Writes and judges the groups of one run's prompts."""

    def __init__(
        self,
        *,
        responder: Responder,
        prompts: PromptSet,
        sampling: SamplingParams,
        group_size: int,
        overlong: OverlongConfig,
        seed: int,
    ) -> None:
        self._responder = responder
        self._prompts, self._order = prompts.prompts, PromptOrder(prompts.spans, seed)
        self._sampling, self._group_size = sampling, group_size
        self._overlong, self._seed = overlong, seed
        self._clock = RewardClock()

    async def group(self, position: int, weight_version: int) -> ScoredGroup:
        """The responses to the prompt at `position` of the shuffled order, judged."""
        index = self._order.index_at(position)
        prompt = self._prompts[index]
        with self._clock.measure("writing"):
            generations = await gather_or_cancel(
                self._responder.generate(prompt, self._request(prompt, position, weight_version, sample))
                for sample in range(self._group_size)
            )
        with self._clock.measure("judging"):
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
        requests, verdicts = await self._responder.judge(prompt, [generation.token_ids for generation in generations])
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
                text=request.response,
                verdict=verdict,
                accuracy=verdict.accuracy,
                reward_raw=raw[at],
                reward_shaped=shaped[at],
                other_accuracy=other_accuracy(request),
            )
            for at, (generation, request, verdict) in enumerate(zip(generations, requests, verdicts, strict=True))
        )


class RewardClock:
    """Adds up the time in which only verdicts are awaited."""

    def __init__(self) -> None:
        self._under_way: Counter[str] = Counter()
        self._since = time.monotonic()
        self._seconds = 0.0

    @contextmanager
    def measure(self, what: Literal["writing", "judging"]) -> Iterator[None]:
        self._add()
        self._under_way[what] += 1
        try:
            yield
        finally:
            self._add()
            self._under_way[what] -= 1

    def take(self) -> float:
        """Seconds since the last call."""
        self._add()
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _add(self) -> None:
        now = time.monotonic()
        if self._under_way["judging"] and not self._under_way["writing"]:
            self._seconds += now - self._since
        self._since = now
