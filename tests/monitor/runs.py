"""A made-up finished run for the tests of picture and console."""

from dataclasses import asdict

import numpy as np

from megatron_dapo.monitor.statistics import Accuracy, clustered_accuracy, wilson


def wilson_accuracy(correct: int, n: int) -> Accuracy:
    """`correct` of `n` independent answers, one a problem."""
    low, high = wilson(correct / n, n)
    return Accuracy(accuracy=correct / n, low=low, high=high, n=n, problems=n)


def metrics(steps: int = 12) -> list[dict]:
    """Lines of metrics.jsonl in which all that is drawn changes."""
    ways = [step / steps for step in range(1, steps + 1)]
    return [
        {
            "rollout_step": number,
            "optimizer_step": 4 * number,
            "accuracy/mean": 0.3 + 0.4 * way,
            "response_length/mean": 13 + 18 * way,
            "response_length/p95": 34 + 14 * way,
            "truncated_fraction": 0.03 * (1 - way),
            "entropy": 0.25 - 0.2 * way,
            "sampling/kept": 32,
            "sampling/all_correct": int(30 * way),
            "sampling/all_wrong": int(15 * (1 - way)),
            **({"evaluation/sampled": 0.5, "evaluation/greedy": None} if number == 6 else {}),
        }
        for number, way in enumerate(ways, start=1)
    ]


def summary(*, baseline: bool = True, greedy: bool = True, heldout: bool = True) -> dict:
    """summary.json of that run: 358 -> 848 of 1000 greedy, 30% -> 75% sampled, 830 greedy when not guessing."""

    def ways(right: int, share: float) -> dict:
        sampled = np.random.default_rng(right).random((1000, 4)) < share
        answers = {"sampled": asdict(clustered_accuracy(sampled))}
        return answers | ({"greedy": asdict(wilson_accuracy(right, 1000))} if greedy else {})

    phases = ("rollout", "reward", "logprob", "update", "weight_sync", "checkpoint", "evaluation")
    return {
        "rollout_steps": 12,
        "optimizer_steps": 48,
        "seed": 0,
        "heldout": {
            "before": ways(358, 0.30),
            "baseline": ways(830, 0.60) if baseline else None,
            "after": ways(848, 0.75),
        }
        if heldout
        else dict.fromkeys(("before", "baseline", "after")),
        "tokens": {"generated": 487123, "trained": 489000},
        "seconds": {**dict.fromkeys(phases, 20.0), "total": 420.0},
        "examples": [
            {
                "prompt": "How many [red] cards \\[ x \\] ?",
                "answer": "13",
                "before": "Answer: 12",
                "before_correct": False,
                "after": "16 - 5 = 11 ; 11 + 2 = 13 ; Answer: 13",
                "after_correct": True,
            }
        ],
    }
