"""Which curves a report shows, in which order, and what the paper plots of them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_dapo.monitor.catalog import check_declared
from megatron_dapo.report.chart import Unit

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


def _chart(key: str, title: str, unit: Unit, note: str, metrics: Mapping[str, str], **more: Any) -> Chart:
    """A chart of metrics as they are: name -> label. `more`: other fields of Chart."""
    check_declared(metrics)
    series = tuple(Series(label=label, value=_reader(name)) for name, label in metrics.items())
    return Chart(key=key, title=title, unit=unit, note=note, series=series, **more)


def _reader(name: str) -> Value:
    return lambda line: line.get(name)


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
        _chart(
            "length",
            "Response length",
            Unit.COUNT,
            "Tokens.",
            {"response_length/mean": "mean", "response_length/p95": "95th percentile"},
            figure="7a",
            band=(1000, 4000),
        ),
        _chart(
            "reward",
            "Reward",
            Unit.NUMBER,
            "+1 right, -1 wrong (eq. 7); the penalty is eq. 13.",
            {"reward/mean": "right or wrong", "reward_shaped/mean": "with length penalty"},
            figure="7b",
            from_zero=False,
        ),
        _chart(
            "entropy",
            "Entropy",
            Unit.NUMBER,
            "Nats a token. A collapse ends exploration.",
            {"entropy": "nats a token"},
            figure="7c",
            band=(0.30, 0.70),
        ),
        _chart(
            "probability",
            "Mean probability",
            Unit.NUMBER,
            "Of the generated tokens.",
            {"mean_prob": "of generated tokens"},
            figure="7d",
            band=(0.74, 0.86),
            from_zero=False,
        ),
        _chart(
            "accuracy",
            "Training accuracy",
            Unit.SHARE,
            "Right answers among all responses generated.",
            {"accuracy/mean": "right answers"},
            to_one=True,
        ),
        _chart(
            "truncated",
            "Cut off at the limit",
            Unit.SHARE,
            "Responses that met rollout.max_new_tokens.",
            {"truncated_fraction": "responses"},
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
        _chart(
            "oversampling",
            "Over-sampling",
            Unit.NUMBER,
            "Groups for each group wanted.",
            {"sampling/oversampling_actual": "needed", "sampling/oversampling_predicted": "first dispatched"},
        ),
        _chart(
            "carried",
            "Carried over",
            Unit.COUNT,
            "Finished groups past the end of the batch.",
            {"sampling/carried": "waiting", "sampling/expired": "too old, generated again"},
        ),
    ),
)

CLIP = Section(
    key="clip",
    title="Clip asymmetry",
    lead="Clip-higher (section 3.1) leaves unlikely tokens room to grow. If the clip holds back exploration, the "
    "tokens clipped from above are the unlikely ones.",
    charts=(
        _chart(
            "clipped",
            "Clipped tokens",
            Unit.SHARE,
            "Share of the tokens that carry loss.",
            {"clip_fraction/low": "from below", "clip_fraction/high": "from above", "clip_fraction/dual": "dual"},
        ),
        _chart(
            "clip_prob",
            "Tokens clipped from above",
            Unit.NUMBER,
            "Their probability before the update; low is the paper's point.",
            {"clip_high_prob": "clipped from above", "mean_prob": "all tokens"},
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
        _chart(
            "gradient",
            "Gradient norm",
            Unit.NUMBER,
            "Mean over the optimizer steps, before clipping.",
            {"grad_norm": "before clipping"},
        ),
        _chart(
            "kl",
            "KL divergence",
            Unit.NUMBER,
            "Nats a token, k3 estimator.",
            {"kl/old": "old to new policy", "kl/reference": "to the start"},
        ),
        _chart(
            "mismatch",
            "Server against trainer",
            Unit.NUMBER,
            "|log-prob difference| of the same token, nats.",
            {"mismatch/mean_abs": "mean", "mismatch/max_abs": "largest"},
        ),
        _chart(
            "stale",
            "Stale tokens",
            Unit.SHARE,
            "Trained tokens that older weights wrote.",
            {"staleness/share": "of the batch"},
        ),
    ),
)

BIAS = Section(
    key="bias",
    title="Bias ledger",
    lead="What is trained on against what was generated. Groups are admitted in prompt order, so a lasting gap in "
    "length comes from the filter alone, not from which response was finished first.",
    charts=(
        _chart(
            "bias_length",
            "Length",
            Unit.COUNT,
            "Mean tokens a response.",
            {"bias/accepted_length": "trained on", "bias/generated_length": "generated"},
        ),
        _chart(
            "bias_accuracy",
            "Accuracy",
            Unit.SHARE,
            "The filter draws the batch towards one half.",
            {"bias/accepted_accuracy": "trained on", "bias/generated_accuracy": "generated"},
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
        _chart(
            "wording_rate",
            "How often",
            Unit.SHARE,
            "Share of the responses generated.",
            {"reflection_rate": "reflecting", "backtracking_rate": "backtracking"},
        ),
        _chart(
            "wording_accuracy",
            "How often right",
            Unit.SHARE,
            "Accuracy among those responses.",
            {
                "reflection_accuracy": "reflecting",
                "backtracking_accuracy": "backtracking",
                "accuracy/mean": "all responses",
            },
            to_one=True,
        ),
    ),
)

TIME = Section(
    key="time",
    title="Time",
    lead="Seconds of the phases of each rollout step, as the coordinator waits for them.",
    charts=(
        _chart(
            "phases",
            "Seconds a rollout step",
            Unit.SECONDS,
            "Stacked in the order of the step.",
            {f"timing/{phase}": phase.replace("_", " ") for phase in PHASES},
            stack=True,
        ),
        _chart(
            "speed",
            "Tokens a second",
            Unit.COUNT,
            "The whole run, not a GPU.",
            {"tokens_per_second/rollout": "generated", "tokens_per_second/train": "trained on"},
        ),
    ),
)

SECTIONS = (TRAINING, SAMPLING, CLIP, UPDATE, BIAS, WORDING, TIME)
