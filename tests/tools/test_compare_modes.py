"""The page that sets sync and async side by side."""

import json

from tools.compare_modes import measured, page


def finished(folder, training, accuracy, age):
    folder.mkdir(parents=True)
    ways = {way: {"accuracy": accuracy + more} for way, more in (("greedy", 0.1), ("sampled", 0.0))}
    summary = {
        "seconds": {"training": training},
        "heldout": {"after": ways},
        "tokens": {"generated": 300, "trained": 200},
    }
    phases = ("rollout", "reward", "logprob", "update", "weight_sync", "checkpoint", "step")
    step = {f"timing/{phase}": 1.5 for phase in phases} | {"sampling/expired": 2.0}
    steps = [
        step | {"staleness/mean": 0.0, "tokens/trained": 50},
        step | {"staleness/mean": age, "tokens/trained": 150},
    ]
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in steps))


def test_every_run_and_the_ratios_by_seed_are_on_the_page(tmp_path):
    """Finished runs are read, not run again."""
    for seed, seconds in ((0, 40.0), (1, 45.0)):
        finished(tmp_path / f"sync-{seed}", 60.0, 0.5, 0.0)
        finished(tmp_path / f"async-{seed}", seconds, 0.49, 1.0)
    done = [measured("c.yaml", mode, seed, tmp_path, ()) for seed in (0, 1) for mode in ("sync", "async")]
    text = page(done, "COMMAND")
    assert "| sync | 0 | 60.0 | 60.0 | 50.0 | 300 | 200 | 4 | 0.00 |" in text
    assert "| async | 1 | 45.0 | 59.0 | 49.0 | 300 | 200 | 4 | 0.75 |" in text
    assert "| update | 3.0 | 3.0 |" in text
    assert "sync over async, by seed: 1.50, 1.33." in text
    assert "Accuracy, sampled, async less sync, points: -1.0, -1.0." in text
