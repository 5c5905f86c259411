"""One rollout step -> its line in metrics.jsonl. Names and units are declared in megatron_dapo/monitor/catalog.yaml."""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

from megatron_dapo.actor.step_data import ROUTER_SUMS, UpdateMetrics
from megatron_dapo.algorithm.dynamic_sampling import keep_group
from megatron_dapo.algorithm.importance import Correction
from megatron_dapo.config import Config
from megatron_dapo.coordinator.batch import FilledBatch, Gap
from megatron_dapo.coordinator.checkpoints import COUNTERS, Progress
from megatron_dapo.coordinator.run_context import RunContext
from megatron_dapo.data.prompts import Prompt
from megatron_dapo.experience.groups import Admission, ScoredGroup, ScoredResponse
from megatron_dapo.monitor.statistics import Answers
from megatron_dapo.storage.durable import append_lines

REFLECTION = re.compile(
    r"(?i)\b(wait|re-?check|re-?examine|re-?consider|double-check|let me (?:verify|check)|mistake|on second thought)\b"
)
"""The response looks at what it wrote."""

BACKTRACKING = re.compile(
    r"(?i)\b(on second thought|start over|go back|try again|redo|re-?do this"
    r"|that(?:'s| is) (?:wrong|not right|incorrect)|mistake|another approach|different approach)\b"
)
"""The response gives up what it wrote."""


REPEATED_TOKENS = 16
"""A response repeats itself where so many tokens in a row stood in it before."""

REPETITION_TOKENS = 1_000_000
"""Repetition is looked for in a response a group, until it was in so many tokens: that takes about half a second."""

QUARTERS = ("0_25", "25_50", "50_75", "75_100")
"""Useful groups by their share of right responses, in percent; the upper end belongs to the next."""

STATISTICS = {
    "clipped_low": "clip_fraction/low",
    "clipped_high": "clip_fraction/high",
    "clipped_dual": "clip_fraction/dual",
    "approx_kl_old": "kl/old",
    "kl": "kl/reference",
}
"""Statistic of the policy objective -> the metric that is its mean. That of any other one is `objective/<name>`."""


def step_metrics(
    config: Config,
    progress: Progress,
    batch: FilledBatch,
    correction: Correction | None,
    updates: Sequence[UpdateMetrics],
    evaluation: Mapping[str, Answers],
    seconds: Mapping[str, float],
    sync: Mapping[str, float | int],
) -> dict[str, float | int]:
    """Values of the catalog's metrics for the step after which the run stands at `progress`.

    `correction`: None where `algorithm.importance.mode` is `none`.
    """
    admission, gap = batch.admission, batch.gap
    behind = progress.weight_version - 1 - batch.arrays.weight_versions
    tokens, trained = sum(group.tokens for group in admission.generated), batch.arrays.responses.num_response_tokens
    mode, sampling = config.run.mode, config.algorithm.dynamic_sampling
    carries = sampling.max_staleness > 0 and sampling.filter == "refill" and not config.rollout.deterministic
    phases = ("step",) if mode == "async" or (mode == "sync" and carries) else ("rollout", "environment", "reward")
    writing = sum(seconds[phase] for phase in phases)
    metrics: dict[str, float | int] = {
        **{name: getattr(progress, name) for name in COUNTERS},
        "entropy": float(batch.old.entropy.mean()),
        **_mismatch_metrics(gap),
        "staleness/share": gap.stale_share,
        "staleness/kl": gap.stale.kl,
        "staleness/mean": float(behind.mean()),
        "staleness/max": int(behind.max()),
        "tokens/generated": tokens,
        "tokens/trained": int(trained),
        "tokens_per_second/rollout": (tokens - admission.resumed_tokens) / max(writing, 1e-9),
        **sync,
        "tokens_per_second/train": int(trained) / max(seconds["update"], 1e-9),
    }
    metrics |= _response_metrics(admission.judged)
    if config.rollout.thinking_budget is not None:
        metrics["interrupted_fraction"] = _mean(admission.judged, lambda response: response.interrupted)
    if config.has_environments:
        metrics |= _episode_metrics(admission.judged)
    metrics |= _sampling_metrics(admission, config.algorithm.prompts_per_step)
    metrics |= update_metrics(updates)
    if batch.old.expert_counts is not None:
        metrics |= expert_metrics(batch.old.expert_counts, replayed=config.actor.routing_replay)
    if correction is not None:
        metrics["correction/truncated"] = correction.truncated_share
        metrics["correction/masked"] = correction.masked_share
    metrics |= {f"timing/{name}": value for name, value in seconds.items()}
    metrics |= {f"evaluation/{name}": answers.figures.accuracy for name, answers in evaluation.items()}
    return metrics


def write_records(context: RunContext, metrics: Mapping[str, float | int], batch: FilledBatch) -> None:
    """The step's line in metrics.jsonl, the alarms that it raises, and its sample responses."""
    for alarm in context.health.add(context.writer.write(metrics)):
        context.console.note(f"alarm: {alarm}")
    samples, count = context.run_dir.path / "samples.jsonl", context.config.monitor.sample_responses
    groups = batch.admission.judged
    lines = write_samples(int(metrics["rollout_step"]), groups, context.inputs.prompts.prompts, samples, count)
    context.writer.show(metrics, {}, histograms(groups, batch.old.expert_counts), lines)


def histograms(groups: Sequence[ScoredGroup], expert_counts: np.ndarray | None = None) -> dict[str, list[float]]:
    """What TensorBoard draws as histograms: a number a response, a group, or an expert of a layer."""
    responses = [response for group in groups for response in group.responses]
    loads = {} if expert_counts is None else {"histograms/expert_load": _relative_load(expert_counts).ravel().tolist()}
    return loads | {
        "histograms/response_length": [_length(response) for response in responses],
        "histograms/reward_shaped": [response.reward_shaped for response in responses],
        "histograms/correct_in_group": [group.correct for group in groups],
    }


def write_samples(
    rollout_step: int, groups: Sequence[ScoredGroup], prompts: Sequence[Prompt], path: Path, count: int
) -> list[dict[str, Any]]:
    """Append, for a person and for tools/audit_rewards.py to read: the first responses of the step's first groups, and
    as many of the others as `count` allows again that have no verdict or on which the rules for mathematics disagree.
    """
    first = [(group, group.responses[0]) for group in groups[:count]]
    others = [(group, each) for at, group in enumerate(groups) for each in group.responses[int(at < count) :]]
    disputed = [(group, each) for group, each in others if each.rules_disagree or each.verdict.error is not None]
    lines = []
    for group, response in (*first, *disputed[:count]):
        prompt, judge = prompts[group.prompt_index], "environment" if response.by_environment else "verifier"
        line = {
            "rollout_step": rollout_step,
            "prompt": group.position,
            "row": group.prompt_index,
            "place": prompt.place,
            "source": prompt.source,
            "prompt_text": prompt.text,
            "answer": prompt.answer,
            "verifier": prompt.verifier,
            **({"environment": prompt.environment, "judged_by": judge} if prompt.environment else {}),
            "response": response.text,
            **({"earlier": [asdict(turn) for turn in response.earlier]} if response.earlier else {}),
            "accuracy": response.accuracy,
            **{key: getattr(response.verdict, key) for key in ("extracted", "rule", "error")},
            "other_accuracy": response.other_accuracy,
            "reward_shaped": response.reward_shaped,
            **({"rewards": response.verdict.rewards} if response.verdict.rewards else {}),
            "finish_reason": response.generation.finish_reason,
            **({"interrupted": True} if response.interrupted else {}),
        }
        lines.append(line)
    append_lines(path, map(json.dumps, lines))
    return lines


def _mismatch_metrics(gap: Gap) -> dict[str, float]:
    """Nothing where all tokens are stale: a gap of 0 would say that engine and trainer were compared."""
    names = () if gap.stale_share == 1 else ("kl", "max_abs", "mean_abs")
    return {f"mismatch/{name}": getattr(gap.current, name) for name in names}


def _response_metrics(groups: Sequence[ScoredGroup]) -> dict[str, float | int]:
    responses = [response for group in groups for response in group.responses]
    lengths = np.array([_length(response) for response in responses])
    log_probs = np.concatenate([response.generation.log_probs for response in responses])
    errors = sum(response.verdict.error is not None for response in responses)
    both = [response for response in responses if response.other_accuracy is not None]  # judged by a rule for maths
    rewards = [(name, value) for each in responses for name, value in (each.verdict.rewards or {}).items()]
    disagreement = {"verdict_disagreement": sum(each.rules_disagree for each in both) / len(both)} if both else {}
    return {
        "accuracy/mean": _mean(groups, attrgetter("accuracy")),
        "reward/mean": _mean(groups, lambda response: response.reward_raw),
        **{f"reward/{name}": float(np.mean([v for key, v in rewards if key == name])) for name in dict(rewards)},
        "reward_shaped/mean": _mean(groups, lambda response: response.reward_shaped),
        "mean_prob": float(np.exp(log_probs).mean()),
        "response_length/mean": float(lengths.mean()),
        "response_length/p95": float(np.percentile(lengths, 95)),
        "response_length/max": float(lengths.max()),
        "verdict_errors": errors,
        "verdict_error_fraction": errors / len(responses),
        **disagreement,
        "repetition": _repetition(groups),
        "truncated_fraction": _mean(groups, lambda response: response.truncated),
        **reflection_metrics([response.said for response in responses], [response.accuracy for response in responses]),
    }


def _episode_metrics(groups: Sequence[ScoredGroup]) -> dict[str, float | int]:
    return {
        "episode/turns": _mean(groups, lambda response: 1 + len(response.earlier)),
        "episode/observation_tokens": _mean(groups, lambda response: sum(n for _, n in response.generation.given)),
        "episode/turn_reward": _mean(groups, lambda response: sum(turn.reward for turn in response.earlier)),
        "episode/errors": _mean(groups, lambda response: sum(turn.error is not None for turn in response.earlier)),
    }


def _sampling_metrics(admission: Admission, wanted: int) -> dict[str, float | int]:
    decided = (*admission.kept, *admission.filtered)
    shares = [group.correct / len(group.responses) for group in decided]
    by_share = np.histogram([share for share in shares if 0 < share < 1], bins=np.linspace(0, 1, 5))[0]
    useful = sum(keep_group(group.correct, len(group.responses)) for group in decided)
    return {
        "sampling/generated": len(admission.generated),
        "sampling/kept": useful,
        "sampling/batch_share": len(admission.kept) / wanted,
        **{f"sampling/useful_{name}": int(count) for name, count in zip(QUARTERS, by_share, strict=True)},
        "sampling/all_correct": sum(group.correct == len(group.responses) for group in decided),
        "sampling/all_wrong": sum(group.correct == 0 for group in decided),
        **{f"sampling/{fate}": getattr(admission, fate) for fate in ("carried", "in_flight", "expired", "discarded")},
        "sampling/retired": len(admission.passed_over),
        "sampling/pass_rate": useful / len(decided),
        "sampling/oversampling_predicted": admission.predicted_groups / wanted,
        "sampling/oversampling_actual": len(decided) / wanted,
        # With `tokens/trained`: what is generated in a step, or was carried into it, has one of these fates.
        "tokens/all_correct": sum(group.tokens for group in admission.filtered if group.correct),
        "tokens/all_wrong": sum(group.tokens for group in admission.filtered if not group.correct),
        **{f"tokens/{fate}": getattr(admission, f"{fate}_tokens") for fate in ("carried", "expired", "discarded")},
        "bias/accepted_length": _mean(admission.kept, _length),
        "bias/generated_length": _mean(admission.judged, _length),
        "bias/accepted_accuracy": _mean(admission.kept, attrgetter("accuracy")),
        "bias/generated_accuracy": _mean(admission.judged, attrgetter("accuracy")),
        **({"bias/passed_over_accuracy": float(np.mean(admission.passed_over))} if admission.passed_over else {}),
    }


def update_metrics(updates: Sequence[UpdateMetrics]) -> dict[str, float]:
    tokens = max(1, sum(update.tokens for update in updates))
    names = updates[0].sums.keys() - {"log_prob", "entropy"}  # those two with every objective
    sums = {name: sum(update.sums[name] for update in updates) for name in sorted(names)}
    metrics = {
        "loss": float(np.mean([update.loss for update in updates])),
        "grad_norm": float(np.mean([update.grad_norm for update in updates])),
        "lr": updates[-1].lr,
    }
    clipped_prob = sums.pop("clipped_high_prob", 0.0)
    if sums.get("clipped_high"):
        metrics["clip_high_prob"] = clipped_prob / sums["clipped_high"]
    return metrics | {STATISTICS.get(name, f"objective/{name}"): total / tokens for name, total in sums.items()}


def expert_metrics(counts: np.ndarray, *, replayed: bool) -> dict[str, float]:
    """Of `LogProbs.expert_counts`; the experts are those that the tokens went to, `replayed` or not."""
    load, (tokens, entropy, otherwise) = _relative_load(counts), counts[:, -ROUTER_SUMS:].sum(axis=0).tolist()
    experts, imbalance = load.shape[1], load.max(axis=1)
    return {
        "experts/imbalance": float(imbalance.mean()),
        "experts/imbalance_max": float(imbalance.max()),
        "experts/dead": float((load == 0).mean()),
        "experts/entropy": entropy / tokens / math.log(experts) if experts > 1 else 0.0,
        **({"experts/rerouted": otherwise / tokens} if replayed else {}),
    }


def _relative_load(counts: np.ndarray) -> np.ndarray:
    """[layers, experts]: the tokens of each expert of `LogProbs.expert_counts`, over their layer's mean."""
    load = counts[:, :-ROUTER_SUMS]
    return load / load.mean(axis=1, keepdims=True)


def _repetition(groups: Sequence[ScoredGroup]) -> float:
    first = [group.responses[0].generation.drawn_ids for group in groups]
    before = np.cumsum([0, *map(len, first[:-1])])
    return float(np.mean([repeated_share(ids) for ids in first[: int((before < REPETITION_TOKENS).sum())]]))


def repeated_share(token_ids: np.ndarray) -> float:
    """Share of the response's runs of `REPEATED_TOKENS` tokens that stood in it before; 0 for one that is shorter.

    Example, runs of 2: 1 2 3 1 2 has four runs, one of them twice: 0.25.
    """
    if len(token_ids) < REPEATED_TOKENS:
        return 0.0
    # A run is known by a sum with odd random factors modulo 2^64: two are taken for one about once in 2^64.
    factors = np.random.Generator(np.random.PCG64(0)).integers(1 << 63, size=REPEATED_TOKENS, dtype=np.uint64) * 2 + 1
    runs = np.lib.stride_tricks.sliding_window_view(token_ids.astype(np.uint64), REPEATED_TOKENS) @ factors
    return 1.0 - len(np.unique(runs)) / len(runs)


def _mean(groups: Sequence[ScoredGroup], value: Callable[[ScoredResponse], float]) -> float:
    return float(np.mean([value(response) for group in groups for response in group.responses]))


def _length(response: ScoredResponse) -> int:
    return response.generation.drawn


def reflection_metrics(texts: Sequence[str], correct: Sequence[bool]) -> dict[str, float]:
    """Share of responses with such words and, where there are any, the accuracy of those that have them.

    Args:
        texts: [R] responses.
        correct: [R] whether each is right.
    """
    metrics: dict[str, float] = {}
    for name, pattern in (("reflection", REFLECTION), ("backtracking", BACKTRACKING)):
        hits = np.array([bool(pattern.search(text)) for text in texts])
        metrics[f"{name}_rate"] = float(hits.mean())
        if hits.any():
            metrics[f"{name}_accuracy"] = float(np.asarray(correct, dtype=float)[hits].mean())
    return metrics
