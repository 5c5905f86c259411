"""The recipes, and the constants that come with the package."""

from pathlib import Path

import pytest

from megatron_dapo.plan.scenario import Calibration, load_calibration

RECIPES = Path(__file__).parents[2] / "examples" / "qwen2.5_32b"
MIXTURES = Path(__file__).parents[2] / "examples" / "qwen3_30b_a3b"


@pytest.fixture(scope="session")
def constants() -> Calibration:
    return load_calibration()
