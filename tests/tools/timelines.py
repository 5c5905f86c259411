"""A made-up recorded rollout step, whose figures can be worked out by hand."""

from pathlib import Path

from megatron_dapo.monitor.timeline import SpanFile

ZERO = 1000.0


def write_timeline(
    run: Path, step: int, *, pipeline: int = 1, data: int = 1, tensor: int = 1, slow: float = 1.0, requests: int = 4
) -> None:
    """Rollout from 0 to 40 s, log-probs to 50 s, update to 90 s, weight sync to 100 s, all after `ZERO`.

    Each rank's update has two optimizer steps of 20 s: 16 s of schedule with two micro-batches (2 s forward, 4 s
    backward each; `slow` times that on the last data-parallel rank) and 1 s of gradient sum in it, then 3 s of
    optimizer. Request r runs from 0 to 10 (r + 1) s and has 10 (r + 1) tokens.
    """
    coordinator = SpanFile(run, "coordinator")
    coordinator.begin(step)
    edges = {"rollout": (0, 40), "logprob": (40, 50), "update": (50, 90), "weight_sync": (90, 100)}
    for name, (start, end) in edges.items():
        coordinator.add("phases", name, ZERO + start, ZERO + end)
    for at in range(requests):
        tokens = 10 * (at + 1)
        coordinator.add(
            "server http://a:1", f"p{at // 2}-v0-s{at % 2}.", ZERO, ZERO + tokens, prompt=5, tokens=tokens, version=0
        )
    coordinator.write()
    ranks = [(t, p, d) for p in range(pipeline) for d in range(data) for t in range(tensor)]
    for number, (t, p, d) in enumerate(ranks):
        about = {"rank": number, "tensor": t, "pipeline": p, "context": 0, "data": d, "stages": pipeline, "chunks": 1}
        _write_rank(run, number, about, step, slow if d == data - 1 else 1.0, tensor)


def _write_rank(run: Path, number: int, about: dict, step: int, slow: float, tensor: int) -> None:
    rank = SpanFile(run, f"rank{number}", about)
    rank.begin(step)
    rank.add("calls", "log_probs", ZERO + 41, ZERO + 49, peak_bytes=2_000_000, memory="device")
    rank.add("log_probs", "forward-compute", ZERO + 42, ZERO + 48, tokens=600)
    rank.add("calls", "update", ZERO + 50, ZERO + 90, peak_bytes=5_000_000 + number, memory="device")
    for start in (50, 70):
        at = ZERO + start
        rank.add("update", "forward-backward", at, at + 16)
        for _ in range(2):
            rank.add("update", "forward-compute", at, at + 2 * slow, tokens=300)
            rank.add("update", "backward-compute", at + 2 * slow, at + 6 * slow)
            at += 6 * slow
        rank.add("update", "all-grads-sync", ZERO + start + 15, ZERO + start + 16)
        rank.add("update", "optimizer", ZERO + start + 16, ZERO + start + 19)
    if tensor > 1:
        rank.add("probe", "all-reduce", ZERO + 90, ZERO + 90.1, bytes=300 * 64 * 4, ranks=tensor, seconds=0.01)
    rank.add("calls", "write", ZERO + 90, ZERO + 94, peak_bytes=1_000_000, memory="device")
    rank.write()
