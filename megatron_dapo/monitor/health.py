"""Alarms of a run: what goes wrong in DAPO training, how it shows, and which config key to change first.

`HealthMonitor` is fed one line of metrics.jsonl a rollout step. "Recent" is the mean over the last `window` rollout
steps, "early" over the first; a rule is silent until the steps it compares exist. Thresholds are judgements, not laws:
an alarm says look here. Only `mismatch_stop` and `non_finite` ask for a stop.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

Line = Mapping[str, Any]


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
    entropy_growth: float = 3.0
    """Recent entropy above this many times early entropy, without a gain in accuracy."""
    repetition: float = 0.3
    """Recent share of repeated runs of tokens."""
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


class HealthMonitor:
    """The part of a run's history that the rules look at, and the alarms that hold at its newest step.

    A mean that is not known is NaN: no comparison with it holds, so a rule that needs it finds nothing.
    """

    def __init__(self, history: Iterable[Line] = (), limits: HealthLimits | None = None) -> None:
        """`history`: lines of `read_metrics`, oldest first; what holds at their end is known already."""
        self.limits, self.steps = limits or HealthLimits(), 0
        self.newest: Line = {}
        self.best: Line | None = None
        """The step of the best held-out accuracy, the first of equal ones."""
        self._early: list[Line] = []
        self._late: deque[Line] = deque(maxlen=2 * self.limits.window)
        for line in history:
            self._take(line)
        self.alarms = self._check()
        """All that hold at the newest step."""

    def add(self, line: Line) -> list[Alarm]:
        """Take the next rollout step. Returns the alarms that hold now and did not hold one step before."""
        before = {alarm.name for alarm in self.alarms}
        self._take(line)
        self.alarms = self._check()
        return [alarm for alarm in self.alarms if alarm.name not in before]

    def now(self, name: str) -> float:
        """Value at the newest step."""
        return _mean([self.newest], name)

    def early(self, name: str) -> float:
        """Mean over the first window."""
        return _mean(self._early, name)

    def recent(self, name: str) -> float:
        """Mean over the newest window, once it is whole."""
        window = self.limits.window
        return _mean(list(self._late)[-window:], name) if self.steps >= window else math.nan

    def before(self, name: str) -> float:
        """Mean over the window before the newest one, once both are whole."""
        window = self.limits.window
        return _mean(list(self._late)[:window], name) if self.steps >= 2 * window else math.nan

    def gain(self, name: str) -> float:
        """How much the newest window's mean is above that of the window before."""
        return self.recent(name) - self.before(name)

    def _take(self, line: Line) -> None:
        self.steps, self.newest = self.steps + 1, line
        self._late.append(line)
        if len(self._early) < self.limits.window:
            self._early.append(line)
        held_out = line.get("evaluation/sampled")
        if held_out is not None and (self.best is None or held_out > self.best["evaluation/sampled"]):
            self.best = line

    def _check(self) -> list[Alarm]:
        alarms: dict[str, Alarm] = {}
        for rule, look in RULES if self.steps else ():
            if message := look(self):
                alarms.setdefault(rule.name, replace(rule, message=message))
        return list(alarms.values())


def check_health(history: Iterable[Line], limits: HealthLimits | None = None) -> list[Alarm]:
    """All alarms that hold at the newest step of `history`."""
    return HealthMonitor(history, limits).alarms


Look = Callable[[HealthMonitor], str | None]
"""What is wrong at the newest step, with numbers; None where nothing is."""

RULES: list[tuple[Alarm, Look]] = []
"""Alarms without a message, and what looks for it. Of two with one name the first that finds something counts."""


def _rule(reason: str, key: str, *, name: str = "", stop: bool = False) -> Callable[[Look], Look]:
    """Make a function a rule, named as the function is unless `name` is given."""

    def register(look: Look) -> Look:
        RULES.append((Alarm(name=name or look.__name__, message="", reason=reason, key=key, stop=stop), look))
        return look

    return register


@_rule("The weights are lost from here on; resume from the last checkpoint.", "actor.optimizer.lr", stop=True)
def non_finite(run: HealthMonitor) -> str | None:
    broken = [name for name in run.newest.get("non_finite", ()) if name in ("loss", "grad_norm")]
    return f"{' and '.join(broken)} not finite at rollout step {run.newest['rollout_step']}" if broken else None


@_rule("The two no longer hold the same model, and eq. 8's ratios are wrong.", "monitor.mismatch_stop", stop=True)
def mismatch_stop(run: HealthMonitor) -> str | None:
    gap = run.now("mismatch/mean_abs")
    above = gap > max(run.limits.mismatch_warn, run.limits.mismatch_stop)
    return f"mean |engine - trainer| log-prob is {gap:.3g} nats" if above else None


@_rule("Rollouts come from another distribution than eq. 8 assumes.", "algorithm.importance.mode")
def mismatch(run: HealthMonitor) -> str | None:
    gap = run.now("mismatch/mean_abs")
    above = run.limits.mismatch_warn < gap <= run.limits.mismatch_stop
    return f"mean |engine - trainer| log-prob is {gap:.3g} nats" if above else None


@_rule("Responses of a group become alike and nothing new is tried (section 3.1, figure 2b).", "algorithm.clip.high")
def entropy_collapse(run: HealthMonitor) -> str | None:
    """Low entropy while accuracy rises is only certainty."""
    early, recent, accuracy = run.early("entropy"), run.recent("entropy"), run.recent("accuracy/mean")
    still = run.gain("accuracy/mean") <= run.limits.standstill and accuracy < run.limits.solved
    if still and recent <= run.limits.entropy_share * early:
        return f"entropy {recent:.3g} after {early:.3g} at the start, accuracy stands at {accuracy:.1%}"
    return None


@_rule("Responses drift into gibberish.", "actor.optimizer.lr")
def entropy_rise(run: HealthMonitor) -> str | None:
    early, recent = run.early("entropy"), run.recent("entropy")
    if recent >= run.limits.entropy_growth * early and run.gain("accuracy/mean") <= run.limits.standstill:
        return f"entropy {recent:.3g} after {early:.3g} at the start, accuracy {_points(run.gain('accuracy/mean'))}"
    return None


@_rule("Responses go round in circles until they are cut off (section 3.3).", "algorithm.overlong.shape")
def repetition(run: HealthMonitor) -> str | None:
    share = run.recent("repetition")
    return f"{share:.0%} of the runs of tokens are repeated" if share >= run.limits.repetition else None


@_rule("Long responses of low quality are not punished enough (section 3.3, figure 4).", "algorithm.aggregation")
def length_explosion(run: HealthMonitor) -> str | None:
    before, recent = run.before("response_length/mean"), run.recent("response_length/mean")
    gain = run.gain("accuracy/mean")
    if recent >= run.limits.length_growth * before and gain <= run.limits.standstill:
        return f"mean length {recent:.0f} tokens after {before:.0f}, accuracy {_points(gain)}"
    return None


@_rule("The length penalty (eq. 13) of all-wrong groups rewards giving up.", "algorithm.dynamic_sampling.filter")
def length_collapse(run: HealthMonitor) -> str | None:
    """Responses shrink and accuracy falls: the length penalty is optimised instead of the answer."""
    early, recent = run.early("response_length/mean"), run.recent("response_length/mean")
    was, now = run.early("accuracy/mean"), run.recent("accuracy/mean")
    falls = run.steps >= 2 * run.limits.window and now <= was - run.limits.standstill
    if falls and recent <= run.limits.length_loss * early:
        return f"mean length {recent:.0f} tokens after {early:.0f} at the start, accuracy {now:.1%} after {was:.1%}"
    return None


@_rule("They are wrong, sound or not: noise (section 3.4).", "rollout.max_new_tokens or algorithm.overlong.filter")
def truncation(run: HealthMonitor) -> str | None:
    share = run.recent("truncated_fraction")
    return f"{share:.0%} of the responses are cut off" if share >= run.limits.truncated else None


@_rule("They count as wrong, sound or not: reward noise.", "reward.timeout_s or reward.memory_mb")
def verdict_errors(run: HealthMonitor) -> str | None:
    share = run.now("verdict_error_fraction")
    if not share >= run.limits.verdict_errors_now:
        share = run.recent("verdict_error_fraction")
    if share >= run.limits.verdict_errors:
        return f"{share:.1%} of the responses have no verdict; `error` in samples.jsonl says why"
    return None


@_rule("The length penalty is learnt instead of the task (eq. 13 outweighs eq. 7).", "algorithm.overlong.factor")
def reward_without_accuracy(run: HealthMonitor) -> str | None:
    reward, accuracy = run.gain("reward_shaped/mean"), run.gain("accuracy/mean")
    if reward >= run.limits.reward_gain and accuracy <= -run.limits.standstill:
        return f"shaped reward {reward:+.2f} while accuracy {_points(accuracy)}"
    return None


@_rule("Training reward says little about held-out accuracy (section 4.3).", "data.path or run.rollout_steps")
def overfitting(run: HealthMonitor) -> str | None:
    """Held-out accuracy falls from its best while training accuracy has risen since."""
    if run.best is None:
        return None
    heldout, training = (run.now(name) - _mean([run.best], name) for name in ("evaluation/sampled", "accuracy/mean"))
    if heldout <= -run.limits.heldout_loss and training > 0:
        since = f"since rollout step {run.best['rollout_step']}"
        return f"{since} held-out accuracy {_points(heldout)}, training accuracy {_points(training)}"
    return None


@_rule("They are generated and teach nothing (section 3.2, figure 3b: up to 60% in the paper).", "data.path")
def all_correct(run: HealthMonitor) -> str | None:
    right, *others = (run.recent(f"sampling/{name}") for name in ("all_correct", "kept", "all_wrong"))
    share = right / (right + sum(others)) if right > 0 else 0.0
    if share >= run.limits.all_correct and not run.recent("accuracy/mean") >= run.limits.solved:
        return f"{share:.0%} of the groups are all right and filtered"
    return None


_NO_SPREAD = "Groups without spread have advantage 0 (eq. 9, section 3.2)."


@_rule(_NO_SPREAD, "algorithm.dynamic_sampling.filter", name="no_signal")
def no_gradient(run: HealthMonitor) -> str | None:
    norm = run.now("grad_norm")
    return f"the gradient norm is {norm:.2g}" if norm < run.limits.gradient else None


@_rule(_NO_SPREAD, "data.path", name="no_signal")
def no_useful_group(run: HealthMonitor) -> str | None:
    rate = run.recent("sampling/pass_rate")
    return f"only {rate:.1%} of the groups have both right and wrong answers" if rate < run.limits.pass_rate else None


@_rule("A few groups get a full optimizer step (Algorithm 1 goes on sampling).", "algorithm.dynamic_sampling.on_limit")
def small_batch(run: HealthMonitor) -> str | None:
    share = run.now("sampling/batch_share")
    return f"only {share:.0%} of the wanted groups were trained on" if share < 1 else None


def _points(change: float) -> str:
    """A difference of shares, in percentage points."""
    return f"{100 * change:+.1f} points"


def _mean(lines: list[Line], name: str) -> float:
    values = [line[name] for line in lines if line.get(name) is not None]
    return sum(values) / len(values) if values else math.nan
