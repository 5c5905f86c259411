"""Section `algorithm`: DAPO (arXiv 2503.14476). The defaults are the paper's."""

from dataclasses import field
from functools import partial
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

from megatron_dapo.algorithm.losses import LOSSES
from megatron_dapo.config.base import STRICT, Fraction
from reward.registry import check_name

ESTIMATORS = ("group_std", "no_std", "rloo", "mini_batch_std", "batch_std", "reinforce_pp_baseline")
"""Advantages of megatron_dapo/algorithm/advantage.py. No torch here."""

Aggregation = Literal["token_mean", "prompt_token_mean", "sequence_mean", "sequence_sum_constant", "verl_legacy"]


def _known_loss(name: str) -> str:
    if name.lower() in ("ppo", "grpo", "dapo"):
        raise ValueError("its loss is `clipped`; `preset: grpo` and `preset: paper` set what else belongs to it")
    return check_name(name, LOSSES)


def automatic_mode(policy_loss: str, max_staleness: int) -> Literal["none", "truncated"]:
    """What `importance.mode: auto` stands for."""
    entry = LOSSES.get(policy_loss)
    return "truncated" if max_staleness and not (entry and entry.needs_rollout_log_probs) else "none"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class AdvantageConfig:
    estimator: Annotated[str, AfterValidator(partial(check_name, table=ESTIMATORS))] = "group_std"
    """`group_std`: divided by the group's standard deviation (eq. 9). `no_std`:
    not divided (Dr. GRPO). `rloo`: against the mean of the others. `mini_batch_std` (Magistral), `batch_std` (ScaleRL):
    divided by that of the mini-batch, of the rollout step. `reinforce_pp_baseline`: standardized over the step's
    tokens (REINFORCE++). `module:name`: your own (docs/extending.md)."""

    epsilon: NonNegativeFloat = 1e-6
    """Added to the standard deviation."""

    ddof: Literal[0, 1] = 1
    """1: sample standard deviation (divide by G - 1). 0: population."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ClipConfig:
    low: Fraction = 0.2
    """Lower clip range of eq. 8: the ratio is clipped at 1 - low."""

    high: PositiveFloat = 0.28
    """Upper clip range of eq. 8 (clip-higher, section 3.1): the ratio is clipped at 1 + high."""

    dual: PositiveFloat | None = None
    """Dual clip: with a negative advantage the loss of a token is at most `dual` x |advantage|."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class OverlongConfig:
    shape: Literal["none", "soft", "linear"] = "soft"
    """`soft`: eq. 13, over the last `buffer` tokens before `rollout.max_new_tokens`. `linear`: -factor x max(0, |y|
    - L) / L."""

    buffer: PositiveInt = 4096
    """`soft`: tokens over which the penalty grows from 0 to -1. `linear`: L is `rollout.max_new_tokens` - buffer."""

    factor: PositiveFloat = 1.0
    """Scale of the penalty; 1 in eq. 13."""

    filter: bool = False
    """Overlong filtering (section 3.4): truncated responses carry no loss."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class KLConfig:
    coefficient: NonNegativeFloat = 0.0
    """Weight of the KL penalty to the reference. DAPO has none (section 2.3)."""

    reset_every: PositiveInt | None = None
    """Rollout steps after which the current weights become the reference (ProRL, arXiv 2505.24864). None: never."""

    reset_optimizer: bool = True
    """With `reset_every`: AdamW's moments start from zero too; the learning rate goes on."""

    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of KL from samples: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d, with d = log pi - log ref."""

    aggregation: Literal["token", "sequence", "response_mean", "response_sum"] = "token"
    """`token`: the estimator of each token's ratio, averaged as the loss. `sequence`: of the whole response's.
    `response_mean`: each token's, averaged over the response, then over responses (GRPO as it is written).
    `response_sum`: added up over the response, then averaged over responses."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class EntropyControlConfig:
    target: PositiveFloat | None = None
    """Entropy to hold, in nats (Skywork-OR1, arXiv 2505.22312: 0.2): a step above it gets no bonus. The weight starts
    at `entropy_coefficient`. None: and stays there."""

    change: PositiveFloat = 1e-4
    """A step below the target raises the weight by this, another lowers it."""

    maximum: PositiveFloat = 5e-3
    """Upper bound of the weight."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ImportanceConfig:
    mode: Literal["auto", "none", "truncated", "masked"] = "auto"
    """Correction for the engine's other log-probs, weight w = exp(old - rollout): `truncated` multiplies the loss by
    min(w, upper); `masked` drops what lies outside [lower, upper]. `auto`: `truncated` with
    `dynamic_sampling.max_staleness` > 0, unless the loss corrects by itself (`reinforce`); else `none`."""

    level: Literal["token", "sequence"] = "token"
    """w of a token, or of a response (product over its tokens; suits `gspo`, `gmpo`)."""

    upper: PositiveFloat = 2.0
    """Upper bound of w."""

    lower: NonNegativeFloat = 0.5
    """Lower bound of w, read by `masked` only."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class PoolConfig:
    at_least: Annotated[float, Field(ge=0, le=1)]
    """Pass rate from which a prompt is in this pool, up to the next one's."""

    share: Annotated[float, Field(ge=0, le=1)]
    """Share of its turns at which it is sent."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DynamicSamplingConfig:
    filter: Literal["refill", "drop", "off"] = "refill"
    """`refill`: keep a group only if 0 < correct < group_size (eq. 11) and sample until the batch is full. `drop`:
    leave the other groups out and train on fewer (ScaleRL). `off`: train on all."""

    max_oversampling: float = Field(default=10.0, ge=1.0)
    """Prompts decided for one batch, at most, in multiples of `prompts_per_step`."""

    on_limit: Literal["train", "stop"] = "stop"
    """At the limit: stop, or train the smaller batch and raise an alarm."""

    initial_pass_rate: Fraction = 0.5
    """Share of groups expected to be kept before any was measured."""

    surplus: float = -2.0
    """Prompts sent at a time, in standard deviations from the mean need. -2: for an upper bound of the kept share. 0:
    every second batch needs a second round. 2: one in fifty, for runs that carry. Not used in async mode."""

    max_staleness: NonNegativeInt = 0
    """Largest age in weight versions of any trained token; older groups are generated again. 0: eq. 8 as it is written.
    1: a step's surplus is carried over, with `importance.mode`'s correction."""

    retire_at: Fraction | None = None
    """Pass rate over a prompt's last `retire_groups` groups from which it is not sent again (ScaleRL: 0.9). None: every
    prompt stays."""

    retire_groups: PositiveInt = 1
    """Groups of a prompt that its pass rate is over."""

    retire_for: PositiveInt | None = None
    """Rollout steps after which a retired prompt is sent again. None: never."""

    pools: Annotated[tuple[PoolConfig, ...], Field(strict=False)] = ()
    """Difficulty pools by pass rate over the last `retire_groups` groups (compare prioritized sampling, Kimi k1.5).
    Prompts of none are sent at every turn."""

    ahead: PositiveFloat = 1.0
    """With `run.mode: async`: batches that the servers generate ahead. Below `max_staleness` fewer groups expire."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class AlgorithmConfig:
    """Section `algorithm`: DAPO (arXiv 2503.14476). The defaults are the paper's."""

    policy_loss: Annotated[str, AfterValidator(_known_loss)] = "clipped"
    """`clipped`: eq. 8. `cispo`, `gspo`, `gmpo`, `sapo`, `reinforce` (truncated importance against the engine).
    `module:name`: your own (docs/extending.md). `sapo` reads `loss_options`, `reinforce` `importance.upper`, the others
    `clip`."""

    loss_options: dict[str, float] = field(default_factory=dict)
    """Arguments of `policy_loss` by name: `positive` and `negative` of `sapo`, all of your own."""

    prompts_per_step: PositiveInt = 512
    """N: groups that one rollout step trains on."""

    group_size: int = Field(default=16, ge=2)
    """G: responses a prompt."""

    mini_batch_responses: PositiveInt = 512
    """Responses an optimizer step; a multiple of `group_size`."""

    aggregation: Aggregation = "token_mean"
    """How token losses are averaged. `token_mean`: over all tokens of the mini-batch (DAPO). `prompt_token_mean`: per
    prompt, then over prompts (literal eq. 8). `sequence_mean`: per response, then over responses (GRPO).
    `sequence_sum_constant`: sum over a constant length, `rollout.max_new_tokens` (Dr. GRPO). `verl_legacy`: means of
    micro-batches, weighted by their responses, as the reproduction on verl ran."""

    entropy_coefficient: NonNegativeFloat = 0.0
    """Weight of an entropy bonus; 0 in DAPO."""

    turn_rewards: bool = False
    """Add an environment's rewards of single turns to the episode's."""

    advantage: AdvantageConfig = AdvantageConfig()
    clip: ClipConfig = ClipConfig()
    overlong: OverlongConfig = OverlongConfig()
    kl: KLConfig = KLConfig()
    entropy_control: EntropyControlConfig = EntropyControlConfig()
    importance: ImportanceConfig = ImportanceConfig()
    dynamic_sampling: DynamicSamplingConfig = DynamicSamplingConfig()

    @property
    def importance_mode(self) -> Literal["none", "truncated", "masked"]:
        """`importance.mode`, with what `auto` stands for."""
        mode = self.importance.mode
        return automatic_mode(self.policy_loss, self.dynamic_sampling.max_staleness) if mode == "auto" else mode

    @property
    def mini_batches_per_step(self) -> int:
        """Optimizer steps of one full rollout step."""
        return -(-self.prompts_per_step * self.group_size // self.mini_batch_responses)
