"""`megatron-dapo replay`: its verdict. tests/end_to_end/test_quickstart.py computes a step again."""

import pytest
import typer

from megatron_dapo.cli import replay
from megatron_dapo.cli.exit_codes import ExitCode
from tests.processes import ROOT

CONFIG = ROOT / "examples" / "quickstart" / "dapo.yaml"


@pytest.mark.parametrize(
    ("now", "tolerance", "code"),
    [(2.0, 0.0, ExitCode.FINISHED), (2.0 + 1e-9, 0.0, ExitCode.INEXACT), (2.0 + 1e-9, 1e-6, ExitCode.FINISHED)],
)
def test_a_step_is_the_same_within_the_tolerance(tmp_path, monkeypatch, capsys, now, tolerance, code):
    (tmp_path / "config.yaml").write_text(CONFIG.read_text())
    values = {"loss": (2.0, now), "grad_norm": (1.0, 1.0)}
    monkeypatch.setattr("megatron_dapo.diagnostics.step_replay.replay_step", lambda *_, **__: values)
    with pytest.raises(typer.Exit) as ended:
        replay.replay(tmp_path, step=3, tolerance=tolerance, deadline=1.0)
    assert ended.value.exit_code == code
    said = "comes out the same" if code == ExitCode.FINISHED else "does NOT come out the same"
    assert f"step 3 {said}" in capsys.readouterr().out
