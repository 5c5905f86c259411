"""Every shipped recipe that names a machine: its telling ranks, with TransformerEngine's layers."""

from importlib.metadata import version
from pathlib import Path
from typing import Literal

import pytest

from megatron_dapo.cli.exit_codes import ExitCode
from megatron_dapo.config import load_config
from megatron_dapo.plan.scenario import load_calibration, model_dimensions
from tests.symbolic.__main__ import report
from tests.symbolic.conftest import NO_MACHINE
from tests.symbolic.findings import Findings
from tests.symbolic.rank_processes import chosen_ranks, trace_ranks

FOLDER = Path(__file__).parents[2] / "examples" / "qwen2.5_32b"
RECIPES = [file for file in sorted(FOLDER.glob("*.yaml")) if file.stem not in NO_MACHINE]
pytestmark = [pytest.mark.symbolic, pytest.mark.usefixtures("cuda_wheels"), pytest.mark.timeout(3600)]


def findings_of(path: Path, layers: Literal["te", "local"] = "te") -> Findings:
    config = load_config(path)
    traces = trace_ranks(path, [], chosen_ranks("", config.actor.layout), layers=layers, jobs=2)
    return Findings(traces, config, model_dimensions(config.model.path)[0], load_calibration())


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda file: file.stem)
def test_a_recipe_s_ranks_agree_and_hold_what_is_planned(recipe: Path, page: dict[str, str]) -> None:
    findings = findings_of(recipe)
    page[recipe.stem] = findings.tables()
    page["versions"] = ", ".join(f"{name} {version(name)}" for name in ("torch", "megatron-core", "transformer-engine"))
    assert not findings.faults, "\n".join(findings.faults)


def test_local_layers_agree_too() -> None:
    findings = findings_of(FOLDER / "h100_32.yaml", layers="local")
    assert not findings.disagreements, "\n".join(findings.disagreements)
    assert all(reason for _, reason in findings.waits.values()), findings.waits


def test_the_command_on_all_ranks_finds_no_fault(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layout = ["actor.layout.tensor=1", "actor.layout.pipeline=2", "actor.layout.data=2"]
    overrides = [*layout, "actor.layout.sequence_parallel=false", "actor.recompute=none", f"model.path={tiny}"]
    recipe = FOLDER / "qwen2.5_7b_8gpu.yaml"
    code = report(recipe, overrides, ranks="all", layers="te", jobs=2)
    told = capsys.readouterr().out
    assert code == ExitCode.FINISHED, told
    assert "No fault was found." in told
