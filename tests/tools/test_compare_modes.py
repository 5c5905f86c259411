"""The page that sets sync and async side by side."""

import json
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

from tools.compare_modes import deepened, measured, page, watched


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
    (folder / "busy.json").write_text("1.5")
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in steps))


def test_every_run_and_the_ratios_by_seed_are_on_the_page(tmp_path):
    """Finished runs are read, not run again."""
    for seed, seconds in ((0, 40.0), (1, 45.0)):
        finished(tmp_path / f"sync-{seed}", 60.0, 0.5, 0.0)
        finished(tmp_path / f"async-{seed}", seconds, 0.49, 1.0)
    done = [measured("c.yaml", mode, seed, tmp_path, ()) for seed in (0, 1) for mode in ("sync", "async")]
    text = page(done, "COMMAND")
    assert "| sync | 0 | 60.0 | 60.0 | 50.0 | 300 | 200 | 4 | 0.00 | 1.50 |" in text
    assert "| async | 1 | 45.0 | 59.0 | 49.0 | 300 | 200 | 4 | 0.75 | 1.50 |" in text
    assert "| update | 3.0 | 3.0 |" in text
    assert "sync over async, by seed: 1.50, 1.33." in text
    assert "Accuracy, sampled, async less sync, points: -1.0, -1.0." in text


def test_a_deeper_model_has_the_same_logits(tmp_path):
    """And more layers, whose weights other than the output projections are not zero, so that they can learn."""
    base = AutoModelForCausalLM.from_pretrained("examples/quickstart/base")
    deep = AutoModelForCausalLM.from_pretrained(deepened("examples/quickstart/base", tmp_path / "deep", 3))
    tokens = torch.arange(40).reshape(2, 20)
    assert deep.config.num_hidden_layers == len(deep.model.layers) == len(base.model.layers) + 3
    again = AutoModelForCausalLM.from_pretrained(deepened("examples/quickstart/base", tmp_path / "again", 3))
    assert all(torch.equal(one, other) for one, other in zip(deep.parameters(), again.parameters(), strict=True))
    torch.testing.assert_close(deep(tokens).logits, base(tokens).logits, rtol=0, atol=1e-5)
    assert all(layer.mlp.up_proj.weight.abs().max() > 0.01 for layer in deep.model.layers)


def test_busy_cores_are_those_of_the_steps(tmp_path):
    """A program that computes between its first and its last line keeps about one core busy; others may too."""
    metrics = tmp_path / "metrics.jsonl"
    work = f"""
import time
line = lambda: open({str(metrics)!r}, "a").write("{{}}\\n")
time.sleep(0.5); line(); end = time.monotonic() + 1.5
while time.monotonic() < end: pass
line(); time.sleep(0.5)
"""
    assert watched([sys.executable, "-c", work], metrics) > 0.5


def test_a_run_that_fails_ends_the_comparison(tmp_path):
    """With its exit code and command."""
    with pytest.raises(SystemExit, match="exit 3: "):
        watched([sys.executable, "-c", "import sys; sys.exit(3)"], tmp_path / "metrics.jsonl")


def test_a_run_that_was_not_watched_is_still_on_the_page(tmp_path):
    finished(tmp_path / "sync-0", 60.0, 0.5, 0.0)
    finished(tmp_path / "async-0", 50.0, 0.5, 0.0)
    (tmp_path / "sync-0" / "busy.json").unlink()
    text = page([measured("c.yaml", mode, 0, tmp_path, ()) for mode in ("sync", "async")], "COMMAND")
    assert "| 0.00 | nan |" in text
    assert "| 0.00 | 1.50 |" in text
