"""Held-out problems answered by servers, for a run and for `megatron-dapo eval`: sampled (avg@k), greedy, and the
baseline that may not begin with a given token. What became of each problem, and the figures over all of them, stand in
`problems.jsonl` and `result.json`."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron_dapo.config import Config
from megatron_dapo.data.prompts import Prompt, PromptSet
from megatron_dapo.data.tokenizer import TextTools
from megatron_dapo.experience.episodes import Play, thinking_limit
from megatron_dapo.experience.generator import Responder, gather_or_cancel, response_seed
from megatron_dapo.experience.groups import EarlierTurn
from megatron_dapo.monitor import statistics as stats
from megatron_dapo.monitor.console import Count
from megatron_dapo.storage.durable import replace_file
from reward.answer.read import answer_key
from reward.registry import weighted
from rollout.generation import FinishReason, Generation, GenerationRequest, SamplingParams

FORBIDDEN = -1e9
"""Logit added to a token that may not be drawn."""

PROBLEMS, RESULT = "problems.jsonl", "result.json"

AnswerKey = tuple[str, str, int]
"""(decoding mode, problem, number of the sample)"""


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodingMode:
    """How all problems are answered. DecodingMode(name="sampled", sampling=SamplingParams(...), samples=32)."""

    name: str
    sampling: SamplingParams
    samples: int
    """Responses to each problem."""


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
    earlier: tuple[EarlierTurn, ...] = ()
    """Turns before the one that `text` has."""


ProblemAnswers = Sequence[Sequence[Answer]]
"""[problem][sample]"""


class Evaluator:
    """Answers the held-out problems with whatever weights the fleet holds."""

    def __init__(
        self, config: Config, *, text: TextTools, heldout: PromptSet, responder: Responder, folder: Path
    ) -> None:
        """`folder`: gets a folder of results for each `run`, by its name."""
        asked = heldout.prompts[: config.evaluation.limit or None]
        # Of a weighted sum the accuracy alone: no other reward is read.
        self.prompts: Sequence[Prompt] = [replace(each, verifier=weighted(each.verifier)[0][1]) for each in asked]
        self._responder, self._folder, self._seed = responder, folder, config.run.seed
        self._answered = 0
        limit, thinking = config.rollout.longest_response, thinking_limit(config.rollout, text)
        common = SamplingParams(max_new_tokens=limit, stop_token_ids=text.stop_token_ids, thinking=thinking)
        wanted = config.evaluation
        sampled = replace(common, temperature=wanted.temperature, top_p=wanted.top_p)
        self.modes = [DecodingMode(name="sampled", sampling=sampled, samples=wanted.samples)]
        if wanted.greedy:
            greedy = replace(common, temperature=0.0, top_p=1.0)
            self.modes.append(DecodingMode(name="greedy", sampling=greedy, samples=1))

    @property
    def keys(self) -> list[AnswerKey]:
        """Of every answer there is to be."""
        names = [problem_id(prompt) for prompt in self.prompts]
        return [(mode.name, name, n) for mode in self.modes for name in names for n in range(mode.samples)]

    def count(self) -> Count:
        """Of the evaluation under way, of which no answer is known before."""
        return Count(self._answered, len(self.prompts) * sum(mode.samples for mode in self.modes), "answers")

    async def run(self, name: str, *, forbid: int | None = None) -> dict[str, stats.Answers]:
        """An evaluation of a run, by decoding mode; its results are then in files too.

        Args:
            name: distinguishes the requests of this evaluation from others, and names its folder of results.
            forbid: token id that no response may begin with.
        """
        modes = await self.answer(name, forbid=forbid)
        write_results(self._folder / name, self.prompts, modes)
        return {mode: _summary(problems) for mode, problems in modes.items()}

    async def answer(
        self,
        name: str,
        *,
        forbid: int | None = None,
        known: Mapping[AnswerKey, Answer] | None = None,
        record: Callable[[AnswerKey, Answer], None] | None = None,
    ) -> dict[str, ProblemAnswers]:
        """Every problem in every decoding mode.

        Args:
            name, forbid: as in `run`.
            known: answers of an earlier start; only the others are asked for.
            record: gets each new answer as soon as it is judged.

        Raises:
            Unjudged: there is no verdict, by no fault of the response.
        """

        async def one(mode: DecodingMode, at: int, sample: int) -> Answer:
            key = mode.name, problem_id(self.prompts[at]), sample
            if known is not None and key in known:
                return known[key]
            answer = await self._answer(f"{name}-{mode.name}-{at}", at, sample, mode.sampling, forbid)
            if record is not None:
                record(key, answer)
            self._answered += 1
            return answer

        self._answered = 0
        answers: dict[str, ProblemAnswers] = {}
        for mode in self.modes:  # in turn: SGLang draws from a batch that mixes modes in another way, even with seeds
            asked = (one(mode, at, sample) for at in range(len(self.prompts)) for sample in range(mode.samples))
            given = iter(await gather_or_cancel(asked))
            answers[mode.name] = [[next(given) for _ in range(mode.samples)] for _ in self.prompts]
        return answers

    async def _answer(self, group: str, at: int, sample: int, sampling: SamplingParams, forbid: int | None) -> Answer:
        """Response number `sample` to problem number `at`, judged; `group` names its requests."""
        prompt = self.prompts[at]
        place = f"held-out {prompt.place}"
        own, seed = f"{group}-{sample}.", response_seed(self._seed, -1 - at, sample)
        request = GenerationRequest(request_id=own, group_id=group, prompt_ids=prompt.ids, sampling=sampling, seed=seed)
        play = Play.of(prompt, request, self._responder.rules)

        async def turn(place: str, request: GenerationRequest) -> Generation:
            return await self._generate(None if play.earlier else forbid, place, request)

        await self._responder.play(place, play, None if forbid is None else turn)
        (judged,), (verdict,) = await self._responder.judge(place, prompt, [play])
        return Answer(
            text=judged.response,
            tokens=play.generation(play.done).drawn,
            truncated=play.done.finish_reason is FinishReason.LENGTH,
            correct=verdict.accuracy,
            extracted=verdict.extracted,
            error=verdict.error,
            earlier=tuple(play.earlier),
        )

    async def _generate(self, forbid: int | None, place: str, request: GenerationRequest) -> Generation:
        """One turn. A forbidden first token takes two requests: the first token alone, then the rest."""
        sampling = request.sampling
        if forbid is None:
            return await self._responder.generate(place, request)
        alone = replace(sampling, max_new_tokens=1, logit_bias={forbid: FORBIDDEN}, thinking=None)
        first = await self._responder.generate(place, replace(request, sampling=alone))
        # Both conditions: what is cut off after its only token can still have ended with it.
        stopped = first.finish_reason is FinishReason.STOP or int(first.token_ids[-1]) in sampling.stop_token_ids
        if stopped or sampling.max_new_tokens <= 1:
            return replace(first, finish_reason=FinishReason.STOP) if stopped and sampling.max_new_tokens > 1 else first
        thinking = sampling.thinking and replace(sampling.thinking, budget=sampling.thinking.budget - 1)
        rest = replace(
            request,
            request_id=f"{request.request_id}rest.",
            prompt_ids=np.concatenate([request.prompt_ids, first.token_ids]),
            sampling=replace(sampling, max_new_tokens=sampling.max_new_tokens - 1, thinking=thinking),
        )
        return first.followed_by(await self._responder.generate(place, rest))


def _summary(problems: ProblemAnswers) -> stats.Answers:
    return stats.Answers(
        figures=stats.clustered_accuracy(np.array([[answer.correct for answer in answers] for answers in problems])),
        texts=tuple(answers[0].text for answers in problems),
        correct=tuple(answers[0].correct for answers in problems),
    )


def problem_id(prompt: Prompt) -> str:
    """Equal for equal prompts with equal ground truths, wherever they come from: 16 hexadecimal digits."""
    return hashlib.sha256(json.dumps([prompt.text, prompt.answer]).encode()).hexdigest()[:16]


def figures(problems: ProblemAnswers) -> dict[str, Any]:
    """Of one decoding mode, each problem answered equally often: {"figures": {"avg@32": {"value": ..., "low": ...,
    "high": ...}, ...}, "samples": 32, ...}."""
    n, everyone = len(problems[0]), [answer for answers in problems for answer in answers]
    right = [sum(answer.correct for answer in answers) for answers in problems]
    per_problem = {f"avg@{n}": [count / n for count in right]}
    per_problem |= {f"pass@{k}": [stats.pass_at_k(count, n, k) for count in right] for k in stats.sizes(n)}
    per_problem[f"cons@{n}"] = [_consensus(answers) for answers in problems]
    return {
        "problems": len(problems),
        "samples": n,
        "figures": {name: asdict(stats.mean_with_interval(np.array(each), n)) for name, each in per_problem.items()},
        "mean_tokens": float(np.mean([answer.tokens for answer in everyone])),
        "truncated": float(np.mean([answer.truncated for answer in everyone])),
        "without_answer": float(np.mean([answer.extracted is None for answer in everyone])),
        "verdict_errors": sum(answer.error is not None for answer in everyone),
    }


def write_results(
    folder: Path, prompts: Sequence[Prompt], modes: Mapping[str, ProblemAnswers], about: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Write `problems.jsonl` and `result.json`, each whole or not at all. Returns what the latter holds.

    Args:
        modes: by the name of the decoding mode, answers in the order of `prompts`.
        about: what else it shall say: which weights, which settings.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lines = [
        json.dumps({"way": mode} | _problem_json(prompt, answers)) + "\n"
        for mode, problems in modes.items()
        for prompt, answers in zip(prompts, problems, strict=True)
    ]
    result = dict(about or {}) | {"ways": {mode: figures(modes[mode]) for mode in modes}}
    replace_file(folder / PROBLEMS, "".join(lines), durable=False)
    replace_file(folder / RESULT, json.dumps(result, indent=2) + "\n", durable=False)
    return result


def _problem_json(prompt: Prompt, answers: Sequence[Answer]) -> dict[str, Any]:
    """One problem with its n answers; lists in the order of the samples."""
    about = {"problem": problem_id(prompt), "place": prompt.place, "answer": prompt.answer}
    about |= {"environment": prompt.environment} if prompt.environment else {}
    fields = ("correct", "extracted", "tokens", "truncated")
    lists = {field: [getattr(answer, field) for answer in answers] for field in fields}
    return about | lists | {"errors": [answer.error for answer in answers]}


def _consensus(answers: Sequence[Answer]) -> float:
    votes = [None if answer.extracted is None else answer_key(answer.extracted) for answer in answers]
    return stats.consensus(votes, [answer.correct for answer in answers])
