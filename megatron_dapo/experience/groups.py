"""What the coordinator's own parts tell each other."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megatron_dapo.algorithm.dynamic_sampling import PassRate
from reward.verdict import Rule, Verdict
from rollout.generation import FinishReason, Generation


@dataclass(frozen=True, slots=True)
class EarlierTurn:
    """A turn before the newest one, and what the environment said to it."""

    response: str
    observation: str
    role: str
    """Of the observation: `user`, `tool`."""
    reward: float = 0.0
    error: str | None = None
    """Why the environment said nothing; the observation is then this as `error: ...`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredResponse:
    """One response or episode, judged. Wrong and half way into the soft overlong buffer:
    ScoredResponse(..., accuracy=False, reward_raw=-1.0, reward_shaped=-1.5)."""

    generation: Generation
    text: str
    """Of the newest turn."""
    verdict: Verdict
    accuracy: bool
    """The only thing dynamic sampling may read (law 2)."""
    reward_raw: float
    """Eq. 7: +1.0 or -1.0; of a weighted sum of rewards the sum."""
    reward_shaped: float
    """reward_raw plus the length penalty (eq. 13): what eq. 9 reads."""
    other_accuracy: bool | None = None
    """For mathematics, what the other rule says: `exact` of what `robust` judged, or the reverse. Only watched."""

    by_environment: bool = False
    """Whether the verdict is the environment's, not the verifier's."""
    earlier: tuple[EarlierTurn, ...] = ()
    """Turns before the newest one, in order; each has a run of `generation.given` behind it."""
    state: Any = None
    """The environment's, of an episode that goes on."""

    @property
    def said(self) -> str:
        """All that the model said."""
        return "\n".join([*(turn.response for turn in self.earlier), self.text]) if self.earlier else self.text

    @property
    def rules_disagree(self) -> bool:
        """Whether `exact` and `robust` were both asked and differ."""
        return self.other_accuracy is not None and self.other_accuracy is not self.accuracy

    @property
    def truncated(self) -> bool:
        """Whether the server cut the response off at its limit."""
        return self.generation.finish_reason is FinishReason.LENGTH

    @property
    def interrupted(self) -> bool:
        """Whether its thinking was ended by `rollout.thinking_budget`."""
        return len(self.generation.given) > len(self.earlier)


def unjudged(generation: Generation, earlier: Sequence[EarlierTurn] = (), state: Any = None) -> ScoredResponse:
    """A response of a group that is not finished, as a checkpoint holds it."""
    verdict = Verdict(accuracy=False, extracted=None, rule=Rule.UNJUDGED, seconds=0.0, error="unfinished")
    nothing: dict[str, Any] = {"text": "", "accuracy": False, "reward_raw": 0.0, "reward_shaped": 0.0}
    return ScoredResponse(generation=generation, verdict=verdict, earlier=tuple(earlier), state=state, **nothing)


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredGroup:
    """All G responses of one prompt."""

    position: int
    """Place in the endless shuffled order; the ledger's `prompt`."""
    prompt_index: int
    """Row of the prompt set."""
    prompt_ids: np.ndarray
    """int32 [P]"""
    weight_version: int
    """Oldest version that wrote a token of it."""
    responses: tuple[ScoredResponse, ...]

    @property
    def correct(self) -> int:
        return sum(response.accuracy for response in self.responses)

    @property
    def tokens(self) -> int:
        """Response tokens of the whole group."""
        return sum(response.generation.drawn for response in self.responses)


@dataclass(frozen=True, kw_only=True, slots=True)
class Admission:
    """One filled batch: what is trained on, what was filtered, what waits for the next step."""

    kept: tuple[ScoredGroup, ...]
    """In prompt order; fewer than N only when the over-sampling limit was reached."""
    filtered: tuple[ScoredGroup, ...]
    carried: int
    """Finished groups past the end of the batch, first in line for the next one."""
    carried_tokens: int
    """Response tokens of those groups."""
    in_flight: int
    """Groups past the end of the batch that are still being written, or were interrupted."""
    expired: int
    """Groups that had become too old when this step began and were generated again."""
    expired_tokens: int
    """Response tokens of those of them that were finished."""
    discarded: int
    """Groups past the end of the batch that were given up when it was full, since they would be too old for the next
    one (`max_staleness` 0); they are generated again."""
    discarded_tokens: int
    """Response tokens of those of them that were finished."""
    passed_over: tuple[float, ...]
    """Pass rates of the prompts whose turn was passed over: retired, or of a pool."""
    generated: tuple[ScoredGroup, ...]
    """Groups that were finished since the batch before was full, in prompt order, whatever became of them."""
    predicted_groups: int
    """Prompts that this batch was expected to need when it was begun."""
    limit_reached: bool
    resumed_tokens: int = 0
    """Tokens of `generated` that were drawn before a resume."""

    @property
    def judged(self) -> tuple[ScoredGroup, ...]:
        """What stands for the policy's responses in this step, in prompt order: all that was finished. Where groups
        were given up, all that was decided: of the former the short ones were finished, and the long ones not."""
        decided = sorted((*self.kept, *self.filtered), key=lambda group: group.position)
        return tuple(decided) if self.discarded else self.generated or self.kept


PromptRates = Mapping[int, tuple[int, tuple[float, ...]]]
"""Prompt -> the step of its last group, and the shares of right responses of its last ones."""


@dataclass(frozen=True, kw_only=True)
class SamplerState:
    """What a checkpoint holds of the sampler."""

    cursor: int
    pass_rate: PassRate
    carried: tuple[ScoredGroup, ...]
    """Finished groups of positions from cursor on, in order. Positions before `next` that are neither here nor passed
    over were in flight: a resumed run goes on from what `unfinished` has of them, and sends the others again."""
    sent_with: tuple[int, ...] = ()
    """The weight version at the dispatch of each of them."""
    next: int = 0
    """The first position neither sent nor passed over."""
    passed_over: tuple[int, ...] = ()
    """Positions from cursor on that were passed over."""
    history: PromptRates = field(default_factory=dict)
    """With `retire_at` or `pools`."""
    unfinished: tuple[ScoredGroup, ...] = ()
    """What was drawn of groups in flight, in order: not judged, with the weight version at their dispatch."""
    drawn: tuple[tuple[ScoredGroup, int], ...] = ()
    """Of a rollout that was ended in its middle: groups finished in it, each with the weight version at its dispatch.
    They are not drawn again when their positions are sent."""
