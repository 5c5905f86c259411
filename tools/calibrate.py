"""The planner's constants as far as a run measured them: a file for `megatron-dapo plan --calibration`.

Each measured constant is chosen so that the planner's own formula (megatron_dapo/plan) gives what was measured; the
others keep the value and the source that they had.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

from megatron_dapo.actor.model.hf_config import HFModelConfig
from megatron_dapo.config.actor_config import ActorConfig, LayoutConfig
from megatron_dapo.plan.memory import kv_bytes_per_token
from megatron_dapo.plan.rank_state import DTYPE_BYTES, model_parameters
from megatron_dapo.plan.scenario import Calibration, load_calibration
from megatron_dapo.plan.sync import readers_of_a_node
from megatron_dapo.plan.trainer_time import exchange_seconds, forward_flops, recomputed, slow_flops
from megatron_dapo.report.source import ReportError, Run, look_up
from tools.recorded_spans import Span
from tools.throughput import on_gpu
from tools.timeline_figures import RecordedStep, pass_seconds, tensor_seconds

HEADER = (
    "# Constants of the planner, made by `python -m tools.profile_throughput RUN --calibration FILE`. Those with the\n"
    "# source `measured` are of that run; the others are as in the file that it began with.\n"
)


class Found(NamedTuple):
    """One constant as measured. Found(0.41, "passes of the update, 12 of them")"""

    value: float
    how: str


def calibration_file(
    run: Run, steps: Sequence[RecordedStep], hf: HFModelConfig, *, base: Path | None, given: Mapping[str, float]
) -> str:
    """YAML of all constants.

    Args:
        base: file with the constants that are not measured; None: the package's.
        given: constants that the caller knows, such as `peak_flops`.

    Raises:
        ReportError: the run recorded no timeline after its first steps; or it ran on CPUs and `given` lacks
            `peak_flops` and `memory_bandwidth`, which the package has for GPUs.
    """
    if not steps:
        raise ReportError(f"{run.path}: no recorded rollout step counts; set monitor.timeline_every, or lower --skip")
    if not on_gpu(run) and not {"peak_flops", "memory_bandwidth"} <= given.keys():
        raise ReportError(f"{run.path}: ran on CPUs: give --peak-flops and --memory-bandwidth of a process too")
    load_calibration(base)  # every fault of the file, named
    text = base.read_text() if base else (resources.files("megatron_dapo.plan") / "calibration.yaml").read_text()
    entries: dict[str, dict[str, Any]] = yaml.safe_load(text)
    for name, value in given.items():
        entries[name] |= {"value": float(value), "source": "given on the command line"}
    constants = Calibration(**{name: float(entry["value"]) for name, entry in entries.items()})
    numbers = [step.step for step in steps]
    where = f"{run.name}, rollout step{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
    measured = _lengths(steps)
    measured |= _trainer(run, steps, hf, constants, measured["mean_prompt"].value)
    measured |= _decode(run, steps, hf, constants) | _sync(run, steps, hf, constants)
    for name, found in measured.items():
        entries[name] |= {"value": float(f"{found.value:.6g}"), "source": f"measured: {found.how}; {where}"}
    flow: dict[str, Any] = {"default_flow_style": True, "sort_keys": False, "width": 10_000}
    return HEADER + "".join(f"{name}: {yaml.safe_dump(entry, **flow)}" for name, entry in entries.items())


def _lengths(steps: Sequence[RecordedStep]) -> dict[str, Found]:
    """Of the responses that the recorded steps wrote; a cut one counts with the length it was cut at."""
    tokens: dict[str, float] = defaultdict(float)
    prompts: dict[str, float] = {}
    for span in _requests(steps):
        tokens[span.name] += span.about["tokens"]
        prompts[span.name] = min(span.about["prompt"], prompts.get(span.name, np.inf))
    lengths = np.array(list(tokens.values()))
    logs = np.log(np.maximum(lengths, 1))
    groups: dict[str, list[float]] = defaultdict(list)
    for name, value in zip(tokens, logs, strict=True):
        groups[name.split("-")[0]].append(float(value))
    how = f"{len(lengths)} responses"
    found = {
        "mean_response": Found(float(lengths.mean()), how),
        "mean_prompt": Found(float(np.mean(list(prompts.values()))), how),
    }
    spread = float(logs.var())
    if spread > 0:
        inside = sum(float(np.var(group)) * len(group) for group in groups.values()) / len(logs)
        found["response_sigma"] = Found(spread**0.5, how)
        found["difficulty_share"] = Found(min(1.0, max(0.0, 1 - inside / spread)), f"{how}, by prompt")
    return found


def _trainer(
    run: Run, steps: Sequence[RecordedStep], hf: HFModelConfig, constants: Calibration, prompt: float
) -> dict[str, Found]:
    """Efficiency of the passes, without what the planner adds by itself: communication of tensor parallelism and of
    experts, and what grouped products lose."""
    recorded = {step.step for step in steps}
    recompute: Any = run.setting("actor.recompute") or "none"
    layout = LayoutConfig(**look_up(run.manifest, "trainer.layout") or {})
    actor = ActorConfig(layout=layout, recompute=("core_attn",) if recompute == "selective" else recompute)
    flops = again = slow = exchange = exchanges = 0.0
    for line in run.lines:
        length = line.get("bias/accepted_length")
        if line["rollout_step"] in recorded and length:
            whole = np.array([length + prompt])
            responses = line["tokens/trained"] / length
            flops += forward_flops(hf, whole).item() * responses
            repeated, more = recomputed(hf, actor, whole)
            tokens = whole.item() * responses
            lost = slow_flops(hf, layout, constants) * tokens
            again += repeated.item() * responses + lost * more
            slow += lost
            once = exchange_seconds(hf, layout, constants) * tokens * hf.num_layers * layout.tensor
            exchange, exchanges = exchange + once, exchanges + once * (2 + more)
    ranks = [rank for step in steps for rank in step.ranks]
    found = {}
    tensor = tensor_seconds(ranks, layers=hf.num_layers) or 0.0
    busy = pass_seconds(steps, "update") - tensor - exchanges
    if flops and busy > 0:
        share = (3 * (flops + slow) + again) / (busy * constants.peak_flops)
        found["train_efficiency"] = Found(min(1.0, share), "forward and backward passes of the update")
    busy = pass_seconds(steps, "log_probs") - tensor / 2 - exchange
    if flops and busy > 0:
        share = (flops + slow) / (busy * constants.peak_flops)
        found["forward_efficiency"] = Found(min(1.0, share), "passes for log-probs")
    probes = [span.about for rank in ranks for span in rank.spans if span.track == "probe"]
    if probes:
        size = probes[0]["ranks"]
        speed = np.median([2 * (size - 1) / size * probe["bytes"] / probe["seconds"] for probe in probes])
        link = constants.nvlink_bandwidth if size <= constants.gpus_per_node else constants.network_bandwidth
        how = f"all-reduce of {probes[0]['bytes'] / 1e6:.1f} MB over {size} ranks"
        found["communication_efficiency"] = Found(float(min(1.0, speed / link)), how)
    return found


def _decode(run: Run, steps: Sequence[RecordedStep], hf: HFModelConfig, constants: Calibration) -> dict[str, Found]:
    """A decode step takes `decode_overhead` + (weights + cached tokens x their bytes) / (efficiency x bandwidth).

    Fitted by least squares to the seconds of each response: a constant (prefill, queue; not used), its tokens, and its
    tokens times those that its server held meanwhile. Where the cache's share cannot be told (a small model, few
    responses), efficiency is left and the overhead fitted; if the weights alone would take longer than measured, the
    overhead is 0 and efficiency fitted.
    """
    size = DTYPE_BYTES.get(str(run.setting("model.dtype")), 2)
    parallel = run.setting("rollout.tensor_parallel") or 1
    weights = model_parameters(hf) * size / parallel
    cached = kv_bytes_per_token(hf, parallel, size)
    seconds, tokens, context = _responses(steps)
    if len(seconds) < 3 or np.ptp(tokens) == 0:
        return {}
    how, bandwidth = f"{len(seconds)} responses, evaluations' too", constants.memory_bandwidth
    columns = np.stack([np.ones_like(tokens), tokens, tokens * context], axis=1)
    _, fixed, slope = np.linalg.lstsq(columns, seconds, rcond=None)[0]
    if slope > 0 and fixed > 0:
        share = cached / (bandwidth * slope)
        if share <= 1 and fixed > weights / (bandwidth * share):
            return {
                "decode_efficiency": Found(float(share), how),
                "decode_overhead": Found(float(fixed - weights / (bandwidth * share)), how),
            }
    mean = float(np.linalg.lstsq(columns[:, :2], seconds, rcond=None)[0][1])
    read = (weights + cached * float(context.mean())) / bandwidth
    if mean <= 0:
        return {}
    overhead = mean - read / constants.decode_efficiency
    if overhead >= 0:
        return {"decode_overhead": Found(overhead, f"{how}, with decode_efficiency as it was")}
    return {
        "decode_efficiency": Found(min(1.0, read / mean), how),
        "decode_overhead": Found(0.0, how),
    }


def _responses(steps: Sequence[RecordedStep]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(seconds, tokens, mean tokens that the server held meanwhile), [n] each, of all requests of the steps."""
    rows = []
    for step in steps:
        for spans in step.requests.values():
            starts = np.array([span.start for span in spans])
            ends = np.array([span.end for span in spans])
            held = np.array([span.about["prompt"] + span.about["tokens"] / 2 for span in spans])
            for span in spans:
                if span.seconds > 0:
                    together = np.clip(np.minimum(ends, span.end) - np.maximum(starts, span.start), 0, None)
                    beside = float((together * held).sum() / span.seconds)
                    rows.append((span.seconds, float(span.about["tokens"]), beside))
    seconds, tokens, context = np.array(rows).reshape(-1, 3).T
    return seconds, tokens, context


def _sync(run: Run, steps: Sequence[RecordedStep], hf: HFModelConfig, constants: Calibration) -> dict[str, Found]:
    """Where weights go through a disk: the trainer gathers and writes, then the servers read. Of gathering and
    writing only the sum is known: each gets half of it, gathering less where the servers of a node, which the planner
    lets read at its bandwidth one after the other, were faster than that."""
    model = model_parameters(hf) * DTYPE_BYTES.get(str(run.setting("model.dtype")), 2)
    export, rest = [], []
    for step in steps:
        phase = next((span for span in step.phases if span.name == "weight_sync"), None)
        call = [s for rank in step.ranks for s in rank.spans if (s.track, s.name) == ("calls", "write")]
        call = [span for span in call if phase and phase.start <= span.start < phase.end]
        if phase and call:
            export.append(max(span.seconds for span in call))
            rest.append(phase.seconds - export[-1])
    if not export or min(*export, *rest) <= 0:
        return {}
    exported, after = float(np.mean(export)), float(np.mean(rest))
    servers = len(run.setting("rollout.urls") or ()) or run.setting("rollout.servers") or 1
    gpus = servers * (run.setting("rollout.tensor_parallel") or 1)
    gathered = min(exported / 2, after / readers_of_a_node(servers, gpus, constants))
    write, share = model / (exported - gathered), f"{gathered / exported:.0%} of the export's time"
    return {
        "gather_bandwidth": Found(model / gathered, f"weight sync, {share}, by assumption"),
        "disk_write": Found(write, "weight sync, the rest of the export's time"),
        "disk_read": Found(model / after, "weight sync after the export"),
    }


def _requests(steps: Sequence[RecordedStep]) -> list[Span]:
    """Of training responses, not of evaluations."""
    return [
        span
        for step in steps
        for spans in step.requests.values()
        for span in spans
        if span.name.startswith("p") and span.name[1:2].isdigit()
    ]
