"""Made-up run directories for the tests of report and status."""

import json
from pathlib import Path

from tests.monitor.runs import metrics, summary

HOSTILE = "</pre><script>document.title='pwned'</script><img src=http://x.invalid/a onerror=alert(1)><b>7</b>"

CONFIG = """\
run: {dir: runs/x, rollout_steps: 12}
model: {path: base, context_length: 128}
data: {path: train.jsonl, max_prompt_tokens: 64}
evaluation: {path: heldout.jsonl}
algorithm:
  clip: {high: 0.25}
  overlong: {buffer: 12}
rollout: {max_new_tokens: 64}
"""

LEDGER = [
    ("dispatched", 0, {}),
    ("finished", 0, {"tokens": 100, "correct": 3}),
    ("trained", 0, {"tokens": 100, "correct": 3}),
    ("dispatched", 1, {}),
    ("finished", 1, {"tokens": 10, "correct": 8}),
    ("filtered", 1, {"tokens": 10, "correct": 8}),
    ("dispatched", 2, {}),
    ("finished", 2, {"tokens": 20, "correct": 0}),
    ("filtered", 2, {"tokens": 20, "correct": 0}),
    ("dispatched", 3, {}),
    ("finished", 3, {"tokens": 40, "correct": 2}),
    ("carried", 3, {"tokens": 40, "correct": 2}),
    ("dispatched", 3, {}),
    ("finished", 3, {"tokens": 44, "correct": 2}),
    ("carried", 3, {"tokens": 44, "correct": 2}),
    ("dispatched", 4, {}),
]
"""Every outcome once; prompt 3 had become too old and was generated again."""


def write_run(folder: Path, *, finished: bool = True, steps: int = 12, parameters: int = 853376) -> Path:
    """A run directory with every file that a report reads."""
    folder.mkdir(parents=True, exist_ok=True)
    write_lines(folder / "metrics.jsonl", metrics()[:steps])
    (folder / "config.yaml").write_text(CONFIG)
    manifest = {"started": "2026-01-02", "trainer": {"parameters": parameters}, "versions": {"torch": "2", "ray": None}}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    heldout = summary()["heldout"]
    before = {
        part: {way: {"figures": figures, "texts": []} for way, figures in heldout[part].items()}
        for part in ("before", "baseline")
    }
    (folder / "heldout_before.json").write_text(json.dumps(before))
    if finished:
        (folder / "summary.json").write_text(json.dumps(summary()))
    events = [
        {"event": event, "prompt": prompt, "rollout_step": 1, "weight_version": 0, **details}
        for event, prompt, details in LEDGER
    ]
    write_lines(folder / "ledger.jsonl", events)
    samples = [
        {"rollout_step": step, "prompt": step, "response": HOSTILE, "accuracy": step % 2 == 0, "extracted": "<i>"}
        for step in range(1, steps + 1)
    ]
    write_lines(folder / "samples.jsonl", samples)
    return folder


def write_lines(path: Path, lines: list[dict]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
