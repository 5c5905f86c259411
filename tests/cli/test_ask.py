"""`megatron-dapo ask`: what it refuses."""

from megatron_dapo.cli.ask import ask_command
from megatron_dapo.cli.exit_codes import ExitCode
from tests.processes import ROOT


def test_an_empty_prompt_is_refused_in_words(capsys):
    base = ROOT / "examples" / "quickstart" / "base"
    assert ask_command(base, "", 8, 0.0) is ExitCode.CONFIG
    assert "the prompt is empty" in capsys.readouterr().err
