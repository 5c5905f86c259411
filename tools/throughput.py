"""Figures of a run's throughput from its metrics, config and manifest."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megatron_dapo.actor.model.hf_config import HFModelConfig
from megatron_dapo.diagnostics.recorded_spans import read_spans
from megatron_dapo.monitor.timeline import PHASES
from megatron_dapo.monitor.writer import Line
from megatron_dapo.plan.rank_state import DTYPE_BYTES, model_parameters
from megatron_dapo.plan.trainer_time import forward_flops
from megatron_dapo.report.source import ReportError, Run
from tools.timeline_figures import Figures, RecordedStep, recorded_steps, timeline_figures

_NEEDED = ("timing/step", "timing/update", "tokens/generated", "tokens/trained", "optimizer_step")


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """One run: its figures by the keys of `rows`, None where it recorded too little."""

    name: str
    steps: int
    """Rollout steps that count."""

    description: str
    figures: Figures
    recorded: list[RecordedStep] = field(default_factory=list)
    """Those of the steps that have a timeline."""

    tail_share: float = 0.5
    """As in `timeline_figures`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """How a figure is shown."""

    key: str
    label: str
    form: str = ",.1f"


def rows(phases: Sequence[str]) -> list[Row]:
    """Of the table, in order."""
    return [
        Row(key="step_s", label="rollout step, s", form=",.2f"),
        *(Row(key=f"{phase}_s", label=f"{phase}, s a step", form=",.2f") for phase in phases),
        Row(key="other_s", label="coordinator, s a step", form=",.2f"),
        *(Row(key=f"{phase}_share", label=f"{phase}, share of the step", form=".1%") for phase in phases),
        Row(key="optimizer_step_s", label="optimizer step, s", form=",.3f"),
        Row(key="generated_per_s", label="generated tokens/s, rollout and reward; async: whole step"),
        Row(key="generated_per_s_gpu", label="the same a server GPU"),
        Row(key="trained_per_s", label="trained tokens/s, update"),
        Row(key="trained_per_s_gpu", label="the same a trainer GPU"),
        Row(key="step_per_s_gpu", label="trained tokens/s a GPU, whole step"),
        Row(key="mfu", label="MFU of the update", form=".1%"),
        Row(key="useful_share", label="trained tokens / generated", form=".1%"),
        Row(key="length_mean", label="response, mean tokens"),
        Row(key="length_p95", label="response, 95 % of a step's are below, mean of steps"),
        Row(key="length_max", label="response, longest"),
        Row(key="tail", label="longest / mean response of a step, mean of steps", form=".2f"),
        Row(key="sync_mb_per_s", label="weight sync, MB/s"),
        Row(key="compute", label="passes, share of the update", form=".1%"),
        Row(key="bubble", label="pipeline bubble, share of the schedule", form=".1%"),
        Row(key="communication", label="communication, share of the update", form=".1%"),
        Row(key="gradient_sync", label="of it the sum of gradients", form=".1%"),
        Row(key="tensor_parallel", label="of it tensor parallel, estimated", form=".1%"),
        Row(key="optimizer", label="optimizer, share of the update", form=".1%"),
        Row(key="dp_imbalance", label="slowest data-parallel rank over the mean, less 1", form=".1%"),
        Row(key="rollout_tail", label="rollout tail, share of the rollout", form=".1%"),
        Row(key="server_imbalance", label="busiest server's tokens over the mean, less 1", form=".1%"),
        Row(key="peak_memory", label="most memory of a rank, bytes", form=",.0f"),
    ]


def profile_run(run: Run, *, skip: int, peak_flops: float, tail_share: float = 0.5) -> Profile:
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
    first = run.lines[skip - 1]["optimizer_step"] if skip else 0
    on_gpu = (run.manifest.get("trainer") or {}).get("device", "cpu") != "cpu"
    trainer, servers, together = _gpus(run)
    seconds = {phase: _sum(lines, f"timing/{phase}") for phase in (*PHASES, "step")}
    generated, trained = _sum(lines, "tokens/generated"), _sum(lines, "tokens/trained")
    count, step = len(lines), seconds["step"]
    figures: Figures = {f"{phase}_s": seconds[phase] / count for phase in seconds}
    figures |= {f"{phase}_share": _over(seconds[phase], step) for phase in PHASES}
    figures["other_s"] = (step - sum(seconds[phase] for phase in PHASES)) / count
    figures["optimizer_step_s"] = _over(seconds["update"], lines[-1]["optimizer_step"] - first)
    # In `async` the servers write all the time: what the coordinator waits for them says little.
    writing = step if run.setting("run.mode") == "async" else seconds["rollout"] + seconds["reward"]
    figures["generated_per_s"], figures["trained_per_s"] = _over(generated, writing), _over(trained, seconds["update"])
    figures["generated_per_s_gpu"] = _over(generated, writing * servers) if on_gpu else None
    figures["trained_per_s_gpu"] = _over(trained, seconds["update"] * trainer) if on_gpu else None
    figures["step_per_s_gpu"] = _over(trained, step * together) if on_gpu else None
    hf = model_shape_of(run)
    figures["mfu"] = _mfu(hf, lines, trained, seconds["update"] * trainer * peak_flops) if on_gpu and hf else None
    figures["useful_share"] = _over(trained, generated)
    figures |= _lengths(lines)
    size = DTYPE_BYTES.get(str(run.setting("model.dtype")))
    synced = model_parameters(hf) * size * count / 1e6 if hf is not None and size is not None else None
    figures["sync_mb_per_s"] = None if synced is None else _over(synced, seconds["weight_sync"])
    apart = f"{trainer} train and {servers} generate" + (", in turns" if together < trainer + servers else "")
    what = f"{together} GPUs, {apart}" if on_gpu else "on CPUs: no figures a GPU, no MFU"
    parameters = f", {run.parameters / 1e6:,.1f} million parameters" if run.parameters else ""
    recorded = recorded_steps(read_spans(run.path), skip=run.lines[skip - 1]["rollout_step"] if skip else 0)
    figures |= timeline_figures(recorded, layers=hf.num_layers if hf else None, tail_share=tail_share)
    described = f"{count} rollout steps after the first {skip}{parameters}; {what}"
    return Profile(
        name=run.name,
        steps=count,
        description=described,
        figures=figures,
        recorded=recorded,
        tail_share=tail_share,
    )


def _gpus(run: Run) -> tuple[int, int, int]:
    """Of the trainer, the servers, both, those that they share counted once, as the planner does it. A server of
    `rollout.urls` is taken to have `rollout.tensor_parallel`."""
    layout = (run.manifest.get("trainer") or {}).get("layout") or {}
    trainer = int(np.prod([layout.get(name) or 1 for name in ("tensor", "pipeline", "context", "data")]))
    count, each = run.setting("rollout.servers") or 1, run.setting("rollout.tensor_parallel") or 1
    urls = len(run.setting("rollout.urls") or ())
    servers = (urls or count) * each
    shared = run.setting("run.mode") == "colocated" or (not urls and trainer == servers == 1)
    return trainer, servers, max(trainer, servers) if shared else trainer + servers


def model_shape_of(run: Run) -> HFModelConfig | None:
    """What the run's manifest says of its model."""
    fields = (run.manifest.get("model") or {}).get("config")
    return HFModelConfig.of(fields, shown=str(run.path / "manifest.json")) if isinstance(fields, Mapping) else None


def _mfu(hf: HFModelConfig, lines: Sequence[Line], trained: float, capacity: float) -> float | None:
    lengths = [line.get("bias/accepted_length") for line in lines]
    if not all(isinstance(length, int | float) for length in lengths):
        return None
    flops = sum(
        3 * forward_flops(hf, np.array([length])).item() * line["tokens/trained"] / length
        for line, length in zip(lines, lengths, strict=True)
        if length
    )
    return _over(flops, capacity)


def _lengths(lines: Sequence[Line]) -> Figures:
    mean, p95, longest = (_column(lines, f"response_length/{name}") for name in ("mean", "p95", "max"))
    weights = _column(lines, "tokens/generated")
    figures: Figures = {"length_mean": None, "length_p95": None, "length_max": None, "tail": None}
    if mean is not None and weights is not None and (mean > 0).all() and weights.sum() > 0:
        figures["length_mean"] = float(weights.sum() / (weights / mean).sum())
        figures["tail"] = None if longest is None else float((longest / mean).mean())
    figures["length_p95"] = None if p95 is None else float(p95.mean())
    figures["length_max"] = None if longest is None else float(longest.max())
    return figures


def _column(lines: Sequence[Line], name: str) -> np.ndarray | None:
    values: list[Any] = [line.get(name) for line in lines]
    return np.array(values, dtype=float) if all(isinstance(value, int | float) for value in values) else None


def _sum(lines: Sequence[Line], name: str) -> float:
    return float(sum(line.get(name) or 0.0 for line in lines))


def _over(total: float, by: float) -> float | None:
    return total / by if by > 0 else None
