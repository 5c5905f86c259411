"""Held-out problems answered by a run's servers: sampled (avg@k), greedy, and the baseline made to work its answer
out."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_dapo.config.evaluation_config import EvaluationConfig
from megatron_dapo.data.prompts import Prompt
from megatron_dapo.experience.generator import all_or_none
from megatron_dapo.experience.problem_results import Results, gathered, write_results
from megatron_dapo.experience.responder import Responder, Way, ways_of
from megatron_dapo.monitor.statistics import Accuracy, clustered_accuracy
from rollout.generation import SamplingParams


@dataclass(frozen=True, kw_only=True, slots=True)
class Answers:
    """One way of answering all problems."""

    accuracy: Accuracy
    texts: tuple[str, ...]
    """The first response to each problem."""
    correct: tuple[bool, ...]
    """Its verdict."""
    versions: tuple[int, int]
    """Oldest and newest version of the weights that wrote a token."""


class Evaluator:
    """Answers the held-out problems with whatever weights the fleet holds."""

    def __init__(
        self,
        *,
        config: EvaluationConfig,
        responder: Responder,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        folder: Path,
    ) -> None:
        """`sampling`: length and stop tokens. `folder`: gets a folder of results for each evaluation, by its name."""
        self._config, self._responder = config, responder
        self._prompts, self._sampling, self._folder = prompts, sampling, folder

    async def run(self, name: str, *, forbid: int | None = None) -> dict[str, Answers]:
        """`sampled` and (if configured) `greedy` answers, whose results are then in files too.

        Args:
            name: distinguishes the requests of this evaluation from others, and names its folder of results.
            forbid: token id that no response may begin with.
        """
        answers, results = {}, Results()
        for way in ways_of(self._config, self._sampling):
            answers[way.name] = await self._answer(name, way, forbid, results)
        write_results(self._folder / name, results)
        return answers

    async def _answer(self, name: str, way: Way, forbid: int | None, results: Results) -> Answers:
        given = await all_or_none(
            self._responder.answer(f"{name}-{way.name}", at, sample, way.sampling, forbid=forbid)
            for at in range(len(self._prompts))
            for sample in range(way.samples)
        )
        every = range(0, len(given), way.samples)
        results[way.name] = [
            gathered(prompt, given[start : start + way.samples])
            for prompt, start in zip(self._prompts, every, strict=True)
        ]
        correct = [answer.correct for answer in given]
        return Answers(
            accuracy=clustered_accuracy(np.array(correct).reshape(len(self._prompts), way.samples)),
            texts=tuple(answer.text for answer in given[:: way.samples]),
            correct=tuple(correct[:: way.samples]),
            versions=(min(answer.versions[0] for answer in given), max(answer.versions[1] for answer in given)),
        )
