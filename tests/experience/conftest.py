"""A tokenizer with a chat template that keeps earlier turns, and environments of a user's own."""

import pytest

from megatron_dapo.data.tokenizer import load_text_tools
from tests.experience.chat_models import ENVIRONMENTS, KEEPING, save_model


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    return load_text_tools(save_model(tmp_path_factory.mktemp("chat") / "model", KEEPING))


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "own_episodes.py").write_text(ENVIRONMENTS)
    monkeypatch.syspath_prepend(tmp_path)
    return "own_episodes:{}".format
