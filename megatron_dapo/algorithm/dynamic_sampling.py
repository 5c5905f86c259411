"""Dynamic sampling (section 3.2, constraint of eq. 11): train only on groups that are neither all right nor all wrong.

    0 < |{o_i : o_i is equivalent to the answer}| < G

Such groups have no spread in accuracy, so eq. 9 gives them no gradient (or, with shaped rewards, one that teaches
nothing but length). More prompts are sampled until N groups are kept; how many more is estimated from the share of
groups that passed so far. Decisions only: who sends and who waits is the coordinator's.

Example: 8 groups are missing, 4 in flight, half of the groups pass. The 4 are expected to give 2, so 6 must come from
new prompts: 12 are dispatched.
"""

import math
from dataclasses import dataclass, replace

PRIOR_GROUPS = 4.0
"""Groups that the pass rate's starting value counts as."""


def keep_group(correct: int, group_size: int) -> bool:
    """Eq. 11's constraint, on the number of *correct* responses (never on rewards)."""
    return 0 < correct < group_size


def prompts_to_dispatch(missing: int, in_flight: int, pass_rate: float, margin: float = 0.0) -> int:
    """How many more prompts to send, so that `missing` groups may be expected to be kept.

    Of n prompts n p are kept on average, with a standard deviation of sqrt(n p (1 - p)). The smallest n with

        n p - margin x sqrt(n p (1 - p)) >= missing

    is to be in flight. Without margin that is ceil(missing / p): too few in every second case. Never negative; 0 if
    nothing is missing. At least one prompt is under way as long as something is missing. The caller applies its own
    ceiling (`max_oversampling`).

    Args:
        missing: groups still wanted, beyond those kept.
        in_flight: groups dispatched and not yet judged.
        pass_rate: p, the expected share of groups that are kept, in (0, 1].
        margin: standard deviations; 1 is enough in 84% of the cases, 2 in 98%.
    """
    if missing <= 0:
        return 0
    spread = margin * math.sqrt(pass_rate * (1 - pass_rate))
    root = (spread + math.sqrt(spread * spread + 4 * pass_rate * missing)) / (2 * pass_rate)
    # A hair below: 9 / 0.009 is 1000.0000000000001 in floating point and must not become 1001.
    return max(0, math.ceil(root * root - 1e-9 * max(1.0, missing / pass_rate)) - in_flight)


@dataclass(frozen=True, kw_only=True, slots=True)
class PassRate:
    """Estimate of the share of groups that are kept: the mean of a Beta posterior with exponential forgetting.

    The pass rate drifts as the policy improves, so old groups count less: each judged group multiplies the weight of
    all earlier ones by 1 - 1 / memory. The prior never fades altogether, so the estimate stays inside (0, 1).

    Example: PassRate.start(0.5) has 2 pseudo-groups kept and 2 not. After 6 kept of 6: (2 + 6) / (4 + 6) = 0.8 (without
    forgetting).
    """

    prior_kept: float
    prior_filtered: float
    memory: float
    kept: float = 0.0
    filtered: float = 0.0

    @classmethod
    def start(cls, initial: float, *, memory: float = 2048.0) -> "PassRate":
        """An estimate that begins at `initial` and gives it the weight of `PRIOR_GROUPS`.

        Args:
            initial: in (0, 1]; 1 is taken as a share that no group of the prior failed.
            memory: groups after which an observation has faded to 1/e; > 1.
        """
        return cls(prior_kept=initial * PRIOR_GROUPS, prior_filtered=(1 - initial) * PRIOR_GROUPS, memory=memory)

    @property
    def mean(self) -> float:
        """Expected share of groups that are kept, in (0, 1]."""
        kept = self.prior_kept + self.kept
        return kept / (kept + self.prior_filtered + self.filtered)

    def upper(self, caution: float) -> float:
        """An upper bound of the share, at most 1: the mean plus a number of standard deviations of the posterior.

        Prompts for this share leave no large surplus, however little was measured; the rest is sent as groups are
        judged. The number is `caution` once `memory` groups n were measured, and more before, because the bound is
        asked after every group and the worst answer counts: caution x (1 + sqrt(log(memory / n) / 2)).

        Example, memory 2048, caution 2: PassRate.start(0.5) gives 1, so N prompts are sent for the first N groups; 0.57
        after 300 kept of 600; 0.52 after 1024 of 2048.
        """
        mean, groups = self.mean, self.prior_kept + self.prior_filtered + self.kept + self.filtered
        times = caution * (1 + math.sqrt(max(0.0, math.log(self.memory / groups)) / 2))
        return min(1.0, mean + times * math.sqrt(mean * (1 - mean) / (groups + 1)))

    def prompts_to_send(self, missing: int, in_flight: int, surplus: float) -> int:
        """`prompts_to_dispatch` for the mean share, with `surplus` standard deviations as margin; below 0 for the upper
        bound at so many."""
        return prompts_to_dispatch(missing, in_flight, self.upper(max(0.0, -surplus)), max(0.0, surplus))

    def update(self, *, kept: int, filtered: int) -> "PassRate":
        """The estimate after `kept` + `filtered` more groups, which count alike: their order does not matter."""
        fade = (1 - 1 / self.memory) ** (kept + filtered)
        return replace(self, kept=self.kept * fade + kept, filtered=self.filtered * fade + filtered)
