"""Made-up folders of ladder runs."""

import json
from pathlib import Path

from examples.ablation.rungs import Place, Planned, plan
from megatron_dapo.config import dump_config
from megatron_dapo.config.load import load_config
from tests.monitor.runs import metrics

STEPS = 6


def planned(folder: Path, rungs: list[str], seeds: list[int], *, steps: int = STEPS) -> list[Planned]:
    return plan(Place(folder=folder), rungs, seeds, steps=steps)


def begin(run: Planned) -> None:
    """What a run leaves that was killed before its first checkpoint."""
    run.folder.mkdir(parents=True)
    (run.folder / "ledger.jsonl").write_text('{"event": "dispatched"}\n')
    (run.folder / "config.yaml").write_text(dump_config(run.config()))


def finish(run: Planned, *, sampled: float, entropy: float = 0.1, tokens: int = 1000, wall: float = 100.0) -> None:
    """A finished run with that held-out accuracy, entropy and tokens a step."""
    if not run.folder.exists():
        begin(run)
    steps = load_config(run.folder / "config.yaml").run.rollout_steps
    lines = [
        line | {"entropy": entropy, "tokens/generated": tokens, "tokens/trained": tokens, "sampling/generated": 32}
        for line in metrics(steps)
    ]
    (run.folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    ways = {"sampled": {"accuracy": sampled}, "greedy": {"accuracy": sampled + 0.1}}
    summary = {
        "rollout_steps": steps,
        "heldout": {"before": ways, "baseline": None, "after": ways},
        "tokens": {"generated": steps * tokens},
        "seconds": {"training": 60.0, "step": 60.0},
    }
    decided = [
        {"event": event, "prompt": 4 * step + at, "rollout_step": step, "correct": correct, "tokens": 1}
        for step in range(1, steps + 1)
        for at, (event, correct) in enumerate((("trained", 3), ("trained", 0), ("filtered", 8), ("carried", 0)))
    ]
    (run.folder / "ledger.jsonl").write_text("".join(json.dumps(event) + "\n" for event in decided))
    (run.folder / "summary.json").write_text(json.dumps(summary))
    (run.folder / "ladder_seconds.json").write_text(json.dumps({"wall": wall}))
