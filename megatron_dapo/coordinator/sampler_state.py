"""What a checkpoint holds of dynamic sampling."""

from dataclasses import dataclass, field

from megatron_dapo.algorithm.dynamic_sampling import PassRate
from megatron_dapo.coordinator.prompt_history import Groups
from megatron_dapo.experience.groups import ScoredGroup


@dataclass(frozen=True, kw_only=True)
class SamplerState:
    """What a checkpoint holds of the sampler."""

    cursor: int
    pass_rate: PassRate
    carried: tuple[ScoredGroup, ...]
    """Finished groups of positions from cursor on, in order. Positions before `next` that are neither here nor passed
    over were in flight: a resumed run goes on from what `unfinished` has of them, and sends the others again."""
    sent_with: tuple[int, ...] = ()
    """The weight version at the dispatch of each of them. Empty in older checkpoints: then the oldest
    token's counts."""
    next: int | None = None
    """The first position neither sent nor passed over. None in older checkpoints: then the one after `carried`."""
    passed_over: tuple[int, ...] = ()
    """Positions from cursor on that were passed over."""
    history: Groups = field(default_factory=dict)
    """With `retire_at` or `pools`."""
    unfinished: tuple[ScoredGroup, ...] = ()
    """What was drawn of groups in flight, in order: not judged, with the weight version at their dispatch."""
