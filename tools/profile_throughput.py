"""Throughput of a run, or of two side by side, from what it wrote: Markdown, JSON and one HTML page.

    python -m tools.profile_throughput runs/one                        # Markdown
    python -m tools.profile_throughput runs/one runs/two --out report  # report.md, .json and .html
    python -m tools.profile_throughput runs/one --trace step.json      # its last recorded step for chrome://tracing
    python -m tools.profile_throughput runs/one --calibration mine.yaml  # constants for `megatron-dapo plan`

Speeds and shares are sums over rollout steps divided by sums, never means of means. The first step is left out: it
compiles kernels and begins with an empty buffer (`--skip`).
"""

import argparse
import heapq
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_dapo.config.base import ConfigError
from megatron_dapo.monitor.writer import MetricsError
from megatron_dapo.plan.scenario import load_calibration
from megatron_dapo.report.source import ReportError, Run
from tools.arguments import count, positive, share
from tools.calibrate import calibration_file
from tools.recorded_spans import Span, SpanError
from tools.throughput import Profile, as_json, markdown, model_shape_of, page, profile_run
from tools.timeline_figures import RecordedStep


def main(arguments: Sequence[str] | None = None) -> int:
    """Print or write the report; 2 if a folder holds no run that can be measured."""
    parser = argparse.ArgumentParser(prog="python -m tools.profile_throughput", description=__doc__.split("\n")[0])
    parser.add_argument("run", type=Path, nargs="+", help="one run directory, or two")
    parser.add_argument("--out", type=Path, help="write OUT.md, OUT.json and OUT.html instead of printing")
    parser.add_argument("--skip", type=count, default=1, help="rollout steps at first that do not count")
    parser.add_argument("--peak-flops", type=positive, help="of a GPU; else the calibration's, for a run on CUDA")
    parser.add_argument("--tail-share", type=share, default=0.5, help="below it of the most responses is the tail")
    parser.add_argument("--trace", type=Path, help="write the last recorded step in Chrome's trace form")
    parser.add_argument("--calibration", type=Path, help="write the planner's constants, those measured replaced")
    parser.add_argument("--base", type=Path, help="with --calibration: the constants that were not measured")
    parser.add_argument("--memory-bandwidth", type=positive, help="with --calibration: of a GPU, bytes/s")
    given = parser.parse_args(arguments)
    if len(given.run) > 2:
        parser.error("give one run directory, or two")
    peak = given.peak_flops or load_calibration().peak_flops
    try:
        runs = [Run(path) for path in given.run]
        profiles = [profile_run(run, skip=given.skip, peak_flops=peak, tail_share=given.tail_share) for run in runs]
        _write_pages(profiles, given.out)
        if given.trace is not None:
            _write_trace(profiles[0], given.trace)
        if given.calibration is not None:
            _write_calibration(runs[0], profiles[0], given)
    except (ConfigError, MetricsError, ReportError, SpanError) as error:
        print(error, file=sys.stderr)
        return 2
    except OSError as error:
        print(f"{error.filename}: {error.strerror}; name another file", file=sys.stderr)
        return 2
    return 0


def _write_pages(profiles: Sequence[Profile], out: Path | None) -> None:
    pages = {".md": markdown(profiles), ".json": as_json(profiles), ".html": page(profiles)}
    if out is None:
        print(pages[".md"], end="")
        return
    for ending, text in pages.items():
        Path(f"{out}{ending}").write_text(text, encoding="utf-8")


def _write_trace(profile: Profile, file: Path) -> None:
    if not profile.recorded:
        raise ReportError(
            f"{profile.name}: no recorded rollout step counts; set monitor.timeline_every, or lower --skip"
        )
    file.write_text(json.dumps(chrome_trace(profile.recorded[-1])) + "\n")


def chrome_trace(step: RecordedStep) -> dict[str, Any]:
    """The step in the form that chrome://tracing and ui.perfetto.dev open, {"traceEvents": [...]}: a process each for
    the coordinator, every server and every rank; microseconds since the step began. A server's requests overlap, so
    they are laid on as many tracks as ran at once."""
    zero = step.window[0]
    events: list[dict[str, Any]] = []
    events += _process(1, f"coordinator, rollout step {step.step}", {"phases": step.phases}, zero)
    number = 2
    for url, spans in sorted(step.requests.items()):
        tracks = {f"slot {at}": track for at, track in enumerate(tracks_without_overlap(spans))}
        events += _process(number, f"server {url}", tracks, zero)
        number += 1
    for rank in step.ranks:
        place = ", ".join(f"{axis} {rank.about[axis]}" for axis in ("tensor", "pipeline", "context", "data"))
        names = dict.fromkeys(span.track for span in rank.spans)
        tracks = {name: [span for span in rank.spans if span.track == name] for name in names}
        events += _process(number, f"{rank.process} ({place})", tracks, zero)
        number += 1
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def tracks_without_overlap(spans: Sequence[Span]) -> list[list[Span]]:
    """The spans on as few tracks as can be, never two at once on one."""
    tracks: list[list[Span]] = []
    free: list[tuple[float, int]] = []
    for span in sorted(spans, key=lambda span: span.start):
        if free and free[0][0] <= span.start:
            track = heapq.heappop(free)[1]
        else:
            track = len(tracks)
            tracks.append([])
        tracks[track].append(span)
        heapq.heappush(free, (span.end, track))
    return tracks


def _process(number: int, name: str, tracks: Mapping[str, Sequence[Span]], zero: float) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": number, "name": "process_name", "args": {"name": name}},
        {"ph": "M", "pid": number, "name": "process_sort_index", "args": {"sort_index": number}},
    ]
    for thread, (track, spans) in enumerate(tracks.items(), start=1):
        events.append({"ph": "M", "pid": number, "tid": thread, "name": "thread_name", "args": {"name": track}})
        events += [
            {
                "ph": "X",
                "pid": number,
                "tid": thread,
                "name": span.name,
                "ts": round(1e6 * (span.start - zero), 1),
                "dur": round(1e6 * span.seconds, 1),
                "args": dict(span.about),
            }
            for span in spans
        ]
    return events


def _write_calibration(run: Run, profile: Profile, given: argparse.Namespace) -> None:
    hf = model_shape_of(run)
    if hf is None:
        raise ReportError(f"{run.path}: manifest.json does not say which model it was")
    known = {"peak_flops": given.peak_flops, "memory_bandwidth": given.memory_bandwidth}
    named = {name: value for name, value in known.items() if value is not None}
    text = calibration_file(run, profile.recorded, hf, base=given.base, given=named)
    given.calibration.write_text(text)
    load_calibration(given.calibration)


if __name__ == "__main__":
    sys.exit(main())
