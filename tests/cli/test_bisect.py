"""`megatron-dapo bisect`: what it refuses before it starts anything."""

import shutil
from itertools import pairwise
from pathlib import Path

import pytest

from megatron_dapo.cli.bisect import BisectOptions, bisect_command
from megatron_dapo.cli.exit_codes import ExitCode
from megatron_dapo.diagnostics import log_prob_gap
from megatron_dapo.diagnostics.log_prob_gap import STAGES, StageGap
from tests.processes import ROOT

CONFIG = ROOT / "examples" / "quickstart" / "dapo.yaml"
OPTIONS = BisectOptions(responses=2, tokens=8, bound=None, skip=(), deadline_s=5.0)


def test_what_cannot_be_bisected_is_said(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(ROOT)
    assert bisect_command(tmp_path, [], OPTIONS) == ExitCode.CONFIG
    assert "no config.yaml there" in capsys.readouterr().err
    shutil.copy(CONFIG, tmp_path / "config.yaml")
    assert bisect_command(tmp_path, [], OPTIONS) == ExitCode.CONFIG
    assert "no weights in Hugging Face format" in capsys.readouterr().err
    unknown = BisectOptions(responses=2, tokens=8, bound=None, skip=("Megatron",), deadline_s=5.0)
    assert bisect_command(CONFIG, [], unknown) == ExitCode.CONFIG
    assert "'Megatron TP=1'" in capsys.readouterr().err


@pytest.mark.parametrize(("gap", "code"), [(1e-5, ExitCode.FINISHED), (0.2, ExitCode.INEXACT)])
def test_the_table_and_the_verdict(capsys, monkeypatch, gap: float, code: ExitCode) -> None:
    monkeypatch.chdir(ROOT)
    gaps = [
        StageGap(before=before, after=after, mean_abs=gap if at == 2 else 1e-6, max_abs=1.0, response=1, token=4)
        for at, (before, after) in enumerate(pairwise(STAGES))
    ]
    asked = []
    monkeypatch.setattr(log_prob_gap, "bisect", lambda request, say: asked.append(request) or gaps)
    assert bisect_command(CONFIG, [], OPTIONS) == code
    shown = capsys.readouterr().out
    assert all(each.after in shown for each in gaps)
    assert len(asked[0].prompts) == 2
    assert asked[0].max_new_tokens == 8
    assert ("the gap begins between Hugging Face float32 and Megatron TP=1" in shown) is (gap > 1e-3)
