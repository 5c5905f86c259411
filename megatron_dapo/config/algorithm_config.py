"""Section `algorithm`: DAPO (arXiv 2503.14476). The defaults are the paper's."""

from typing import Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from megatron_dapo.config.base import (
    STRICT,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class AdvantageConfig:
    epsilon: NonNegativeFloat = 1e-6
    """Added to the group's standard deviation in eq. 9; the paper states none."""

    ddof: Literal[0, 1] = 1
    """1: sample standard deviation (divide by G - 1). 0: population. The paper states neither."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ClipConfig:
    low: Fraction = 0.2
    """Lower clip range of eq. 8: the ratio is clipped at 1 - low."""

    high: PositiveFloat = 0.28
    """Upper clip range of eq. 8 (clip-higher, section 3.1): the ratio is clipped at 1 + high."""

    dual: PositiveFloat | None = None
    """Dual clip: with a negative advantage the loss of a token is at most `dual` x |advantage|. Must exceed 1 +
    high."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class OverlongConfig:
    shape: Literal["none", "soft", "linear"] = "soft"
    """`soft`: eq. 13, over the last `buffer` tokens before `rollout.max_new_tokens`. `linear`: -factor x max(0, |y|
    - L) / L."""

    buffer: PositiveInt = 4096
    """`soft`: tokens over which the penalty grows from 0 to -1. `linear`: L is `rollout.max_new_tokens` - buffer."""

    factor: PositiveFloat = 1.0
    """Scale of the penalty; the paper's eq. 13 has 1."""

    filter: bool = False
    """Overlong filtering (section 3.4): truncated responses carry no loss."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class KLConfig:
    coefficient: NonNegativeFloat = 0.0
    """Weight of the KL penalty to the reference (the starting weights). DAPO has none (section 2.3)."""

    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of KL from samples: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d, with d = log pi - log ref."""

    aggregation: Literal["token", "sequence"] = "token"
    """`token`: the estimator of each token's ratio, averaged with the loss's weights. `sequence`: of the whole
    response's."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ImportanceConfig:
    mode: Literal["none", "truncated", "masked"] = "none"
    """Correction of the engine's and the trainer's different log-probs, weight w = exp(old - rollout):
    `truncated` multiplies the loss by min(w, upper); `masked` drops what lies outside [lower, upper]."""

    level: Literal["token", "sequence"] = "token"
    """Whether w is a token's or a whole response's (product over its tokens)."""

    upper: PositiveFloat = 2.0
    """Upper bound of w."""

    lower: NonNegativeFloat = 0.5
    """Lower bound of w, read by `masked` only."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DynamicSamplingConfig:
    enabled: bool = True
    """Keep a group only if 0 < correct < group_size (eq. 11) and sample until the batch is full."""

    max_oversampling: float = Field(default=10.0, ge=1.0)
    """At most this many times `prompts_per_step` prompts are decided for one batch."""

    on_limit: Literal["train", "stop"] = "train"
    """At the limit: train the smaller batch, correctly normalised, and say so; or stop the run."""

    initial_pass_rate: Fraction = 0.5
    """Share of groups expected to be kept before any was measured."""

    margin: NonNegativeFloat = 2.0
    """Extra prompts sent at the beginning of a batch, in standard deviations of the number of kept groups. 0: every
    second batch needs a second round; 2: one in fifty. The surplus is carried over; with `max_staleness: 0` it is
    generated again, so 1 or 0 is better. Not used with `ahead` in async mode."""

    max_staleness: NonNegativeInt = 1
    """Largest age in weight versions of any trained token. Older groups are generated again."""

    ahead: PositiveFloat = 1.0
    """With `run.mode: async`: batches that the servers generate ahead. Below `max_staleness` fewer groups expire."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class AlgorithmConfig:
    """Section `algorithm`: DAPO (arXiv 2503.14476). The defaults are the paper's."""

    prompts_per_step: PositiveInt = 512
    """N: groups that one rollout step trains on."""

    group_size: int = Field(default=16, ge=2)
    """G: responses a prompt."""

    mini_batch_responses: PositiveInt = 512
    """Responses an optimizer step; a multiple of `group_size`, so that a group is never split."""

    aggregation: Literal["token_mean", "prompt_token_mean", "sequence_mean", "sequence_sum_constant", "verl_legacy"] = (
        "token_mean"
    )
    """How token losses are averaged. `token_mean`: over all tokens of the mini-batch (DAPO). `prompt_token_mean`: per
    prompt, then over prompts (the literal eq. 8). `sequence_mean`: per response, then over responses (GRPO).
    `sequence_sum_constant`: sum over a constant length, `rollout.max_new_tokens` (Dr. GRPO). `verl_legacy`: mean of
    micro-batch means, for comparison only."""

    entropy_coefficient: NonNegativeFloat = 0.0
    """Weight of an entropy bonus; 0 in DAPO."""

    advantage: AdvantageConfig = AdvantageConfig()
    clip: ClipConfig = ClipConfig()
    overlong: OverlongConfig = OverlongConfig()
    kl: KLConfig = KLConfig()
    importance: ImportanceConfig = ImportanceConfig()
    dynamic_sampling: DynamicSamplingConfig = DynamicSamplingConfig()

    @property
    def mini_batches_per_step(self) -> int:
        """Optimizer steps of one full rollout step."""
        return -(-self.prompts_per_step * self.group_size // self.mini_batch_responses)
