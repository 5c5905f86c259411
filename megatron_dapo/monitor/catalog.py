"""Every metric, declared once: name, unit, how it stands for a whole rollout step, where the paper plots it.

A name that is not here cannot be written. The table in docs/metrics.md is made from this file.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from enum import StrEnum


class Reduce(StrEnum):
    """How the values inside a rollout step become the one value of its line. Means are sum / count, never of means."""

    MEAN = "mean"
    SUM = "sum"
    MAX = "max"
    P95 = "95th percentile"
    RATIO = "ratio"
    LAST = "last"


@dataclass(frozen=True, slots=True)
class Metric:
    """One declared metric."""

    name: str
    unit: str
    reduce: Reduce
    help: str
    figure: str = ""
    """Where the paper plots it."""


class UndeclaredMetricError(ValueError):
    """A metric is written under a name that the catalog does not hold."""


MEAN, SUM, MAX, P95, RATIO, LAST = Reduce

GROUPS: Mapping[str, tuple[Metric, ...]] = {
    "Axes": (
        Metric("rollout_step", "steps", LAST, "Rollout steps done: fill a batch of groups, train on it, sync."),
        Metric("optimizer_step", "steps", LAST, "Optimizer steps done since the start of the run."),
        Metric("weight_version", "versions", LAST, "Version of the weights that the servers hold after the step."),
    ),
    "Responses": (
        Metric("accuracy/mean", "share", MEAN, "Right answers among the responses generated in the step."),
        Metric("reward/mean", "reward", MEAN, "Rule-based reward of those responses, in [-1, 1] (eq. 7).", "7b"),
        Metric("reward_shaped/mean", "reward", MEAN, "The same with the length penalty (eq. 13): what eq. 9 reads."),
        Metric("response_length/mean", "tokens", MEAN, "Length of the responses generated in the step.", "7a"),
        Metric("response_length/p95", "tokens", P95, "95% of the responses are at most this long."),
        Metric("response_length/max", "tokens", MAX, "Longest response."),
        Metric("verdict_errors", "responses", SUM, "Responses without a verdict (time-out, memory, unusable answer)."),
        Metric("verdict_error_fraction", "share", MEAN, "The same, as a share of the step's responses."),
        Metric("verdict_disagreement", "share", RATIO, "Where `exact` and `robust` differ, of what both judged."),
        Metric("truncated_fraction", "share", MEAN, "Responses cut off at `rollout.max_new_tokens`."),
        Metric("reflection_rate", "share", MEAN, "Responses with words that look back, as `wait` does (case study)."),
        Metric("reflection_accuracy", "share", RATIO, "Right answers among the responses with such words."),
        Metric("backtracking_rate", "share", MEAN, 'Responses with words that give up what was written: "start over".'),
        Metric("backtracking_accuracy", "share", RATIO, "Right answers among the responses with such words."),
        Metric("entropy", "nats", MEAN, "Entropy of the next-token distribution over the batch's tokens.", "2b, 7c"),
        Metric("mean_prob", "share", MEAN, "Probability of the generated tokens.", "7d"),
    ),
    "Dynamic sampling": (
        Metric("sampling/generated", "groups", SUM, "Groups generated in the step."),
        Metric("sampling/kept", "groups", SUM, "Groups neither all right nor all wrong (eq. 11)."),
        Metric("sampling/all_correct", "groups", SUM, "Groups all right; dynamic sampling filters them.", "3b"),
        Metric("sampling/all_wrong", "groups", SUM, "Groups all wrong; dynamic sampling filters them."),
        Metric("sampling/carried", "groups", LAST, "Finished groups that wait for the next step."),
        Metric("sampling/in_flight", "groups", LAST, "Groups with the servers when the batch was full (`async`)."),
        Metric("sampling/expired", "groups", SUM, "Groups that had become too old and were generated again."),
        Metric("sampling/pass_rate", "share", RATIO, "Neither all right nor all wrong, of the groups decided."),
        Metric("sampling/oversampling_predicted", "factor", RATIO, "Groups expected to be needed for each one wanted."),
        Metric("sampling/oversampling_actual", "factor", RATIO, "Groups decided for each group wanted."),
    ),
    "Bias ledger": (
        Metric("bias/accepted_length", "tokens", MEAN, "Length of the responses trained on."),
        Metric("bias/generated_length", "tokens", MEAN, "Of all generated; accepted ones always shorter: a bias."),
        Metric("bias/accepted_accuracy", "share", MEAN, "Right answers among the responses trained on."),
        Metric("bias/generated_accuracy", "share", MEAN, "Right answers among all responses generated."),
    ),
    "Update": (
        Metric("loss", "loss", MEAN, "Loss over the optimizer steps (eq. 8, negated)."),
        Metric("grad_norm", "norm", MEAN, "Global gradient norm before clipping, over the optimizer steps."),
        Metric("lr", "1", LAST, "Learning rate of the last optimizer step."),
        Metric("clip_fraction/low", "share", MEAN, "Loss-carrying tokens clipped from below (A < 0, r < 1 - low)."),
        Metric("clip_fraction/high", "share", MEAN, "Loss-carrying tokens clipped from above (A > 0, r > 1 + high)."),
        Metric("clip_fraction/dual", "share", MEAN, "Loss-carrying tokens cut by the dual clip, where it is on."),
        Metric("clip_high_prob", "share", RATIO, "Old probability of the tokens clipped from above.", "3a"),
        Metric("kl/old", "nats", MEAN, "KL of the old policy to the new one (k3), over the optimizer steps."),
        Metric("kl/reference", "nats", MEAN, "KL to the starting weights, where `algorithm.kl` is on."),
        Metric("objective/*", "its own", MEAN, "A statistic of your own objective, over loss-carrying tokens."),
        Metric("correction/truncated", "share", MEAN, "Tokens whose importance weight met its upper bound."),
        Metric("correction/masked", "share", MEAN, "Tokens dropped by `algorithm.importance.mode: masked`."),
    ),
    "Engine against trainer": (
        Metric("mismatch/kl", "nats", MEAN, "KL of the engine's to the trainer's probabilities, same tokens (k3)."),
        Metric("mismatch/max_abs", "nats", MAX, "Largest |engine - trainer| log-prob of a token."),
        Metric("mismatch/mean_abs", "nats", MEAN, "Mean |engine - trainer| log-prob of a token."),
        Metric("staleness/share", "share", MEAN, "Trained tokens of an older weight version; not in `mismatch/*`."),
        Metric("staleness/mean", "versions", MEAN, "Weight versions that the trained tokens lie behind."),
        Metric("staleness/max", "versions", MAX, "The same for the oldest of them."),
        Metric("staleness/kl", "nats", MEAN, "KL of the older version to the trainer's on those tokens (k3)."),
    ),
    "Cost": (
        Metric("timing/rollout", "s", SUM, "Filling the batch, less the time waited for verdicts alone."),
        Metric("timing/reward", "s", SUM, "Waiting for verdicts."),
        Metric("timing/logprob", "s", SUM, "Waiting for old log-probs (and the reference's) once the batch is full."),
        Metric("timing/update", "s", SUM, "All optimizer steps."),
        Metric("timing/weight_sync", "s", SUM, "New weights to every server, checksums compared."),
        Metric("weight_sync/gb_per_s", "GB/s", RATIO, "Bytes of the model, once / seconds of its weight sync."),
        Metric("weight_sync/by_disk", "servers", SUM, "Servers that read weights from disk as their transport failed."),
        Metric("timing/handover", "s", SUM, "`colocated`: GPU memory to the trainer; back is within weight_sync."),
        Metric("timing/evaluation", "s", SUM, "Held-out problems, where the step had an evaluation."),
        Metric("timing/checkpoint", "s", SUM, "Waiting for a checkpoint: for its copy, or all if not in background."),
        Metric("timing/step", "s", SUM, "The whole rollout step."),
        Metric("tokens/generated", "tokens", SUM, "Response tokens generated in the step."),
        Metric("tokens/trained", "tokens", SUM, "Response tokens of the batch trained on."),
        Metric("tokens/all_correct", "tokens", SUM, "Response tokens of groups filtered because all were right."),
        Metric("tokens/all_wrong", "tokens", SUM, "Response tokens of groups filtered because all were wrong."),
        Metric("tokens/carried", "tokens", LAST, "Response tokens of finished groups that wait for the next step."),
        Metric("tokens/expired", "tokens", SUM, "Response tokens of finished groups too old, generated again."),
        Metric("tokens_per_second/rollout", "tokens/s", RATIO, "Generated, by rollout and reward (`async`: step)."),
        Metric("tokens_per_second/train", "tokens/s", RATIO, "Tokens trained on / seconds of update."),
    ),
    "Evaluation": (
        Metric("evaluation/sampled", "share", MEAN, "Held-out problems: accuracy of sampled answers, avg@k.", "1"),
        Metric("evaluation/greedy", "share", MEAN, "Held-out problems: accuracy of greedy answers."),
        Metric("evaluation/oldest_version", "versions", LAST, "Oldest weights that wrote a token of an answer."),
        Metric("evaluation/newest_version", "versions", LAST, "Newest ones: the same within one evaluation."),
    ),
}
"""All metrics under their headings."""

CATALOG: Mapping[str, Metric] = {metric.name: metric for group in GROUPS.values() for metric in group}
"""All metrics by name."""


def check_declared(names: Iterable[str]) -> None:
    """Raise `UndeclaredMetricError`, with the nearest declared name, for the first name that is not in the catalog."""
    for name in names:
        if name not in CATALOG and f"{name.partition('/')[0]}/*" not in CATALOG:
            near = get_close_matches(name, CATALOG, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "declare it in megatron_dapo/monitor/catalog.py"
            raise UndeclaredMetricError(f"metric {name!r}: not declared; {hint}")
