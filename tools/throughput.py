"""Figures of a run's throughput from its metrics, config and manifest; as Markdown, JSON and one HTML page that needs
no network."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from megatron_dapo.actor.model.hf_config import HFModelConfig
from megatron_dapo.monitor.console import duration
from megatron_dapo.monitor.timeline import PHASES
from megatron_dapo.monitor.writer import Line
from megatron_dapo.plan.rank_state import DTYPE_BYTES, model_parameters
from megatron_dapo.plan.trainer_time import forward_flops
from megatron_dapo.report.page import page_environment
from megatron_dapo.report.source import ReportError, Run, look_up
from tools.recorded_spans import read_spans
from tools.timeline_figures import Figures, RecordedStep, over, rank_rows, recorded_steps, timeline_figures

TEMPLATES = Path(__file__).parent / "templates"
WORDS: dict[str, Any] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
_AXES = {"TP": "tensor", "PP": "pipeline", "CP": "context", "DP": "data", "EP": "expert"}
_NEEDED = ("timing/step", "timing/update", "tokens/generated", "tokens/trained", "optimizer_step")


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """One run: its figures by the names in throughput.yaml, None where it recorded too little."""

    name: str
    steps: int
    """Rollout steps that count."""

    description: str
    figures: Figures
    recorded: list[RecordedStep]
    """Those of the steps that have a timeline."""


def profile_run(run: Run, *, skip: int, peak_flops: float, tail_share: float) -> Profile:
    """Figures of `run` after its first `skip` rollout steps.

    Raises:
        ReportError: no step is left, or its lines lack what a throughput is made of.
        SpanError: its timeline cannot be read.
    """
    lines = run.lines[skip:]
    if not lines:
        raise ReportError(f"{run.path}: {len(run.lines)} rollout steps, --skip {skip}: none is left to measure")
    lacking = [name for name in _NEEDED if not all(isinstance(line.get(name), int | float) for line in lines)]
    if lacking:
        raise ReportError(f"{run.path}: metrics.jsonl lacks {', '.join(lacking)}; give a run of this version")
    before = run.lines[skip - 1] if skip else {"optimizer_step": 0, "rollout_step": 0}
    trainer, servers, together = _gpus(run)
    seconds = {phase: _sum(lines, f"timing/{phase}") for phase in (*PHASES, "step")}
    generated, trained = _sum(lines, "tokens/generated"), _sum(lines, "tokens/trained")
    count, step, update = len(lines), seconds["step"], seconds["update"]
    # Where the servers write all the time, what the coordinator waits for them says little.
    sampling, mode = run.setting("algorithm.dynamic_sampling") or {}, run.setting("run.mode")
    carries = sampling.get("max_staleness") and sampling.get("filter", "refill") == "refill"
    meanwhile = mode == "async" or (mode == "sync" and carries and not run.setting("rollout.deterministic"))
    writing = step if meanwhile else sum(seconds[phase] for phase in PHASES[:3])
    hf = model_shape_of(run)
    synced = model_parameters(hf) * DTYPE_BYTES.get(str(run.setting("model.dtype")), 0) * count if hf else 0
    figures: Figures = {
        **{f"{phase}_s": seconds[phase] / count for phase in seconds},
        **{f"{phase}_share": over(seconds[phase], step) for phase in PHASES},
        "other_s": (step - sum(seconds[phase] for phase in PHASES)) / count,
        "optimizer_step_s": over(update, lines[-1]["optimizer_step"] - before["optimizer_step"]),
        "generated_per_s": over(generated, writing),
        "generated_per_s_gpu": over(generated, writing * servers),
        "trained_per_s": over(trained, update),
        "trained_per_s_gpu": over(trained, update * trainer),
        "step_per_s_gpu": over(trained, step * together),
        "mfu": _mfu(hf, lines, update * trainer * peak_flops) if hf else None,
        "useful_share": over(trained, generated),
        "sync_mb_per_s": over(synced / 1e6, seconds["weight_sync"]) if synced else None,
    }
    recorded = recorded_steps(read_spans(run.path), skip=before["rollout_step"])
    fleet = len(run.setting("rollout.urls") or ()) or run.setting("rollout.servers") or 1
    layers = hf.num_layers if hf else None
    figures |= timeline_figures(recorded, layers=layers, servers=fleet, tail_share=tail_share) | _lengths(lines)
    apart = f"{trainer} train and {servers} generate" + (", in turns" if together < trainer + servers else "")
    what = f"{together} GPUs, {apart}" if together else "on CPUs: no figures a GPU, no MFU"
    parameters = f", {run.parameters / 1e6:,.1f} million parameters" if run.parameters else ""
    described = f"{count} rollout steps after the first {skip}{parameters}; {what}"
    return Profile(name=run.name, steps=count, description=described, figures=figures, recorded=recorded)


def _gpus(run: Run) -> tuple[int, int, int]:
    """Of the trainer, the servers, both, those that they share counted once, as the planner does it; 0 on CPUs. A
    server of `rollout.urls` is taken to have `rollout.tensor_parallel`."""
    if not on_gpu(run):
        return 0, 0, 0
    layout = look_up(run.manifest, "trainer.layout") or {}
    trainer = int(np.prod([layout.get(name) or 1 for name in ("tensor", "pipeline", "context", "data")]))
    count, each = run.setting("rollout.servers") or 1, run.setting("rollout.tensor_parallel") or 1
    urls = len(run.setting("rollout.urls") or ())
    servers = (urls or count) * each
    shared = run.setting("run.mode") == "colocated" or (not urls and trainer == servers == 1)
    return trainer, servers, max(trainer, servers) if shared else trainer + servers


def on_gpu(run: Run) -> bool:
    """Whether its trainer had GPUs."""
    return str(look_up(run.manifest, "trainer.device") or "cpu") != "cpu"


def model_shape_of(run: Run) -> HFModelConfig | None:
    """What the run's manifest says of its model."""
    fields = look_up(run.manifest, "model.config")
    return HFModelConfig.of(fields, shown=str(run.path / "manifest.json")) if isinstance(fields, Mapping) else None


def _mfu(hf: HFModelConfig, lines: Sequence[Line], capacity: float) -> float | None:
    lengths = [line.get("bias/accepted_length") for line in lines]
    if not all(isinstance(length, int | float) for length in lengths):
        return None
    flops = sum(
        3 * forward_flops(hf, np.array([length])).item() * line["tokens/trained"] / length
        for line, length in zip(lines, lengths, strict=True)
        if length
    )
    return over(flops, capacity)


def _lengths(lines: Sequence[Line]) -> Figures:
    names = ("response_length/mean", "response_length/p95", "response_length/max", "tokens/generated")
    columns = [np.array([line.get(name) or np.nan for line in lines], dtype=float) for name in names]
    mean, p95, longest, tokens = columns
    figures = {
        "length_mean": tokens.sum() / (tokens / mean).sum(),
        "tail": (longest / mean).mean(),
        "length_p95": p95.mean(),
        "length_max": longest.max(),
    }
    return {name: None if np.isnan(value) else float(value) for name, value in figures.items()}


def _sum(lines: Sequence[Line], name: str) -> float:
    return float(sum(line.get(name) or 0.0 for line in lines))


def markdown(profiles: Sequence[Profile]) -> str:
    """The report as a Markdown page."""
    lines = ["# Throughput", "", *(f"- {line}" for line in _descriptions(profiles)), ""]
    lines += _table(_heads(profiles), _cells(profiles))
    for profile in profiles:
        if profile.recorded:
            lines += ["", f"## Ranks of {profile.name}", "", *_table(WORDS["rank_heads"], _rank_cells(profile))]
    return "\n".join([*lines, "", *(f"{note}\n" for note in _notes(profiles))])


def as_json(profiles: Sequence[Profile]) -> str:
    """Every figure by name, null where it is unknown."""
    tree = [
        {
            "run": profile.name,
            "steps": profile.steps,
            "recorded_steps": [step.step for step in profile.recorded],
            "description": profile.description,
            "figures": profile.figures,
            "ranks": rank_rows(profile.recorded),
        }
        for profile in profiles
    ]
    return json.dumps(tree, indent=2) + "\n"


def page(profiles: Sequence[Profile]) -> str:
    """The same as one HTML file."""
    environment = page_environment(TEMPLATES)
    environment.filters["duration"] = human_seconds  # phases of a step may take milliseconds
    template = environment.get_template("throughput.html.j2")
    bars = {"Where a rollout step goes": _step_bar, "Where the update goes": _update_bar}
    drawn = {f"{phase}_{what}" for phase in (*PHASES, "other") for what in ("s", "share")}
    return template.render(
        names=" and ".join(profile.name for profile in profiles),
        descriptions=_descriptions(profiles),
        tiles=[(label, [_tile(profile, units, form) for profile in profiles]) for label, units, form in WORDS["tiles"]],
        heads=_heads(profiles),
        bars={title: [_labelled(p.name, bar(p)) for p in profiles] for title, bar in bars.items()},
        rows=[row for row in _cells(profiles, drawn) if any(cell != "–" for cell in row[1:])],
        ranks=[(profile.name, _rank_cells(profile)) for profile in profiles if profile.recorded],
        rank_heads=WORDS["rank_heads"],
        notes=_notes(profiles),
    )


def _tile(profile: Profile, units: dict[str, str], form: str) -> tuple[str, str]:
    """(value, unit)"""
    shown = ((_shown(profile.figures[key], form), unit) for key, unit in units.items())
    return next((each for each in shown if each[0] != "–"), ("–", ""))


def _shown(value: float | None, form: str) -> str:
    if value is None:
        return "–"
    units = {"s": human_seconds(value), "GB": f"{value / 1e9:.3g} GB", "MB/s": f"{value:,.3g} MB/s"}
    return units[form] if form in units else format(value, form)


def human_seconds(value: float) -> str:
    """`8 ms`, `3.25 s`, `320 s`, `2 h 40 min`."""
    if 0 < value < 1:
        return f"{1000 * value:.3g} ms"
    return f"{value:.3g} s" if value < 1000 else duration(value)


def _step_bar(profile: Profile) -> dict[str, float]:
    """Seconds of a rollout step by phase."""
    parts = {phase.replace("_", " "): profile.figures[f"{phase}_s"] or 0.0 for phase in PHASES}
    return parts | {"coordinator": max(0.0, profile.figures["other_s"] or 0.0)}


def _labelled(name: str, parts: dict[str, float]) -> tuple[str, dict[str, float]]:
    return f"{name}, {human_seconds(sum(parts.values()))} a step", parts


def _update_bar(profile: Profile) -> dict[str, float]:
    """Seconds of a rollout step's update by what the ranks did; nothing where that is not recorded."""
    update = profile.figures["update_s"] or 0.0
    names = {"passes": "compute", "sum of gradients": "gradient_sync", "optimizer": "optimizer"}
    parts = {label: (profile.figures[key] or 0.0) * update for label, key in names.items()}
    return parts | {"bubble and rest": max(0.0, update - sum(parts.values()))} if profile.recorded else {}


def _table(heads: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(heads)} |", f"|---|{'---:|' * (len(heads) - 1)}"]
    return lines + [f"| {' | '.join(cells)} |" for cells in body]


def _notes(profiles: Sequence[Profile]) -> list[str]:
    recorded = [bool(profile.recorded) for profile in profiles]
    shown = {"formula": True, "timeline": any(recorded), "not_recorded": not all(recorded)}
    return [WORDS[name] for name, true in shown.items() if true]


def _heads(profiles: Sequence[Profile]) -> list[str]:
    return ["figure", *(profile.name for profile in profiles), *(["second / first"] if len(profiles) == 2 else [])]


def _cells(profiles: Sequence[Profile], without: Collection[str] = ()) -> list[list[str]]:
    table = []
    for key, label, form in (row for row in WORDS["rows"] if row[0] not in without):
        values = [profile.figures[key] for profile in profiles]
        row = [label, *(_shown(value, form) for value in values)]
        if len(values) == 2:
            first, second = values
            row.append(_shown(second / first if first and second is not None else None, ".2f"))
        table.append(row)
    return table


def _rank_cells(profile: Profile) -> list[list[str]]:
    table = []
    for row in rank_rows(profile.recorded):
        place = row["place"]
        call = max(row["peak"], key=row["peak"].get, default="–")
        table.append(
            [
                str(place["rank"]),
                ", ".join(f"{axis} {place[name]}" for axis, name in _AXES.items() if name in place),
                _shown(row["compute"] / row["update"] if row["update"] else None, ".1%"),
                _shown(row["peak"][call] if row["peak"] else None, "GB"),
                call,
            ]
        )
    return table


def _descriptions(profiles: Sequence[Profile]) -> list[str]:
    return [f"{profile.name}: {profile.description}" for profile in profiles]
