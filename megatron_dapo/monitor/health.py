"""Alarms of a run: what goes wrong in DAPO training, how it shows, and which config key to change first.

`HealthMonitor` is fed one line of metrics.jsonl a rollout step. "Recent" is the mean over the last WINDOW rollout
steps, "early" over the first; a rule is silent until the steps it compares exist. Thresholds are judgements, not laws:
an alarm says look here. What must stop a run does so before its step has a line: a loss or gradient that is not finite,
and a gap between engine and trainer above `monitor.mismatch_stop`.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import InitVar, dataclass, replace
from operator import itemgetter
from typing import Any

Line = Mapping[str, Any]
HELD_OUT = "evaluation/sampled"


@dataclass(frozen=True, kw_only=True, slots=True)
class Alarm:
    """One thing that looks wrong at the newest rollout step."""

    name: str
    message: str
    """What was seen, with numbers."""
    reason: str
    """Why it matters, with the paper's section."""
    key: str
    """The config key to change first."""

    def __str__(self) -> str:
        return f"{self.name}: {self.message}. {self.reason} Look at {self.key}."


WINDOW = 5
"""Rollout steps."""
STANDSTILL = 0.02
"""Accuracy that gained no more than this stands still."""
SOLVED = 0.95
"""Accuracy from which low entropy and all-right groups are success."""
SMALL_BATCH = {"drop": 0.25}
"""`algorithm.dynamic_sampling.filter` -> the share of the wanted groups below which a batch is small; others: 1."""


@dataclass
class HealthMonitor:
    """A run's rollout steps so far, and the alarms that hold at the newest.

    A mean that is not known is NaN: no comparison with it holds, so a rule that needs it finds nothing.
    """

    history: InitVar[Iterable[Line]] = ()
    """Lines of `read_metrics`, oldest first; what holds at their end is known already."""
    mismatch_warn: float = 0.05
    """The config's `monitor`, in nats."""
    filter: str = "refill"
    """The config's `algorithm.dynamic_sampling.filter`: what SMALL_BATCH asks for."""

    def __post_init__(self, history: Iterable[Line]) -> None:
        self.lines = list(history)
        self.alarms = self._check()
        """All that hold at the newest step."""

    def add(self, line: Line) -> list[Alarm]:
        """Take the next rollout step. Returns the alarms that hold now and did not hold one step before."""
        before = {alarm.name for alarm in self.alarms}
        self.lines.append(line)
        self.alarms = self._check()
        return [alarm for alarm in self.alarms if alarm.name not in before]

    def now(self, name: str) -> float:
        """Value at the newest step."""
        return _mean(self.lines[-1:], name)

    def early(self, name: str) -> float:
        """Mean over the first window."""
        return _mean(self.lines[:WINDOW], name)

    def recent(self, name: str) -> float:
        """Mean over the newest window, once it is whole."""
        return _mean(self.lines[-WINDOW:], name) if len(self.lines) >= WINDOW else math.nan

    def before(self, name: str) -> float:
        """Mean over the window before the newest one, once both are whole."""
        return _mean(self.lines[-2 * WINDOW : -WINDOW], name) if len(self.lines) >= 2 * WINDOW else math.nan

    def gain(self, name: str) -> float:
        """How much the newest window's mean is above that of the window before."""
        return self.recent(name) - self.before(name)

    def _check(self) -> list[Alarm]:
        seen = [(rule, look(self)) for rule, look in RULES]
        return [replace(rule, message=message) for rule, message in seen if message]


Look = Callable[[HealthMonitor], str | None]
"""What is wrong at the newest step, with numbers; None where nothing is."""

RULES: list[tuple[Alarm, Look]] = []
"""Alarms without a message, and what looks for it."""


def _rule(reason: str, key: str) -> Callable[[Look], Look]:
    """Make a function a rule of its name."""

    def register(look: Look) -> Look:
        RULES.append((Alarm(name=look.__name__, message="", reason=reason, key=key), look))
        return look

    return register


@_rule("Rollouts come from another distribution than eq. 8 assumes.", "algorithm.importance.mode")
def mismatch(run: HealthMonitor) -> str | None:
    gap = run.now("mismatch/mean_abs")
    return f"mean |engine - trainer| log-prob is {gap:.3g} nats" if gap > run.mismatch_warn else None


@_rule("Responses of a group become alike and nothing new is tried (section 3.1, figure 2b).", "algorithm.clip.high")
def entropy_collapse(run: HealthMonitor) -> str | None:
    """Below a fifth of its start. Low entropy while accuracy rises is only certainty."""
    early, recent, accuracy = run.early("entropy"), run.recent("entropy"), run.recent("accuracy/mean")
    still = run.gain("accuracy/mean") <= STANDSTILL and accuracy < SOLVED
    seen = f"entropy {recent:.3g} after {early:.3g} at the start, accuracy stands at {accuracy:.1%}"
    return seen if still and recent <= 0.2 * early else None


@_rule("Responses drift into gibberish.", "actor.optimizer.lr")
def entropy_rise(run: HealthMonitor) -> str | None:
    early, recent, gain = run.early("entropy"), run.recent("entropy"), run.gain("accuracy/mean")
    seen = f"entropy {recent:.3g} after {early:.3g} at the start, accuracy {_points(gain)}"
    return seen if recent >= 3 * early and gain <= STANDSTILL else None


@_rule("Responses go round in circles until they are cut off (section 3.3).", "algorithm.overlong.shape")
def repetition(run: HealthMonitor) -> str | None:
    share = run.recent("repetition")
    return f"{share:.0%} of the runs of tokens are repeated" if share >= 0.3 else None


@_rule("Long responses of low quality are not punished enough (section 3.3, figure 4).", "algorithm.aggregation")
def length_explosion(run: HealthMonitor) -> str | None:
    before, recent = run.before("response_length/mean"), run.recent("response_length/mean")
    gain = run.gain("accuracy/mean")
    seen = f"mean length {recent:.0f} tokens after {before:.0f}, accuracy {_points(gain)}"
    return seen if recent >= 1.5 * before and gain <= STANDSTILL else None


@_rule("The length penalty (eq. 13) of all-wrong groups rewards giving up.", "algorithm.dynamic_sampling.filter")
def length_collapse(run: HealthMonitor) -> str | None:
    """Responses shrink and accuracy falls: the length penalty is optimised instead of the answer."""
    early, recent = run.early("response_length/mean"), run.recent("response_length/mean")
    was, now = run.early("accuracy/mean"), run.recent("accuracy/mean")
    falls = len(run.lines) >= 2 * WINDOW and now <= was - STANDSTILL
    seen = f"mean length {recent:.0f} tokens after {early:.0f} at the start, accuracy {now:.1%} after {was:.1%}"
    return seen if falls and recent <= 0.5 * early else None


@_rule("They are wrong, sound or not: noise (section 3.4).", "rollout.max_new_tokens or algorithm.overlong.filter")
def truncation(run: HealthMonitor) -> str | None:
    share = run.recent("truncated_fraction")
    return f"{share:.0%} of the responses are cut off" if share >= 0.2 else None


@_rule("They count as wrong, sound or not: reward noise.", "reward.timeout_s or reward.memory_mb")
def verdict_errors(run: HealthMonitor) -> str | None:
    """A tenth of the newest step's responses is not waited for until a window is whole."""
    now, recent = run.now("verdict_error_fraction"), run.recent("verdict_error_fraction")
    share = now if now >= 0.1 else recent
    seen = f"{share:.1%} of the responses have no verdict; `error` in samples.jsonl says why"
    return seen if share >= 0.02 else None


@_rule("The length penalty is learnt instead of the task (eq. 13 outweighs eq. 7).", "algorithm.overlong.factor")
def reward_without_accuracy(run: HealthMonitor) -> str | None:
    reward, accuracy = run.gain("reward_shaped/mean"), run.gain("accuracy/mean")
    seen = f"shaped reward {reward:+.2f} while accuracy {_points(accuracy)}"
    return seen if reward >= 0.05 and accuracy <= -STANDSTILL else None


@_rule("Training reward says little about held-out accuracy (section 4.3).", "data.path or run.rollout_steps")
def overfitting(run: HealthMonitor) -> str | None:
    """Held-out accuracy falls from its best while training accuracy has risen since."""
    best = max((line for line in run.lines if line.get(HELD_OUT) is not None), key=itemgetter(HELD_OUT), default={})
    heldout, training = (run.now(name) - _mean([best], name) for name in (HELD_OUT, "accuracy/mean"))
    if heldout <= -0.05 and training > 0:
        since = f"since rollout step {best['rollout_step']}"
        return f"{since} held-out accuracy {_points(heldout)}, training accuracy {_points(training)}"
    return None


@_rule("They are generated and teach nothing (section 3.2, figure 3b: up to 60% in the paper).", "data.path")
def all_correct(run: HealthMonitor) -> str | None:
    right, *others = (run.recent(f"sampling/{name}") for name in ("all_correct", "kept", "all_wrong"))
    share = right / (right + sum(others)) if right > 0 else 0.0
    above = share >= 0.6 and not run.recent("accuracy/mean") >= SOLVED
    return f"{share:.0%} of the groups are all right and filtered" if above else None


@_rule("Groups without spread have advantage 0 (eq. 9, section 3.2).", "algorithm.dynamic_sampling.filter or data.path")
def no_signal(run: HealthMonitor) -> str | None:
    norm, rate = run.now("grad_norm"), run.recent("sampling/pass_rate")
    if norm < 1e-8:
        return f"the gradient norm is {norm:.2g}"
    return f"only {rate:.1%} of the groups have both right and wrong answers" if rate < 0.1 else None


@_rule(
    "A few groups get a full optimizer step (Algorithm 1 goes on sampling).",
    "algorithm.dynamic_sampling.on_limit or algorithm.dynamic_sampling.filter",
)
def small_batch(run: HealthMonitor) -> str | None:
    share, least = run.now("sampling/batch_share"), SMALL_BATCH.get(run.filter, 1.0)
    return f"only {share:.0%} of the wanted groups were trained on" if share < least else None


@_rule("They are not trained any more, and the others must do their work.", "actor.optimizer.lr")
def dead_experts(run: HealthMonitor) -> str | None:
    share = run.recent("experts/dead")
    return f"{share:.1%} of the experts get no token in a step" if share >= 0.01 else None


@_rule("The routers collapse: few experts get most tokens, and their GPUs the work.", "actor.optimizer.lr")
def expert_imbalance(run: HealthMonitor) -> str | None:
    early, recent = run.early("experts/imbalance"), run.recent("experts/imbalance")
    seen = f"a layer's busiest expert has {recent:.2g} times the mean's tokens after {early:.2g} at the start"
    return seen if recent >= 1.5 * early else None


def _points(change: float) -> str:
    """A difference of shares, in percentage points."""
    return f"{100 * change:+.1f} points"


def _mean(lines: list[Line], name: str) -> float:
    values = [line[name] for line in lines if line.get(name) is not None]
    return sum(values) / len(values) if values else math.nan
