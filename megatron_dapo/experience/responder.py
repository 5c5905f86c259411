"""One response to a held-out problem, judged: what evaluation inside a run and `megatron-dapo eval` share."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron_dapo.config.evaluation_config import EvaluationConfig
from megatron_dapo.data.prompts import Prompt
from megatron_dapo.experience.generator import Decoder, Fleet, Pool, judged, response_seed, verification_request
from rollout.generation import FinishReason, Generation, GenerationRequest, SamplingParams

FORBIDDEN = -1e9
"""Logit added to a token that may not be drawn."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """One way of answering all problems. Way(name="sampled", sampling=SamplingParams(...), samples=32)."""

    name: str
    sampling: SamplingParams
    samples: int
    """Responses to each problem."""


def ways_of(config: EvaluationConfig, sampling: SamplingParams) -> list[Way]:
    """`sampled` and (if configured) `greedy`; `sampling` says what both share: length and stop tokens."""
    drawn = replace(sampling, temperature=config.temperature, top_p=config.top_p)
    ways = [Way(name="sampled", sampling=drawn, samples=config.samples)]
    if config.greedy:
        ways.append(Way(name="greedy", sampling=replace(sampling, temperature=0.0, top_p=1.0), samples=1))
    return ways


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """One response. Answer(text="... Answer: 42", tokens=812, truncated=False, correct=True, extracted="42", ...)."""

    text: str
    tokens: int
    truncated: bool
    correct: bool
    extracted: str | None
    error: str | None
    """Why there is no verdict, if there is none; it then counts as wrong."""
    versions: tuple[int, int]
    """Oldest and newest version of the weights that wrote a token of it."""


class Responder:
    """Asks the fleet for responses to `prompts` and the pool for verdicts."""

    def __init__(self, *, fleet: Fleet, pool: Pool, decoder: Decoder, prompts: Sequence[Prompt], seed: int) -> None:
        self._fleet, self._pool, self._decoder = fleet, pool, decoder
        self._prompts, self._seed = prompts, seed

    async def answer(
        self, name: str, at: int, sample: int, sampling: SamplingParams, *, forbid: int | None = None
    ) -> Answer:
        """Response number `sample` to problem number `at`.

        Args:
            name: distinguishes the requests of this evaluation from others.
            forbid: token id that the response may not begin with.

        Raises:
            Unjudged: there is no verdict, by no fault of the response.
        """
        parts = await self._parts(f"{name}-{at}-{sample}.", at, sample, sampling, forbid)
        ids = np.concatenate([part.token_ids for part in parts])
        versions = np.concatenate([part.weight_versions for part in parts])
        text = self._decoder.decode(ids, skip_special_tokens=True)
        prompt = self._prompts[at]
        (verdict,) = await judged(self._pool, [verification_request(prompt, text)], f"held-out {prompt.place}")
        return Answer(
            text=text,
            tokens=int(ids.size),
            truncated=parts[-1].finish_reason is FinishReason.LENGTH,
            correct=verdict.accuracy,
            extracted=verdict.extracted,
            error=verdict.error,
            versions=(int(versions.min()), int(versions.max())),
        )

    async def _parts(
        self, name: str, at: int, sample: int, sampling: SamplingParams, forbid: int | None
    ) -> list[Generation]:
        """One response. A forbidden first token takes two requests: the first token alone, then the rest."""
        request = GenerationRequest(
            request_id=name,
            group_id=name.rsplit("-", 1)[0],
            prompt_ids=self._prompts[at].ids,
            sampling=sampling,
            seed=response_seed(self._seed, -1 - at, sample),
        )
        if forbid is None:
            return [await self._fleet.generate(request)]
        first = await self._fleet.generate(
            replace(request, sampling=replace(sampling, max_new_tokens=1, logit_bias={forbid: FORBIDDEN}))
        )
        # Both words: what is cut off after its only token can still have ended with it.
        stopped = first.finish_reason is FinishReason.STOP or int(first.token_ids[-1]) in sampling.stop_token_ids
        if stopped or sampling.max_new_tokens <= 1:
            return [first]
        rest = await self._fleet.generate(
            replace(
                request,
                request_id=f"{name}rest.",
                prompt_ids=np.concatenate([request.prompt_ids, first.token_ids]),
                sampling=replace(sampling, max_new_tokens=sampling.max_new_tokens - 1),
            )
        )
        return [first, rest]
