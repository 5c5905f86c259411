"""What became of each held-out problem, and the figures over all of them: `problems.jsonl` and `result.json`."""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_dapo.data.prompts import Prompt
from megatron_dapo.experience.responder import Answer
from megatron_dapo.monitor.statistics import RESAMPLES, Estimate, consensus, mean_with_interval, pass_at_k, sizes
from reward.answer.key import answer_key

PROBLEMS, RESULT = "problems.jsonl", "result.json"
METHOD = (
    "avg@k: mean verdict. pass@k: 1 - C(n - c, k) / C(n, k) for c right of n answers (unbiased). cons@k: whether the "
    "most frequent answer is right; equal numbers and equal texts are one answer, all right ones are one, answers that "
    f"tie share the place. Each is a mean over problems; the 95% interval draws problems anew ({RESAMPLES} times, "
    "percentiles), or is Wilson's where all problems are 0 or all are 1."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ProblemResult:
    """One problem with its n answers, by one way of answering; the lists are in the order of the samples.

    ProblemResult(problem="0c31...", place="aime-2024.parquet:3", answer="204", correct=(True, False),
    extracted=("204", None), tokens=(5120, 20480), truncated=(False, True), errors=(None, None))
    """

    problem: str
    """Names the problem by what it says, see `problem_id`."""
    place: str
    answer: str
    """Ground truth."""
    correct: tuple[bool, ...]
    extracted: tuple[str | None, ...]
    tokens: tuple[int, ...]
    truncated: tuple[bool, ...]
    errors: tuple[str | None, ...]


class Results(dict[str, list[ProblemResult]]):
    """Way of answering -> problems in the order of their file."""


def problem_id(prompt: Prompt) -> str:
    """Equal for equal prompts with equal ground truths, wherever they come from: 16 hexadecimal digits."""
    return hashlib.sha256(json.dumps([prompt.text, prompt.answer]).encode()).hexdigest()[:16]


def gathered(prompt: Prompt, answers: Sequence[Answer]) -> ProblemResult:
    """The answers to one problem together."""
    return ProblemResult(
        problem=problem_id(prompt),
        place=prompt.place,
        answer=prompt.answer,
        correct=tuple(answer.correct for answer in answers),
        extracted=tuple(answer.extracted for answer in answers),
        tokens=tuple(answer.tokens for answer in answers),
        truncated=tuple(answer.truncated for answer in answers),
        errors=tuple(answer.error for answer in answers),
    )


def figures(problems: Sequence[ProblemResult], *, seed: int = 0) -> dict[str, Any]:
    """Of one way of answering: {"avg@32": {"value": ..., "low": ..., "high": ...}, "pass@1": ..., "cons@32": ...}, and
    counts.

    Raises:
        ValueError: the problems were not answered equally often.
    """
    samples = {len(problem.correct) for problem in problems}
    if len(samples) != 1:
        raise ValueError(f"problems with {sorted(samples)} answers: each must have as many")
    n = samples.pop()
    right = [sum(problem.correct) for problem in problems]
    per_problem = {f"avg@{n}": [count / n for count in right]}
    per_problem |= {f"pass@{k}": [pass_at_k(count, n, k) for count in right] for k in sizes(n)}
    per_problem[f"cons@{n}"] = [_consensus(problem) for problem in problems]
    estimates: dict[str, Estimate] = {
        name: mean_with_interval(np.array(values), seed=seed) for name, values in per_problem.items()
    }
    tokens = np.concatenate([problem.tokens for problem in problems])
    return {
        "problems": len(problems),
        "samples": n,
        "figures": {name: asdict(estimate) for name, estimate in estimates.items()},
        "mean_tokens": float(tokens.mean()),
        "truncated": float(np.mean([cut for problem in problems for cut in problem.truncated])),
        "without_answer": float(np.mean([given is None for problem in problems for given in problem.extracted])),
        "verdict_errors": sum(error is not None for problem in problems for error in problem.errors),
    }


def write_results(folder: Path, results: Results, about: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Write `problems.jsonl` and `result.json`, each whole or not at all. Returns what the latter holds.

    Args:
        about: what else it shall say: which weights, which settings.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"way": way} | asdict(problem)) + "\n" for way in results for problem in results[way]]
    result = dict(about or {}) | {"ways": {way: figures(results[way]) for way in results}, "method": METHOD}
    _write_whole(folder / PROBLEMS, "".join(lines))
    _write_whole(folder / RESULT, json.dumps(result, indent=2) + "\n")
    return result


def _consensus(problem: ProblemResult) -> float:
    votes = [None if answer is None else answer_key(answer) for answer in problem.extracted]
    return consensus(votes, problem.correct)


def _write_whole(path: Path, text: str) -> None:
    aside = path.with_name(f".{path.name}.tmp")
    aside.write_text(text, encoding="utf-8", errors="backslashreplace")
    os.replace(aside, path)
