"""The smallest config, and a file of it."""

from pathlib import Path

import pytest

MINIMAL = """\
run: {dir: runs/x, rollout_steps: 3}
model: {path: base, context_length: 22528}
data: {path: train.jsonl}
evaluation: {path: heldout.jsonl}
"""


@pytest.fixture
def file(tmp_path):
    def write(text: str = "") -> Path:
        path = tmp_path / "config.yaml"
        path.write_text(MINIMAL + text)
        return path

    return write
