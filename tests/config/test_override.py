"""Overrides of whole sections, and whom an error in one of them blames."""

import pytest

from megatron_dapo.config import ConfigError, load_config
from megatron_dapo.config.load import load_with_sources

TEXT = """\
run: {dir: runs/x, rollout_steps: 1}
model: {path: m, context_length: 32768}
data: {path: d}
actor: {threads: 3, optimizer: {lr: 1e-4, betas: [0.9, 0.95]}}
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(TEXT)
    return path


def test_a_section_keeps_the_keys_that_its_override_does_not_name(file):
    given = "actor={threads: 2, optimizer: {eps: 0.5}}"
    config, lines = load_with_sources(file, [given])
    optimizer = config.actor.optimizer
    assert (config.actor.threads, optimizer.eps, optimizer.lr, optimizer.betas) == (2, 0.5, 1e-4, (0.9, 0.95))
    assert lines["actor", "optimizer", "lr"] == f"{file}:4"
    assert lines["actor", "optimizer", "eps"] == lines["actor", "threads"] == f"override {given!r}"


def test_an_empty_mapping_empties_what_the_file_has(file):
    file.write_text(f"{TEXT}reward: {{by_source: {{math: exact}}}}\n")
    assert load_config(file, ["reward.by_source={}"]).reward.by_source == {}
    assert load_config(file, ["reward.by_source.code=code"]).reward.by_source == {"math": "exact", "code": "code"}


def test_a_key_of_an_item_of_a_list_is_named_by_its_number(file):
    file.write_text(f"{TEXT}rollout: {{stages: [{{from_step: 2, temperature: 0.9}}, {{from_step: 3}}]}}\n")
    stages = load_config(file, ["rollout.stages.1.temperature=0.5", "rollout.stages.0.from_step=1"]).rollout.stages
    assert [(stage.from_step, stage.temperature) for stage in stages] == [(1, 0.9), (3, 0.5)]
    for given in ("rollout.stages.2.temperature=1", "rollout.stages.x.temperature=1", "rollout.stages.-1.from_step=1"):
        with pytest.raises(ConfigError, match="is neither a section nor an item of the list"):
            load_config(file, [given])
    with pytest.raises(ConfigError, match="give a key of the item, or the whole list"):
        load_config(file, ["rollout.stages.0={from_step: 1}"])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("model.path=\udcff", "in UTF-8"),
        ("foo.bar=3", "override 'foo.bar=3': foo: no such key"),
        ("run.seed.x=3", "override 'run.seed.x=3': run.seed = {'x': 3}"),
        ("data=&a {x: *a}", "override 'data=&a {x: \\*a}': the value is not valid YAML"),
    ],
)
def test_an_error_names_the_override_that_it_is_in(file, given, said):
    with pytest.raises(ConfigError, match=said):
        load_config(file, [given])


@pytest.mark.parametrize(
    ("key", "written", "read"),
    [
        ("data.answer_after", "####", "####"),
        ("data.instruction", "#### {form}", "#### {form}"),
        ("data.instruction", "End: # {form}", "End: # {form}"),
        ("data.instruction", "two\nlines", "two\nlines"),
        ("data.instruction", '"a\\nb"', "a\nb"),
        ("data.instruction", "null", None),
        ("data.instruction", "'null'", "null"),
        ("data.instruction", "%d *x @y", "%d *x @y"),
        ("data.template", "Q: {prompt}", "Q: {prompt}"),
        ("data.template", "{prompt} {prompt}", "{prompt} {prompt}"),
        ("run.dir", "a #b", "a #b"),
        ("run.dir", "123", "123"),
        ("reward.verifier", "robust:#### {answer}", "robust:#### {answer}"),
    ],
)
def test_a_text_is_taken_as_it_stands(file, key, written, read):
    """YAML would cut it at a `#`, or make a section or a number of it."""
    section, _, name = key.partition(".")
    config = load_config(file, [f"{key}={written}"])
    assert getattr(getattr(config, section), name) == read
    assert load_config(file, [f"actor.threads=2 # {written!r}"]).actor.threads == 2
