"""One rollout step of all processes in Chrome's trace form: chrome://tracing and ui.perfetto.dev open it."""

import heapq
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_dapo.diagnostics.recorded_spans import Span
from tools.timeline_figures import RecordedStep


def chrome_trace(step: RecordedStep) -> dict[str, Any]:
    """{"traceEvents": [...]}: a process each for the coordinator, every server and every rank; microseconds since the
    step began. A server's requests overlap, so they are laid on as many tracks as ran at once."""
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
