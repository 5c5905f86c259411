"""Alarms over the history of a run: what goes wrong in DAPO training, how it shows, and which key to turn.

Pure functions over the lines of metrics.jsonl (`writer.read_metrics`), newest last. "Recent" is the mean over the last
`window` rollout steps, "early" over the first; a rule is silent until the steps it compares exist. Thresholds are
judgements, not laws: an alarm says look here. Only `mismatch` and `non_finite` ask for a stop.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

History = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Alarm:
    """One thing that looks wrong at the newest step of a history."""

    name: str
    message: str
    """What was seen, with numbers."""
    reason: str
    """Why it matters, with the paper's section."""
    key: str
    """The config key to turn first."""
    stop: bool = False
    """Whether going on makes no sense."""

    def __str__(self) -> str:
        return f"{self.name}: {self.message}. {self.reason} Look at {self.key}."


@dataclass(frozen=True, kw_only=True, slots=True)
class HealthLimits:
    """Thresholds of the alarms. Shares are in [0, 1]."""

    window: int = 5
    entropy_share: float = 0.2
    """Recent entropy below this share of early entropy ..."""
    standstill: float = 0.02
    """... while accuracy gained less than this over the window before."""
    solved: float = 0.95
    """Accuracy from which low entropy and all-right groups are success."""
    length_growth: float = 1.5
    """Recent length above this many times that of the window before, without a gain in accuracy."""
    length_loss: float = 0.5
    """Recent length below this share of early length, with a loss in accuracy."""
    truncated: float = 0.2
    verdict_errors: float = 0.02
    """Recent share of responses without a verdict ..."""
    verdict_errors_now: float = 0.2
    """... and that of the newest step alone, which no window is waited for."""
    reward_gain: float = 0.05
    """Shaped reward rises by more than this while accuracy falls by more than `standstill`."""
    heldout_loss: float = 0.05
    """Held-out accuracy this far below its best while training accuracy rises."""
    all_correct: float = 0.6
    pass_rate: float = 0.1
    gradient: float = 1e-8
    mismatch_warn: float = 0.05
    """Nats; `monitor.mismatch_warn`."""
    mismatch_stop: float = 1.0
    """Nats; `monitor.mismatch_stop`."""


def check_health(history: History, limits: HealthLimits | None = None) -> list[Alarm]:
    """All alarms that hold at the newest step of `history`."""
    bounds = limits or HealthLimits()
    found = (rule(history, bounds) for rule in RULES) if history else ()
    return [alarm for alarm in found if alarm is not None]


def new_alarms(history: History, limits: HealthLimits | None = None) -> list[Alarm]:
    """The alarms that hold now and did not hold one step before: each is reported once, when it begins."""
    before = {alarm.name for alarm in check_health(history[:-1], limits)}
    return [alarm for alarm in check_health(history, limits) if alarm.name not in before]


def non_finite(history: History, limits: HealthLimits) -> Alarm | None:
    """NaN or infinity in what is optimised."""
    broken = [name for name in history[-1].get("non_finite", ()) if name in ("loss", "grad_norm")]
    if not broken:
        return None
    return Alarm(
        name="non_finite",
        message=f"{' and '.join(broken)} not finite at rollout step {history[-1]['rollout_step']}",
        reason="The weights are lost from here on; resume from the last checkpoint.",
        key="actor.optimizer.lr",
        stop=True,
    )


def mismatch(history: History, limits: HealthLimits) -> Alarm | None:
    """Engine and trainer give different probabilities to the same tokens."""
    gap = history[-1].get("mismatch/mean_abs")
    if gap is None or gap <= limits.mismatch_warn:
        return None
    stop = gap > limits.mismatch_stop
    return Alarm(
        name="mismatch_stop" if stop else "mismatch",
        message=f"mean |engine - trainer| log-prob is {gap:.3g} nats",
        reason="The two no longer hold the same model, and eq. 8's ratios are wrong."
        if stop
        else "Rollouts come from another distribution than eq. 8 assumes.",
        key="monitor.mismatch_stop" if stop else "algorithm.importance.mode",
        stop=stop,
    )


def entropy_collapse(history: History, limits: HealthLimits) -> Alarm | None:
    """Entropy is gone and accuracy stands still. Low entropy while accuracy rises is only certainty."""
    early, recent = _early(history, "entropy", limits), _recent(history, "entropy", limits)
    gain, accuracy = _gain(history, "accuracy/mean", limits), _recent(history, "accuracy/mean", limits)
    if early is None or recent is None or gain is None or accuracy is None:
        return None
    if recent > limits.entropy_share * early or gain > limits.standstill or accuracy >= limits.solved:
        return None
    return Alarm(
        name="entropy_collapse",
        message=f"entropy {recent:.3g} after {early:.3g} at the start, accuracy stands at {accuracy:.1%}",
        reason="Responses of a group become alike and nothing new is tried (section 3.1, figure 2b).",
        key="algorithm.clip.high",
    )


def length_explosion(history: History, limits: HealthLimits) -> Alarm | None:
    """Responses grow and accuracy does not."""
    before, recent = _before(history, "response_length/mean", limits), _recent(history, "response_length/mean", limits)
    gain = _gain(history, "accuracy/mean", limits)
    if before is None or recent is None or gain is None:
        return None
    if recent < limits.length_growth * before or gain > limits.standstill:
        return None
    return Alarm(
        name="length_explosion",
        message=f"mean length {recent:.0f} tokens after {before:.0f}, accuracy {_points(gain)}",
        reason="Long responses of low quality are not punished enough (section 3.3, figure 4).",
        key="algorithm.aggregation",
    )


def length_collapse(history: History, limits: HealthLimits) -> Alarm | None:
    """Responses shrink and accuracy falls: the length penalty is being optimised instead of the answer."""
    early, recent = (f(history, "response_length/mean", limits) for f in (_early, _recent))
    was, now = (f(history, "accuracy/mean", limits) for f in (_early, _recent))
    if early is None or recent is None or was is None or now is None or len(history) < 2 * limits.window:
        return None
    if recent > limits.length_loss * early or now > was - limits.standstill:
        return None
    return Alarm(
        name="length_collapse",
        message=f"mean length {recent:.0f} tokens after {early:.0f} at the start, accuracy {now:.1%} after {was:.1%}",
        reason="All-wrong groups get a spread from the length penalty (eq. 13), which rewards giving up early; dynamic "
        "sampling drops such groups.",
        key="algorithm.dynamic_sampling.enabled",
    )


def truncation(history: History, limits: HealthLimits) -> Alarm | None:
    """Many responses are cut off at the limit."""
    share = _recent(history, "truncated_fraction", limits)
    if share is None or share < limits.truncated:
        return None
    return Alarm(
        name="truncation",
        message=f"{share:.0%} of the responses are cut off",
        reason="A cut-off response is marked wrong however sound it was: reward noise (section 3.4).",
        key="rollout.max_new_tokens or algorithm.overlong.filter",
    )


def verdict_errors(history: History, limits: HealthLimits) -> Alarm | None:
    """Many responses are counted as wrong because their verdict timed out or failed."""
    share = history[-1].get("verdict_error_fraction")
    if share is None or share < limits.verdict_errors_now:
        share = _recent(history, "verdict_error_fraction", limits)
    if share is None or share < limits.verdict_errors:
        return None
    return Alarm(
        name="verdict_errors",
        message=f"{share:.1%} of the responses have no verdict; `error` in samples.jsonl says why",
        reason="They count as wrong however sound they are: reward noise, which eq. 9 takes for mistakes.",
        key="reward.timeout_s or reward.memory_mb",
    )


def reward_without_accuracy(history: History, limits: HealthLimits) -> Alarm | None:
    """The shaped reward rises while accuracy falls."""
    reward, accuracy = (_gain(history, name, limits) for name in ("reward_shaped/mean", "accuracy/mean"))
    if reward is None or accuracy is None or reward < limits.reward_gain or accuracy > -limits.standstill:
        return None
    return Alarm(
        name="reward_without_accuracy",
        message=f"shaped reward {reward:+.2f} while accuracy {_points(accuracy)}",
        reason="The length penalty is learnt instead of the task (eq. 13 outweighs eq. 7).",
        key="algorithm.overlong.factor",
    )


def overfitting(history: History, limits: HealthLimits) -> Alarm | None:
    """Held-out accuracy falls from its best while training accuracy has risen since."""
    measured = [line for line in history if line.get("evaluation/sampled") is not None]
    if len(measured) < 2 or measured[-1] is not history[-1]:
        return None
    best = max(measured, key=lambda line: line["evaluation/sampled"])
    heldout = measured[-1]["evaluation/sampled"] - best["evaluation/sampled"]
    training = measured[-1]["accuracy/mean"] - best["accuracy/mean"]
    if heldout > -limits.heldout_loss or training <= 0:
        return None
    return Alarm(
        name="overfitting",
        message=f"since rollout step {best['rollout_step']} held-out accuracy {_points(heldout)}, "
        f"training accuracy {_points(training)}",
        reason="Reward on the training prompts says little about held-out accuracy (section 4.3).",
        key="data.path or run.rollout_steps",
    )


def all_correct(history: History, limits: HealthLimits) -> Alarm | None:
    """Most prompts have become too easy."""
    share = _recent_share(history, "sampling/all_correct", limits)
    accuracy = _recent(history, "accuracy/mean", limits)
    if share is None or share < limits.all_correct or (accuracy is not None and accuracy >= limits.solved):
        return None
    return Alarm(
        name="all_correct",
        message=f"{share:.0%} of the groups are all right and filtered",
        reason="They are generated and teach nothing (section 3.2, figure 3b: up to 60% in the paper).",
        key="data.path",
    )


def no_signal(history: History, limits: HealthLimits) -> Alarm | None:
    """Hardly any group, or none of the gradient, is left to learn from."""
    norm, rate = history[-1].get("grad_norm"), _recent(history, "sampling/pass_rate", limits)
    if norm is not None and norm < limits.gradient:
        seen, key = f"the gradient norm is {norm:.2g}", "algorithm.dynamic_sampling.enabled"
    elif rate is not None and rate < limits.pass_rate:
        seen, key = f"only {rate:.1%} of the groups have both right and wrong answers", "data.path"
    else:
        return None
    return Alarm(
        name="no_signal",
        message=seen,
        reason="Groups without spread have advantage 0 (eq. 9, section 3.2).",
        key=key,
    )


RULES: tuple[Callable[[History, HealthLimits], Alarm | None], ...] = (
    non_finite,
    mismatch,
    entropy_collapse,
    length_explosion,
    length_collapse,
    truncation,
    verdict_errors,
    reward_without_accuracy,
    overfitting,
    all_correct,
    no_signal,
)


def _points(change: float) -> str:
    """A difference of shares, in percentage points."""
    return f"{100 * change:+.1f} points"


def _mean(lines: History, name: str) -> float | None:
    values = [line[name] for line in lines if line.get(name) is not None]
    return sum(values) / len(values) if values else None


def _early(history: History, name: str, limits: HealthLimits) -> float | None:
    return _mean(history[: limits.window], name)


def _recent(history: History, name: str, limits: HealthLimits) -> float | None:
    """Mean over the newest window; None until it is whole."""
    if len(history) < limits.window:
        return None
    return _mean(history[-limits.window :], name)


def _before(history: History, name: str, limits: HealthLimits) -> float | None:
    """Mean over the window before the recent one; None until both are whole."""
    if len(history) < 2 * limits.window:
        return None
    return _mean(history[-2 * limits.window : -limits.window], name)


def _gain(history: History, name: str, limits: HealthLimits) -> float | None:
    before, recent = _before(history, name, limits), _recent(history, name, limits)
    return None if before is None or recent is None else recent - before


def _recent_share(history: History, name: str, limits: HealthLimits) -> float | None:
    """Share of the groups decided in the recent window that `name` counts: sums, not a mean of shares."""
    if len(history) < limits.window:
        return None
    lines = history[-limits.window :]
    counts = ("sampling/kept", "sampling/all_correct", "sampling/all_wrong")
    decided = sum(line.get(count) or 0 for line in lines for count in counts)
    return sum(line.get(name) or 0 for line in lines) / decided if decided else None
