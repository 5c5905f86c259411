"""What training and evaluation share: a request becomes a response of the fleet, and its text gets a verdict."""

import asyncio
import hashlib
from collections.abc import Awaitable, Iterable, Sequence
from typing import Protocol, TypeVar

import numpy as np

from megatron_dapo.data.prompts import Prompt
from megatron_dapo.data.tokenizer import Decoder
from reward.verdict import Verdict, VerificationRequest
from rollout.generation import FinishReason, Generation, GenerationRequest

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


def response_seed(seed: int, position: int, sample: int) -> int:
    """Seed of one response, 31 bits: from the run's seed, the prompt's position and the response's number in the
    group."""
    digest = hashlib.blake2b(f"{seed}:{position}:{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") & 0x7FFFFFFF


class Responder:
    """Fleet, detokenizer and reward pool of one run or evaluation."""

    def __init__(self, *, fleet: Fleet, pool: Pool, decoder: Decoder) -> None:
        self._fleet, self._pool, self._decoder = fleet, pool, decoder

    async def generate(self, prompt: Prompt, request: GenerationRequest) -> Generation:
        """A finished response to `prompt`.

        Raises:
            EngineAborted: there is none.
        """
        generation = await self._fleet.generate(request)
        if generation.finish_reason is FinishReason.ABORT or len(generation.token_ids) == 0:
            raise EngineAborted(f"{prompt.place}: a server gave up on response {generation.request_id}")
        return generation

    async def judge(
        self, prompt: Prompt, responses: Sequence[np.ndarray]
    ) -> tuple[list[VerificationRequest], list[Verdict]]:
        """The texts of responses to one prompt, as requests to the pool, and their verdicts, in order.

        A verdict that is missing for a reason within the response (a time-out, say) counts as wrong.

        Args:
            responses: token ids, int32 [T] each.

        Raises:
            Unjudged: a verdict is missing for a reason that lies elsewhere.
        """
        requests = [
            VerificationRequest(
                response=self._decoder.decode(ids, skip_special_tokens=True),
                ground_truth=prompt.answer,
                prompt=prompt.text,
                verifier=prompt.verifier,
            )
            for ids in responses
        ]
        verdicts = await self._pool.verify(requests)
        for verdict in verdicts:
            if verdict.unjudged:
                raise Unjudged(f"{prompt.place}: no verdict by {prompt.verifier!r}: {verdict.error}")
        return requests, verdicts


async def gather_or_cancel(calls: Iterable[Awaitable[T]]) -> list[T]:
    """Results in order; when one call fails the others are cancelled and awaited, so that none is left behind."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
