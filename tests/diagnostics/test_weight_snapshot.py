"""Weights kept while the run removes its own; what tells two versions apart."""

import os
import shutil

import pytest
import torch
from safetensors.torch import save_file

from megatron_dapo.diagnostics.evaluation_session import (
    EvaluationError,
    fingerprint,
    newest_weights,
    snapshot,
    versions,
)


def model(folder, weights=None):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    save_file(weights or {"a": torch.ones(30)}, folder / "model.safetensors")
    return folder


def test_a_snapshot_outlives_its_source(tmp_path):
    source = model(tmp_path / "v3")
    before = fingerprint(source)
    assert snapshot(source, tmp_path / "kept" / "v3")
    shutil.rmtree(source)
    assert fingerprint(tmp_path / "kept" / "v3") == before


def test_without_hard_links_it_is_copied(tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError

    monkeypatch.setattr(os, "link", refuse)
    source = model(tmp_path / "v3")
    assert snapshot(source, tmp_path / "kept" / "v3")
    assert (tmp_path / "kept" / "v3" / "model.safetensors").stat().st_ino != (
        source / "model.safetensors"
    ).stat().st_ino
    assert fingerprint(tmp_path / "kept" / "v3") == fingerprint(source)


def test_a_version_that_goes_away_meanwhile_leaves_nothing(tmp_path, monkeypatch):
    source, link = model(tmp_path / "v3"), os.link

    def remove_then_link(one, other):
        (source / "model.safetensors").unlink(missing_ok=True)
        link(one, other)

    monkeypatch.setattr(os, "link", remove_then_link)
    assert not snapshot(source, tmp_path / "kept" / "v3")
    assert not (tmp_path / "kept" / "v3").exists()
    assert not snapshot(tmp_path / "nowhere", tmp_path / "kept" / "v4")


def test_another_step_of_training_shows_and_other_files_of_the_same_weights_do_not(tmp_path):
    weights = {"a": torch.ones(500, 20), "b": torch.zeros(7)}
    prints = [fingerprint(model(tmp_path / "first", weights)), fingerprint(model(tmp_path / "again", weights))]
    for name in weights:
        prints.append(fingerprint(model(tmp_path / name, weights | {name: weights[name] + 1e-7})))
    (tmp_path / "again" / "config.json").write_text('{"rope_theta": 1}')
    prints.append(fingerprint(tmp_path / "again"))
    assert prints[0] == prints[1]
    assert len(set(prints)) == 4


def test_a_folder_without_a_model_is_refused_with_the_way_out(tmp_path):
    with pytest.raises(EvaluationError, match="convert_checkpoint"):
        fingerprint(tmp_path)


def test_versions_are_numbers(tmp_path):
    for name in ("v10", "v2", "v3.tmp", "very"):
        (tmp_path / name).mkdir()
    assert versions(tmp_path) == [2, 10]


def test_the_newest_weights_of_a_run(tmp_path):
    with pytest.raises(EvaluationError, match="no weights in Hugging Face format"):
        newest_weights(tmp_path)
    for version in (9, 10):
        (tmp_path / "weights" / f"v{version}").mkdir(parents=True)
        (tmp_path / "weights" / f"v{version}" / "config.json").write_text("{}")
    (tmp_path / "weights" / "v11").mkdir()  # begun and not ended
    assert newest_weights(tmp_path) == (tmp_path / "weights" / "v10", 10)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    assert newest_weights(tmp_path) == (tmp_path / "weights" / "v10", 10), "its export may not be whole yet"
    (tmp_path / "summary.json").write_text("{}")
    assert newest_weights(tmp_path) == (tmp_path / "model", None)
