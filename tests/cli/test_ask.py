"""`megatron-dapo ask`: what it refuses."""

import pytest

from megatron_dapo.cli.ask import ask
from megatron_dapo.config import ConfigError
from tests.processes import ROOT


def test_an_empty_prompt_is_refused_in_words():
    with pytest.raises(ConfigError, match="the prompt is empty"):
        ask(ROOT / "examples" / "quickstart" / "base", "", 8, 0.0)
