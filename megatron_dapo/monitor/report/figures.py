"""Which curves a report shows, in which order, and what the paper plots of them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_dapo.monitor.catalog import check_declared
from megatron_dapo.monitor.report.chart import Unit

Value = Callable[[Mapping[str, Any]], float | None]
"""A line of metrics.jsonl -> what is drawn at its step; None where it was not measured."""

GROUPS_DECIDED = ("sampling/kept", "sampling/all_wrong", "sampling/all_correct")
PHASES = ("rollout", "reward", "logprob", "update", "weight_sync", "evaluation", "checkpoint", "handover")


@dataclass(frozen=True, kw_only=True)
class Series:
    label: str
    value: Value
    colour: int | None = None
    """Series colour of the page where the place in the chart does not say it."""


@dataclass(frozen=True, kw_only=True)
class Chart:
    """One chart: a title, one or more series, and what to know in order to read it."""

    key: str
    title: str
    unit: Unit
    series: tuple[Series, ...]
    note: str
    figure: str = ""
    """Where the paper plots it."""
    band: tuple[float, float] | None = None
    """What the paper's figure spans for Qwen2.5-32B."""
    to_one: bool = False
    from_zero: bool = True
    stack: bool = False


@dataclass(frozen=True, kw_only=True)
class Section:
    key: str
    title: str
    lead: str
    charts: tuple[Chart, ...]


def _metric(name: str, label: str) -> Series:
    check_declared([name])
    return Series(label=label, value=lambda line: line.get(name))


def _share_of_decided(name: str, label: str, colour: int | None = None) -> Series:
    check_declared([name])

    def share(line: Mapping[str, Any]) -> float | None:
        decided = sum(line.get(count) or 0 for count in GROUPS_DECIDED)
        return (line.get(name) or 0) / decided if decided else None

    return Series(label=label, value=share, colour=colour)


TRAINING = Section(
    key="training",
    title="Training curves",
    lead="Length, reward, entropy and mean probability are what the paper monitors (figure 7). Training accuracy is "
    "measured on every response that was generated, before any filter.",
    charts=(
        Chart(
            key="length",
            title="Response length",
            unit=Unit.COUNT,
            series=(_metric("response_length/mean", "mean"), _metric("response_length/p95", "95th percentile")),
            note="Tokens.",
            figure="7a",
            band=(1000, 4000),
        ),
        Chart(
            key="reward",
            title="Reward",
            unit=Unit.NUMBER,
            series=(_metric("reward/mean", "right or wrong"), _metric("reward_shaped/mean", "with length penalty")),
            note="+1 right, -1 wrong (eq. 7); the penalty is eq. 13.",
            figure="7b",
            from_zero=False,
        ),
        Chart(
            key="entropy",
            title="Entropy",
            unit=Unit.NUMBER,
            series=(_metric("entropy", "nats a token"),),
            note="Nats a token. A collapse ends exploration.",
            figure="7c",
            band=(0.30, 0.70),
        ),
        Chart(
            key="probability",
            title="Mean probability",
            unit=Unit.NUMBER,
            series=(_metric("mean_prob", "of generated tokens"),),
            note="Of the generated tokens.",
            figure="7d",
            band=(0.74, 0.86),
            from_zero=False,
        ),
        Chart(
            key="accuracy",
            title="Training accuracy",
            unit=Unit.SHARE,
            series=(_metric("accuracy/mean", "right answers"),),
            note="Right answers among all responses generated.",
            to_one=True,
        ),
        Chart(
            key="truncated",
            title="Cut off at the limit",
            unit=Unit.SHARE,
            series=(_metric("truncated_fraction", "responses"),),
            note="Responses that met rollout.max_new_tokens.",
        ),
    ),
)

SAMPLING = Section(
    key="sampling",
    title="Dynamic sampling",
    lead="Only groups with both right and wrong answers have a gradient (eq. 11); the others are filtered and more "
    "prompts are drawn.",
    charts=(
        Chart(
            key="groups",
            title="Groups decided",
            unit=Unit.SHARE,
            series=(
                _share_of_decided("sampling/kept", "kept"),
                _share_of_decided("sampling/all_wrong", "all wrong"),
                _share_of_decided("sampling/all_correct", "all right"),
            ),
            note="Shares of the groups decided in each step.",
            to_one=True,
            stack=True,
        ),
        Chart(
            key="filtered",
            title="Filtered groups",
            unit=Unit.SHARE,
            series=(
                _share_of_decided("sampling/all_correct", "all right", colour=2),
                _share_of_decided("sampling/all_wrong", "all wrong", colour=1),
            ),
            note="Prompts that became too easy, or are still too hard.",
            figure="3b",
            band=(0.0, 0.60),
        ),
        Chart(
            key="oversampling",
            title="Over-sampling",
            unit=Unit.NUMBER,
            series=(
                _metric("sampling/oversampling_actual", "needed"),
                _metric("sampling/oversampling_predicted", "first dispatched"),
            ),
            note="Groups for each group wanted.",
        ),
        Chart(
            key="carried",
            title="Carried over",
            unit=Unit.COUNT,
            series=(_metric("sampling/carried", "waiting"), _metric("sampling/expired", "too old, generated again")),
            note="Finished groups past the end of the batch.",
        ),
    ),
)

CLIP = Section(
    key="clip",
    title="Clip asymmetry",
    lead="Clip-higher (section 3.1) leaves unlikely tokens room to grow. If the clip holds back exploration, the "
    "tokens clipped from above are the unlikely ones.",
    charts=(
        Chart(
            key="clipped",
            title="Clipped tokens",
            unit=Unit.SHARE,
            series=(
                _metric("clip_fraction/low", "from below"),
                _metric("clip_fraction/high", "from above"),
                _metric("clip_fraction/dual", "dual"),
            ),
            note="Share of the tokens that carry loss.",
        ),
        Chart(
            key="clip_prob",
            title="Tokens clipped from above",
            unit=Unit.NUMBER,
            series=(_metric("clip_high_prob", "clipped from above"), _metric("mean_prob", "all tokens")),
            note="Their probability before the update; low is the paper's point.",
            figure="3a",
            to_one=True,
        ),
    ),
)

UPDATE = Section(
    key="update",
    title="Updates and agreement",
    lead="How large the steps are, and whether server and trainer still hold the same model.",
    charts=(
        Chart(
            key="gradient",
            title="Gradient norm",
            unit=Unit.NUMBER,
            series=(_metric("grad_norm", "before clipping"),),
            note="Mean over the optimizer steps, before clipping.",
        ),
        Chart(
            key="kl",
            title="KL divergence",
            unit=Unit.NUMBER,
            series=(_metric("kl/old", "old to new policy"), _metric("kl/reference", "to the start")),
            note="Nats a token, k3 estimator.",
        ),
        Chart(
            key="mismatch",
            title="Server against trainer",
            unit=Unit.NUMBER,
            series=(_metric("mismatch/mean_abs", "mean"), _metric("mismatch/max_abs", "largest")),
            note="|log-prob difference| of the same token, nats.",
        ),
        Chart(
            key="stale",
            title="Stale tokens",
            unit=Unit.SHARE,
            series=(_metric("staleness/share", "of the batch"),),
            note="Trained tokens that older weights wrote.",
        ),
    ),
)

BIAS = Section(
    key="bias",
    title="Bias ledger",
    lead="What is trained on against what was generated. Groups are admitted in prompt order, so a lasting gap in "
    "length comes from the filter alone, not from which response was finished first.",
    charts=(
        Chart(
            key="bias_length",
            title="Length",
            unit=Unit.COUNT,
            series=(_metric("bias/accepted_length", "trained on"), _metric("bias/generated_length", "generated")),
            note="Mean tokens a response.",
        ),
        Chart(
            key="bias_accuracy",
            title="Accuracy",
            unit=Unit.SHARE,
            series=(_metric("bias/accepted_accuracy", "trained on"), _metric("bias/generated_accuracy", "generated")),
            note="The filter draws the batch towards one half.",
            to_one=True,
        ),
    ),
)

WORDING = Section(
    key="wording",
    title="Reflection and backtracking",
    lead="Responses that look back (“wait”, “let me verify”) or turn back (“start over”); section 4.3 reports that "
    "they appear in training. The correlation says whether, within a rollout step, such responses are right "
    "more often.",
    charts=(
        Chart(
            key="wording_rate",
            title="How often",
            unit=Unit.SHARE,
            series=(_metric("reflection_rate", "reflecting"), _metric("backtracking_rate", "backtracking")),
            note="Share of the responses generated.",
        ),
        Chart(
            key="wording_accuracy",
            title="How often right",
            unit=Unit.SHARE,
            series=(
                _metric("reflection_accuracy", "reflecting"),
                _metric("backtracking_accuracy", "backtracking"),
                _metric("accuracy/mean", "all responses"),
            ),
            note="Accuracy among those responses.",
            to_one=True,
        ),
    ),
)

TIME = Section(
    key="time",
    title="Time",
    lead="Seconds of the phases of each rollout step, as the coordinator waits for them.",
    charts=(
        Chart(
            key="phases",
            title="Seconds a rollout step",
            unit=Unit.SECONDS,
            series=tuple(_metric(f"timing/{phase}", phase.replace("_", " ")) for phase in PHASES),
            note="Stacked in the order of the step.",
            stack=True,
        ),
        Chart(
            key="speed",
            title="Tokens a second",
            unit=Unit.COUNT,
            series=(
                _metric("tokens_per_second/rollout", "generated"),
                _metric("tokens_per_second/train", "trained on"),
            ),
            note="The whole run, not a GPU.",
        ),
    ),
)

SECTIONS = (TRAINING, SAMPLING, CLIP, UPDATE, BIAS, WORDING, TIME)
