"""The tables of the answer rules: what each rule of rewriting does, and that no pattern is left over or missing."""

import re
import tomllib
from pathlib import Path

import pytest

import reward.answer
from reward.answer.text import Rewriting

ANSWER = Path(reward.answer.__file__).parent
TABLE = tomllib.loads((ANSWER / "patterns.toml").read_text("utf-8"))
EXAMPLES = [(section, *rule["example"]) for section, rules in TABLE.items() if type(rules) is list for rule in rules]


@pytest.mark.parametrize(("section", "text", "rewritten"), EXAMPLES)
def test_rewriting(section, text, rewritten):
    assert Rewriting(section)(text) == rewritten


def test_every_pattern_is_used_and_every_used_one_is_there():
    sources = "".join(file.read_text("utf-8") for file in ANSWER.parent.rglob("*.py"))
    here = {
        name for section, found in TABLE.items() if type(found) is dict and section != "fragments" for name in found
    }
    asked = set(re.findall(r'(?:_PATTERNS|_PROSE|_AROUND|OPTION)\["(\w+)"\]', sources))
    assert asked - {"fragments"} <= here <= set(re.findall(r'"(\w+)"', sources))
    referred = set(re.findall(r"\(\?&(\w+)\)", str(TABLE)))
    assert set(TABLE["fragments"]) == referred - {"hedges", "scales"}
