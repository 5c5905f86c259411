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


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """One declared metric."""

    name: str
    unit: str
    reduce: Reduce
    help: str
    figure: str = ""
    """Where the paper plots it."""


class UndeclaredMetricError(KeyError):
    """A metric is written under a name that the catalog does not hold."""

    def __str__(self) -> str:
        return str(self.args[0])


def _metric(name: str, unit: str, reduce: Reduce, help: str, figure: str = "") -> Metric:
    return Metric(name=name, unit=unit, reduce=reduce, help=help, figure=figure)


_AXES = (
    _metric("rollout_step", "steps", Reduce.LAST, "Rollout steps done: fill a batch of groups, train on it, sync."),
    _metric("optimizer_step", "steps", Reduce.LAST, "Optimizer steps done since the start of the run."),
    _metric("weight_version", "versions", Reduce.LAST, "Version of the weights that the servers hold after the step."),
)

_RESPONSES = (
    _metric("accuracy/mean", "share", Reduce.MEAN, "Right answers among the responses generated in the step."),
    _metric("reward/mean", "reward", Reduce.MEAN, "Rule-based reward of those responses, in [-1, 1] (eq. 7).", "7b"),
    _metric(
        "reward_shaped/mean", "reward", Reduce.MEAN, "The same with the length penalty (eq. 13): what eq. 9 reads."
    ),
    _metric("response_length/mean", "tokens", Reduce.MEAN, "Length of the responses generated in the step.", "7a"),
    _metric("response_length/p95", "tokens", Reduce.P95, "95% of the responses are at most this long."),
    _metric("response_length/max", "tokens", Reduce.MAX, "Longest response."),
    _metric(
        "verdict_errors", "responses", Reduce.SUM, "Responses without a verdict (time-out, memory, unusable answer)."
    ),
    _metric("verdict_error_fraction", "share", Reduce.MEAN, "The same, as a share of the step's responses."),
    _metric(
        "verdict_disagreement",
        "share",
        Reduce.RATIO,
        "Responses to mathematics on which the rules `exact` and `robust` differ, among those that both could judge.",
    ),
    _metric("truncated_fraction", "share", Reduce.MEAN, "Responses cut off at `rollout.max_new_tokens`."),
    _metric(
        "reflection_rate",
        "share",
        Reduce.MEAN,
        'Responses with words that look back, such as "wait"; they appear in training (case study).',
    ),
    _metric("reflection_accuracy", "share", Reduce.RATIO, "Right answers among the responses with such words."),
    _metric(
        "backtracking_rate",
        "share",
        Reduce.MEAN,
        'Responses with words that give up what was written, such as "start over".',
    ),
    _metric("backtracking_accuracy", "share", Reduce.RATIO, "Right answers among the responses with such words."),
    _metric(
        "entropy", "nats", Reduce.MEAN, "Entropy of the next-token distribution over the batch's tokens.", "2b, 7c"
    ),
    _metric("mean_prob", "share", Reduce.MEAN, "Probability of the generated tokens.", "7d"),
)

_SAMPLING = (
    _metric("sampling/generated", "groups", Reduce.SUM, "Groups generated in the step."),
    _metric("sampling/kept", "groups", Reduce.SUM, "Groups neither all right nor all wrong (eq. 11)."),
    _metric(
        "sampling/all_correct",
        "groups",
        Reduce.SUM,
        "Groups with all answers right: filtered, with dynamic sampling.",
        "3b",
    ),
    _metric(
        "sampling/all_wrong", "groups", Reduce.SUM, "Groups with all answers wrong: filtered, with dynamic sampling."
    ),
    _metric("sampling/carried", "groups", Reduce.LAST, "Finished groups that wait for the next step."),
    _metric("sampling/in_flight", "groups", Reduce.LAST, "Groups with the servers when the batch was full (`async`)."),
    _metric("sampling/expired", "groups", Reduce.SUM, "Groups that had become too old and were generated again."),
    _metric(
        "sampling/pass_rate",
        "share",
        Reduce.RATIO,
        "Neither all right nor all wrong, of the groups decided in the step.",
    ),
    _metric(
        "sampling/oversampling_predicted", "factor", Reduce.RATIO, "Groups expected to be needed for each group wanted."
    ),
    _metric("sampling/oversampling_actual", "factor", Reduce.RATIO, "Groups decided for each group wanted."),
)

_BIAS = (
    _metric("bias/accepted_length", "tokens", Reduce.MEAN, "Length of the responses trained on."),
    _metric(
        "bias/generated_length",
        "tokens",
        Reduce.MEAN,
        "Length of all responses generated; if the accepted ones are shorter step after step, admission is biased.",
    ),
    _metric("bias/accepted_accuracy", "share", Reduce.MEAN, "Right answers among the responses trained on."),
    _metric("bias/generated_accuracy", "share", Reduce.MEAN, "Right answers among all responses generated."),
)

_UPDATE = (
    _metric("loss", "loss", Reduce.MEAN, "Loss over the optimizer steps (eq. 8, negated)."),
    _metric("grad_norm", "norm", Reduce.MEAN, "Global gradient norm before clipping, over the optimizer steps."),
    _metric("lr", "1", Reduce.LAST, "Learning rate of the last optimizer step."),
    _metric("clip_fraction/low", "share", Reduce.MEAN, "Loss-carrying tokens clipped from below (A < 0, r < 1 - low)."),
    _metric(
        "clip_fraction/high", "share", Reduce.MEAN, "Loss-carrying tokens clipped from above (A > 0, r > 1 + high)."
    ),
    _metric("clip_fraction/dual", "share", Reduce.MEAN, "Loss-carrying tokens cut by the dual clip, where it is on."),
    _metric(
        "clip_high_prob",
        "share",
        Reduce.RATIO,
        "Old probability of the tokens clipped from above; low if rare tokens are what the clip holds back.",
        "3a",
    ),
    _metric("kl/old", "nats", Reduce.MEAN, "KL of the old policy to the new one (k3), over the optimizer steps."),
    _metric("kl/reference", "nats", Reduce.MEAN, "KL to the starting weights, where `algorithm.kl` is on."),
    _metric("correction/truncated", "share", Reduce.MEAN, "Tokens whose importance weight met its upper bound."),
    _metric("correction/masked", "share", Reduce.MEAN, "Tokens dropped by `algorithm.importance.mode: masked`."),
)

_MISMATCH = (
    _metric("mismatch/kl", "nats", Reduce.MEAN, "KL of the engine's to the trainer's probabilities, same tokens (k3)."),
    _metric("mismatch/max_abs", "nats", Reduce.MAX, "Largest |engine - trainer| log-prob of a token."),
    _metric("mismatch/mean_abs", "nats", Reduce.MEAN, "Mean |engine - trainer| log-prob of a token."),
    _metric(
        "staleness/share",
        "share",
        Reduce.MEAN,
        "Trained tokens that an older weight version wrote (carried groups, `async`); `mismatch/*` leaves them out, "
        "and is absent where there are no others.",
    ),
    _metric("staleness/mean", "versions", Reduce.MEAN, "Weight versions that the trained tokens lie behind."),
    _metric("staleness/max", "versions", Reduce.MAX, "The same for the oldest of them."),
    _metric("staleness/kl", "nats", Reduce.MEAN, "KL of the older version to the trainer's on those tokens (k3)."),
)

_COST = (
    _metric("timing/rollout", "s", Reduce.SUM, "Filling the batch, less the time waited for verdicts alone."),
    _metric("timing/reward", "s", Reduce.SUM, "Waiting for verdicts."),
    _metric(
        "timing/logprob", "s", Reduce.SUM, "Waiting for old log-probs (and the reference's) once the batch is full."
    ),
    _metric("timing/update", "s", Reduce.SUM, "All optimizer steps."),
    _metric("timing/weight_sync", "s", Reduce.SUM, "New weights to every server, checksums compared."),
    _metric("weight_sync/gb_per_s", "GB/s", Reduce.RATIO, "Bytes of the model, once / seconds of its weight sync."),
    _metric(
        "weight_sync/by_disk",
        "servers",
        Reduce.SUM,
        "Servers that read new weights from disk because `tensor` or `distributed` failed for them.",
    ),
    _metric(
        "timing/handover",
        "s",
        Reduce.SUM,
        "`colocated`: the GPUs' memory from servers to trainer and back, but for the way back within weight_sync.",
    ),
    _metric("timing/evaluation", "s", Reduce.SUM, "Held-out problems, where the step had an evaluation."),
    _metric(
        "timing/checkpoint",
        "s",
        Reduce.SUM,
        "Waiting for a checkpoint, where the step had one: for the copy of the state, or for all of it where it is not "
        "written beside the run.",
    ),
    _metric("timing/step", "s", Reduce.SUM, "The whole rollout step."),
    _metric("tokens/generated", "tokens", Reduce.SUM, "Response tokens generated in the step."),
    _metric("tokens/trained", "tokens", Reduce.SUM, "Response tokens of the batch trained on."),
    _metric("tokens/all_correct", "tokens", Reduce.SUM, "Response tokens of groups filtered because all were right."),
    _metric("tokens/all_wrong", "tokens", Reduce.SUM, "Response tokens of groups filtered because all were wrong."),
    _metric("tokens/carried", "tokens", Reduce.LAST, "Response tokens of finished groups that wait for the next step."),
    _metric(
        "tokens/expired",
        "tokens",
        Reduce.SUM,
        "Response tokens of finished groups that were too old and were generated again.",
    ),
    _metric(
        "tokens_per_second/rollout",
        "tokens/s",
        Reduce.RATIO,
        "Tokens generated / seconds of rollout and reward; in `async` mode of the whole step.",
    ),
    _metric("tokens_per_second/train", "tokens/s", Reduce.RATIO, "Tokens trained on / seconds of update."),
)

_EVALUATION = (
    _metric("evaluation/sampled", "share", Reduce.MEAN, "Held-out problems: accuracy of sampled answers, avg@k.", "1"),
    _metric("evaluation/greedy", "share", Reduce.MEAN, "Held-out problems: accuracy of greedy answers."),
    _metric("evaluation/oldest_version", "versions", Reduce.LAST, "Oldest weights that wrote a token of an answer."),
    _metric(
        "evaluation/newest_version",
        "versions",
        Reduce.LAST,
        "Newest ones: the same, since an evaluation ends before the next weights are published.",
    ),
)

GROUPS: Mapping[str, tuple[Metric, ...]] = {
    "Axes": _AXES,
    "Responses": _RESPONSES,
    "Dynamic sampling": _SAMPLING,
    "Bias ledger": _BIAS,
    "Update": _UPDATE,
    "Engine against trainer": _MISMATCH,
    "Cost": _COST,
    "Evaluation": _EVALUATION,
}
"""All metrics under their headings."""

CATALOG: Mapping[str, Metric] = {metric.name: metric for group in GROUPS.values() for metric in group}
"""All metrics by name."""


def check_declared(names: Iterable[str]) -> None:
    """Raise `UndeclaredMetricError`, with the nearest declared name, for the first name that is not in the catalog."""
    for name in names:
        if name not in CATALOG:
            near = get_close_matches(name, CATALOG, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "declare it in megatron_dapo/monitor/catalog.py"
            raise UndeclaredMetricError(f"metric {name!r}: not declared; {hint}")
