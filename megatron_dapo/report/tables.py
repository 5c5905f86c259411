"""The report's tables: held-out accuracy, fates, bias, wording, seconds, config, samples. Text only; no markup."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_dapo.config.config_diff import Departure, Difference, departures, differences, flatten
from megatron_dapo.monitor.console import duration
from megatron_dapo.monitor.reflection import correlation
from megatron_dapo.monitor.statistics import Accuracy, difference
from megatron_dapo.report.charts import count, share, total
from megatron_dapo.report.fates import AGAIN, ALL_RIGHT, ALL_WRONG, TRAINED, UNFINISHED, WAITING
from megatron_dapo.report.figures import PHASES
from megatron_dapo.report.source import Run

WAYS = ("sampled", "greedy")
STAGES = (("before", "before"), ("baseline", "before, made to work"), ("after", "after"))
SAMPLES = 4
"""Right and wrong responses shown of each run: the newest."""
FATE_COLOURS = {TRAINED: 0, ALL_WRONG: 1, ALL_RIGHT: 2, WAITING: 3, UNFINISHED: 4, AGAIN: 4}
"""The page's series colours; those of the chart of groups, where both have the fate."""
LONGEST = 4000
"""Characters of a response that are shown: most of its beginning, and its end, where the answer stands."""


@dataclass(frozen=True, kw_only=True)
class Interval:
    """An accuracy as text and as a bar; the bar's ends are percent."""

    stage: str
    text: str
    low: float
    middle: float
    high: float


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """One way of answering, before and after."""

    way: str
    problems: str
    rows: list[Interval]
    gain: str


@dataclass(frozen=True, kw_only=True)
class Part:
    """One part of a whole."""

    label: str
    text: str
    percent: float
    colour: int


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One response of training; texts are empty where the run did not keep them."""

    about: str
    prompt: str
    response: str
    extracted: str
    answer: str


@dataclass(frozen=True, kw_only=True)
class Example:
    """One held-out problem, answered before and after training."""

    prompt: str
    answer: str
    before: str
    before_correct: bool
    after: str
    after_correct: bool


def held_out(run: Run) -> list[HeldOut]:
    """Each way of answering that was measured; a run under way has no `after` yet."""
    tables = []
    for way in WAYS:
        known = {
            stage: Accuracy(**figures)
            for stage, _ in STAGES
            if isinstance(figures := (run.before.get(stage) or {}).get(way), Mapping)
        }
        if not known:
            continue
        some = next(iter(known.values()))
        each = some.n // max(some.problems, 1)
        gain = ""
        if "before" in known and "after" in known:
            change = difference(known["before"], known["after"])
            gain = f"{100 * change.value:+.1f} points [{100 * change.low:+.1f}, {100 * change.high:+.1f}]"
        problems = f"{count(some.problems)} problems" + (f", {each} answers each" if each > 1 else "")
        rows = [_interval(label, known[stage]) for stage, label in STAGES if stage in known]
        tables.append(HeldOut(way=way, problems=problems, rows=rows, gain=gain))
    return tables


def _interval(stage: str, figures: Accuracy) -> Interval:
    low, middle, high = (100 * value for value in (figures.low, figures.accuracy, figures.high))
    return Interval(stage=stage, text=f"{middle:.1f}% [{low:.1f}, {high:.1f}]", low=low, middle=middle, high=high)


def parts(counts: Mapping[str, int], unit: str) -> list[Part]:
    """Shares of a whole, in the order given; nothing for a fate that nobody met."""
    whole = sum(counts.values())
    return [
        Part(
            label=label,
            text=f"{count(number)} {unit}, {share(number / whole)}",
            percent=100 * number / whole,
            colour=FATE_COLOURS[label],
        )
        for label, number in counts.items()
        if number
    ]


def bias_rows(run: Run) -> list[tuple[str, str, str, str]]:
    """(what, trained on, generated, ratio) over the whole run, weighted by the groups of each step."""
    rows = []
    for what, shown in (("length", count), ("accuracy", share)):
        accepted = _weighted(run, f"bias/accepted_{what}", "sampling/kept")
        generated = _weighted(run, f"bias/generated_{what}", "sampling/generated")
        if accepted is not None and generated:
            rows.append((f"mean {what}", shown(accepted), shown(generated), f"{accepted / generated:.3f}"))
    return rows


def _weighted(run: Run, name: str, weight: str) -> float | None:
    known = [(line[name], line[weight]) for line in run.lines if line.get(name) is not None and line.get(weight)]
    groups = sum(number for _, number in known)
    return sum(value * number for value, number in known) / groups if groups else None


def wording_rows(run: Run) -> list[tuple[str, str, str, str]]:
    """(wording, share of responses, accuracy of those, correlation with success inside a step); the first two over
    all responses of the run, each step counting by the groups that it generated."""
    rows = []
    for name in ("reflection", "backtracking"):
        needed = (f"{name}_rate", "accuracy/mean")
        lines = [line for line in run.lines if all(line.get(key) is not None for key in needed)]
        measured = [line for line in lines if not line[f"{name}_rate"] or line.get(f"{name}_accuracy") is not None]
        rate = _weighted(run, f"{name}_rate", "sampling/generated")
        if rate is None:
            continue
        if not measured:
            rows.append((name, share(rate), "not measured", "not measured"))
            continue
        rates = [line[f"{name}_rate"] for line in measured]
        among = [line.get(f"{name}_accuracy") or 0.0 for line in measured]
        found = correlation(rates, among, [line["accuracy/mean"] for line in measured])
        counts = [rate * (line.get("sampling/generated") or 0) for rate, line in zip(rates, measured, strict=True)]
        hits = sum(counts)
        right = sum(a * number for a, number in zip(among, counts, strict=True))
        rows.append(
            (
                name,
                share(rate),
                share(right / hits) if hits else "never seen",
                "–" if found is None else f"{found:+.2f}",
            )
        )
    return rows


def phase_rows(run: Run) -> list[tuple[str, str, str, str]]:
    """(phase, seconds in all, share, mean of a step); the last row is what no phase claims."""
    whole = total(run, "timing/step")
    if not whole:
        return []
    spent = {phase.replace("_", " "): total(run, f"timing/{phase}") for phase in PHASES}
    spent["coordinator"] = max(0.0, whole - sum(spent.values()))
    return [
        (phase, duration(seconds), share(seconds / whole), duration(seconds / len(run.lines)))
        for phase, seconds in spent.items()
        if seconds
    ]


def config_departures(run: Run) -> list[Departure]:
    """Keys that this run set otherwise than the paper; none where the config is not known."""
    return departures(flatten(run.config)) if run.config else []


def config_differences(runs: Sequence[Run]) -> list[Difference]:
    """Keys in which two runs differ."""
    return differences(flatten(runs[0].config), flatten(runs[1].config)) if len(runs) > 1 else []


def samples(run: Run, *, right: bool) -> list[Sample]:
    """The newest responses that were right, or wrong, shortened to what a person reads."""
    chosen = [line for line in run.samples if bool(line.get("accuracy")) is right][-SAMPLES:]
    return [
        Sample(
            about=_about(line),
            prompt=str(line.get("prompt_text") or ""),
            response=shortened(str(line.get("response") or "")),
            extracted="nothing" if line.get("extracted") is None else str(line["extracted"]),
            answer=str(line.get("answer") or ""),
        )
        for line in reversed(chosen)
    ]


def examples(run: Run) -> list[Example]:
    """Held-out problems of the summary, answered before and after training."""
    return [
        Example(
            prompt=str(line.get("prompt") or ""),
            answer=str(line.get("answer") or ""),
            before=shortened(str(line.get("before") or "")),
            before_correct=bool(line.get("before_correct")),
            after=shortened(str(line.get("after") or "")),
            after_correct=bool(line.get("after_correct")),
        )
        for line in run.summary.get("examples") or ()
        if isinstance(line, Mapping)
    ]


def _about(line: Mapping[str, Any]) -> str:
    known = [f"step {line['rollout_step']}", f"prompt {line.get('prompt', '?')}"]
    if line.get("finish_reason") == "length":
        known.append("cut off at the limit")
    if isinstance(line.get("reward_shaped"), int | float):
        known.append(f"reward {line['reward_shaped']:+.2f}")
    return ", ".join(known)


def shortened(text: str) -> str:
    """Beginning and end of a long text."""
    if len(text) <= LONGEST:
        return text
    head, tail = LONGEST * 5 // 8, LONGEST * 3 // 8
    return f"{text[:head]}\n[... {count(len(text) - head - tail)} characters left out ...]\n{text[-tail:]}"


def provenance(run: Run) -> list[tuple[str, str]]:
    """Where, when and with what it was run."""
    manifest = run.manifest
    versions = {name: version for name, version in (manifest.get("versions") or {}).items() if version}
    data = manifest.get("data") or {}
    rows = [
        ("started", manifest.get("started")),
        ("host", (manifest.get("host") or {}).get("name")),
        ("system", (manifest.get("host") or {}).get("system")),
        ("device", (manifest.get("trainer") or {}).get("device")),
        ("model", (manifest.get("model") or {}).get("path")),
        ("parameters", count(run.parameters) if run.parameters else None),
        ("training prompts", _data(data.get("train"))),
        ("held-out problems", _data(data.get("heldout"))),
        ("versions", ", ".join(f"{name} {version}" for name, version in versions.items())),
        ("command", " ".join(map(str, manifest.get("command") or ()))),
    ]
    return [(name, str(value)) for name, value in rows if value]


def _data(entry: Any) -> str | None:
    if not isinstance(entry, Mapping):
        return None
    return f"{entry.get('path')}: {entry.get('rows')}; sha256 {str(entry.get('sha256'))[:12]}"
