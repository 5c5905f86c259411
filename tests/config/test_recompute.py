"""`actor.recompute`: what it may be."""

import pytest

from megatron_dapo.config import ConfigError, load_config
from tests.processes import ROOT

CONFIG = ROOT / "examples" / "quickstart" / "dapo.yaml"


@pytest.mark.parametrize(
    ("given", "value"), [("none", "none"), ("full", "full"), ("7", 7), ("[mlp, core_attn]", ("mlp", "core_attn"))]
)
def test_a_word_a_number_or_a_list_is_taken(given, value):
    assert load_config(CONFIG, [f"actor.recompute={given}"]).actor.recompute == value


@pytest.mark.parametrize("given", ["selective", "0", "-1", "1.5", "true", "[]", "[mlp, attention]", "null", '"3"'])
def test_all_else_is_refused_in_one_line(given):
    with pytest.raises(ConfigError) as refused:
        load_config(CONFIG, [f"actor.recompute={given}"])
    assert str(refused.value).count("\n") == 1
    assert "must be none, full, a number of layers, or a list of mlp, moe, layernorm, core_attn" in str(refused.value)


def test_a_part_that_is_named_twice_is_refused():
    with pytest.raises(ConfigError, match=r"actor\.recompute = \['mlp', 'mlp'\]: must name each part once"):
        load_config(CONFIG, ["actor.recompute=[mlp, mlp]"])
