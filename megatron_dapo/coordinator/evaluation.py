"""Held-out problems answered by the servers: sampled (avg@k), greedy, and the baseline made to work its answer out."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron_dapo.config.evaluation import EvaluationConfig
from megatron_dapo.coordinator.generator import (
    Decoder,
    Fleet,
    Pool,
    all_or_none,
    judged,
    response_seed,
    verification_request,
)
from megatron_dapo.data.prompts import Prompt
from megatron_dapo.monitor.statistics import Accuracy, clustered_accuracy
from rollout.messages import Generation, GenerationRequest, SamplingParams

FORBIDDEN = -1e9
"""Logit added to a token that may not be drawn."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answers:
    """One way of answering all problems."""

    accuracy: Accuracy
    texts: tuple[str, ...]
    """The first response to each problem."""
    correct: tuple[bool, ...]
    """Its verdict."""


class Evaluator:
    """Answers the held-out problems with whatever weights the fleet holds."""

    def __init__(
        self,
        *,
        config: EvaluationConfig,
        fleet: Fleet,
        pool: Pool,
        decoder: Decoder,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        seed: int,
    ) -> None:
        self._config, self._fleet, self._pool, self._decoder = config, fleet, pool, decoder
        self._prompts, self._sampling = prompts, sampling
        self._seed = seed

    async def run(self, name: str, *, forbid: int | None = None) -> dict[str, Answers]:
        """`sampled` and (if configured) `greedy` answers.

        Args:
            name: distinguishes the requests of this evaluation from others.
            forbid: token id that no response may begin with.
        """
        drawn = replace(self._sampling, temperature=self._config.temperature, top_p=self._config.top_p)
        answers = {"sampled": await self._answer(f"{name}-sampled", drawn, self._config.samples, forbid)}
        if self._config.greedy:
            greedy = replace(self._sampling, temperature=0.0, top_p=1.0)
            answers["greedy"] = await self._answer(f"{name}-greedy", greedy, 1, forbid)
        return answers

    async def _answer(self, name: str, sampling: SamplingParams, samples: int, forbid: int | None) -> Answers:
        tasks = [
            self._respond(f"{name}-{at}-{sample}.", at, sample, sampling, forbid)
            for at in range(len(self._prompts))
            for sample in range(samples)
        ]
        responses = await all_or_none(tasks)
        texts = [self._decoder.decode(ids.tolist(), skip_special_tokens=True) for ids in responses]
        requests = [verification_request(self._prompts[at // samples], text) for at, text in enumerate(texts)]
        verdicts = await judged(self._pool, requests, f"held-out problems ({name})")
        correct = [verdict.accuracy for verdict in verdicts]
        return Answers(
            accuracy=clustered_accuracy(np.array(correct).reshape(len(self._prompts), samples)),
            texts=tuple(texts[::samples]),
            correct=tuple(correct[::samples]),
        )

    async def _respond(
        self, name: str, at: int, sample: int, sampling: SamplingParams, forbid: int | None
    ) -> np.ndarray:
        """Token ids of one response. A forbidden first token takes two requests: the first token alone, then the
        rest."""
        request = GenerationRequest(
            request_id=name,
            group_id=name.rsplit("-", 1)[0],
            prompt_ids=self._prompts[at].ids,
            sampling=sampling,
            seed=response_seed(self._seed, -1 - at, sample),
        )
        if forbid is None:
            return (await self._fleet.generate(request)).token_ids
        first = await self._fleet.generate(
            replace(request, sampling=replace(sampling, max_new_tokens=1, logit_bias={forbid: FORBIDDEN}))
        )
        if _ended(first, sampling):
            return first.token_ids
        rest = await self._fleet.generate(
            replace(
                request,
                request_id=f"{name}rest.",
                prompt_ids=np.concatenate([request.prompt_ids, first.token_ids]),
                sampling=replace(sampling, max_new_tokens=sampling.max_new_tokens - 1),
            )
        )
        return np.concatenate([first.token_ids, rest.token_ids])


def _ended(generation: Generation, sampling: SamplingParams) -> bool:
    return int(generation.token_ids[-1]) in sampling.stop_token_ids or sampling.max_new_tokens <= 1
