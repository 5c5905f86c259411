"""`python -m tools.bisect`: what it refuses before it starts anything."""

import math
import shutil
from itertools import pairwise
from pathlib import Path

import pytest
import typer

from megatron_dapo.cli.exit_codes import ExitCode
from megatron_dapo.config import ConfigError
from megatron_dapo.diagnostics.evaluation_session import EvaluationError
from tests.processes import ROOT
from tools import bisect as bisecting
from tools.bisect import STAGES, StageGap, bisect

CONFIG = ROOT / "examples" / "quickstart" / "dapo.yaml"


def exit_code(source: Path, **options: object) -> int:
    with pytest.raises(typer.Exit) as ended:
        bisect(source, responses=2, tokens=8, deadline=5.0, **options)
    return ended.value.exit_code


def test_what_cannot_be_bisected_is_said(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(ConfigError, match=r"No such file"):
        bisect(tmp_path)
    shutil.copy(CONFIG, tmp_path / "config.yaml")
    with pytest.raises(EvaluationError, match="no weights in Hugging Face format"):
        bisect(tmp_path)
    with pytest.raises(ConfigError, match="'Megatron TP=1'"):
        bisect(CONFIG, skip=["Megatron"])


@pytest.mark.parametrize(
    ("gap", "code"), [(1e-5, ExitCode.FINISHED), (0.2, ExitCode.INEXACT), (math.nan, ExitCode.INEXACT)]
)
def test_the_table_and_the_verdict(capsys, monkeypatch, gap: float, code: ExitCode) -> None:
    monkeypatch.chdir(ROOT)
    gaps = [
        StageGap(before=before, after=after, mean_abs=gap if at == 2 else 1e-6, max_abs=1.0, response=1, token=4)
        for at, (before, after) in enumerate(pairwise(STAGES))
    ]
    asked = []
    monkeypatch.setattr(bisecting, "find_gaps", lambda *request, **_: asked.append(request) or gaps)
    assert exit_code(CONFIG) == code
    shown = capsys.readouterr().out
    assert all(each.after in shown for each in gaps)
    _, prompts, sampling = asked[0]
    assert len(prompts) == 2
    assert sampling.max_new_tokens == 8
    assert ("the gap begins between Hugging Face float32 and Megatron TP=1" in shown) is (code == ExitCode.INEXACT)
