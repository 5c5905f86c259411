"""What became of each held-out problem, and the figures over all of them: `problems.jsonl` and `result.json`."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_dapo.data.prompts import Prompt
from megatron_dapo.monitor.statistics import RESAMPLES, consensus, mean_with_interval, pass_at_k, sizes
from megatron_dapo.storage.durable import replace_file
from reward.answer.compare import answer_key

PROBLEMS, RESULT = "problems.jsonl", "result.json"
METHOD = (
    "avg@k: mean verdict. pass@k: 1 - C(n - c, k) / C(n, k) for c right of n answers (unbiased). cons@k: whether the "
    "most frequent answer is right; equal numbers and equal texts are one answer, all right ones are one, answers that "
    f"tie share the place. Each is a mean over problems; the 95% interval draws problems anew ({RESAMPLES} times, "
    "percentiles), or is Wilson's where all problems are 0 or all are 1."
)


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


ProblemAnswers = Sequence[Sequence[Answer]]
"""[problem][sample]"""


def problem_id(prompt: Prompt) -> str:
    """Equal for equal prompts with equal ground truths, wherever they come from: 16 hexadecimal digits."""
    return hashlib.sha256(json.dumps([prompt.text, prompt.answer]).encode()).hexdigest()[:16]


def figures(problems: ProblemAnswers, *, seed: int = 0) -> dict[str, Any]:
    """Of one decoding mode: {"figures": {"avg@32": {"value": ..., "low": ..., "high": ...}, ...}, "samples": 32, ...}.

    Raises:
        ValueError: the problems were not answered equally often.
    """
    samples = {len(answers) for answers in problems}
    if len(samples) != 1:
        raise ValueError(f"problems with {sorted(samples)} answers: each must have as many")
    n = samples.pop()
    right = [sum(answer.correct for answer in answers) for answers in problems]
    per_problem = {f"avg@{n}": [count / n for count in right]}
    per_problem |= {f"pass@{k}": [pass_at_k(count, n, k) for count in right] for k in sizes(n)}
    per_problem[f"cons@{n}"] = [_consensus(answers) for answers in problems]
    everyone = [answer for answers in problems for answer in answers]
    return {
        "problems": len(problems),
        "samples": n,
        "figures": {
            name: asdict(mean_with_interval(np.array(values), seed=seed)) for name, values in per_problem.items()
        },
        "mean_tokens": float(np.mean([answer.tokens for answer in everyone])),
        "truncated": float(np.mean([answer.truncated for answer in everyone])),
        "without_answer": float(np.mean([answer.extracted is None for answer in everyone])),
        "verdict_errors": sum(answer.error is not None for answer in everyone),
    }


def write_results(
    folder: Path,
    prompts: Sequence[Prompt],
    modes: Mapping[str, ProblemAnswers],
    about: Mapping[str, Any] | None = None,
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
    result = dict(about or {}) | {"ways": {mode: figures(modes[mode]) for mode in modes}, "method": METHOD}
    replace_file(folder / PROBLEMS, "".join(lines), durable=False)
    replace_file(folder / RESULT, json.dumps(result, indent=2) + "\n", durable=False)
    return result


def _problem_json(prompt: Prompt, answers: Sequence[Answer]) -> dict[str, Any]:
    """One problem with its n answers; lists in the order of the samples."""
    return {
        "problem": problem_id(prompt),
        "place": prompt.place,
        "answer": prompt.answer,
        "correct": [answer.correct for answer in answers],
        "extracted": [answer.extracted for answer in answers],
        "tokens": [answer.tokens for answer in answers],
        "truncated": [answer.truncated for answer in answers],
        "errors": [answer.error for answer in answers],
    }


def _consensus(answers: Sequence[Answer]) -> float:
    votes = [None if answer.extracted is None else answer_key(answer.extracted) for answer in answers]
    return consensus(votes, [answer.correct for answer in answers])
