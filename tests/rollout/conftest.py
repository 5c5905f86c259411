"""Folders of weights that fleets publish in tests."""

from pathlib import Path

import pytest

from tests.rollout.folders import save_model


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Weights of versions 1, 2, 3."""
    root = tmp_path_factory.mktemp("weights")
    for seed in (1, 2, 3):
        save_model(root / str(seed), "qwen3", seed, num_hidden_layers=1)
    return [root / str(seed) for seed in (1, 2, 3)]
