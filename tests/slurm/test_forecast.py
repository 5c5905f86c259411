"""What `megatron-dapo slurm` takes from the plan: the warning, what a lost job costs, and that a run does not fit."""

import math
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megatron_dapo.cli.main import app
from megatron_dapo.config import ConfigError, load_config
from megatron_dapo.plan.planner import Plan, make_plan
from megatron_dapo.plan.rank_state import model_parameters
from megatron_dapo.plan.scenario import Scenario, load_calibration, model_dimensions
from megatron_dapo.slurm.forecast import MARGIN, saving_seconds, warning_and_notes

RECIPES = Path(__file__).parents[2] / "examples" / "qwen2.5_32b"
FITTING = [file for file in sorted(RECIPES.glob("*.yaml")) if file.stem not in ("paper", "verl")]
FITTING += sorted((RECIPES.parent / "qwen3_30b_a3b").glob("*.yaml"))


def planned(name: str, folder: Path = RECIPES) -> Plan:
    config = load_config(folder / f"{name}.yaml")
    return make_plan(Scenario(config, model_dimensions(config.model.path)[0], load_calibration()))


@pytest.mark.parametrize("file", FITTING, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_a_recipe_saves_often_enough_and_is_warned_in_time(file):
    """A lost job costs an hour at most, or one step where that is longer; the warning outlasts update and save."""
    plan = planned(file.stem, file.parent)
    config = plan.case.config
    every, seconds = config.run.checkpoint_every, plan.step.seconds
    assert every == max(1, 3600 // seconds)
    state = model_parameters(plan.case.hf) * (4 + 8 + 2)  # master weights, moments, weights
    saving = saving_seconds(plan.case, plan.step)
    assert saving > plan.step.update_s + plan.step.sync_s + state / plan.case.constants.disk_write
    assert warning_and_notes(config, None, 24 * 3600, gpus=True) == (max(600, int(MARGIN * saving)), [])
    assert MARGIN * saving < 6 * 3600


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("h100_32", ["--warn=600"], "--warn 600: by the plan update and checkpoint take 17"),
        (
            "h100_32",
            ["run.checkpoint_every=10", "run.checkpoint_minutes=0"],
            "run.checkpoint_every, checkpoint_minutes: by the plan a lost job costs up to <10 steps> hours",
        ),
        ("h100_32", ["run.checkpoint_every=0", "run.checkpoint_minutes=0"], "a lost job costs up to <600 steps> hours"),
        ("h100_32", ["run.checkpoint_every=0", "run.checkpoint_minutes=240"], "a lost job costs up to <2 steps> hours"),
        (
            "paper",
            [],
            "says that this run does not fit: trainer, pipeline stage 0, update: needs 1167 of 16 GB",
        ),
        (
            "h100_16",
            ["--time=3:00:00"],
            "--time: by the plan a step takes 2.9 hours; jobs end in rollouts, and go on there",
        ),
        ("h100_32", ["model.path=models/own"], "no plan of this run (model.path = models/own"),
        ("h100_32", ["--gpus-per-node=0"], "it knows GPUs only"),
    ],
)
def test_the_command_says_what_the_plan_says(name, arguments, said, tmp_path):
    command = ["slurm", str(RECIPES / f"{name}.yaml"), f"run.dir={tmp_path}/run", "--time=48:00:00", *arguments]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    step_h = planned(name).step.seconds / 3600 if "steps>" in said else math.nan
    assert re.sub(r"<(\d+) steps>", lambda found: f"{int(found[1]) * step_h:.1f}", said) in done.stderr
    assert "#SBATCH --signal=B:USR1@" in done.stdout
    assert "note:" not in done.stdout


def test_more_seconds_than_sbatch_takes_are_refused_with_the_limit(tmp_path):
    words = ["slurm", str(RECIPES / "h100_32.yaml"), f"run.dir={tmp_path}/run", "--gpus-per-node=0", "--time=9-0"]
    refused = CliRunner().invoke(app, [*words, "--warn=65536"])
    assert refused.exit_code == 2
    assert "65535" in refused.stderr
    assert "#SBATCH --signal=B:USR1@65535\n" in CliRunner().invoke(app, [*words, "--warn=65535"]).stdout


def test_slurm_finds_the_log_folder_however_the_script_was_made(tmp_path):
    run = CliRunner().invoke
    command = ["slurm", str(RECIPES / "h100_32.yaml")]
    script = run(app, [*command, f"run.dir={tmp_path}/a", "--sbatch=partition=h100"]).stdout
    assert script.startswith("#!")
    assert "\n#SBATCH --partition=h100\n" in script, "sbatch takes no option without its dashes"
    assert run(app, [*command, f"run.dir={tmp_path}/b", f"--out={tmp_path}/new/script"]).exit_code == 0
    refused = run(app, [*command, f"run.dir={tmp_path}/b", f"--out={tmp_path}/new/script/inside"]).exception
    assert isinstance(refused, ConfigError)
    assert "name another place" in str(refused)
    assert (tmp_path / "a" / "logs").is_dir()
    assert (tmp_path / "b" / "logs").is_dir()


@pytest.mark.parametrize("every", [0, 10])
@pytest.mark.parametrize("file", FITTING, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_a_config_that_sets_no_checkpoints_costs_no_more_than_the_recipe(file, every):
    config = load_config(file, [f"run.checkpoint_every={every}"])
    assert warning_and_notes(config, None, 24 * 3600, gpus=True)[1] == []
