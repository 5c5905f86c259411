"""Whole plans: every recipe, what does not fit and what is said then."""

import dataclasses
import itertools
import json
import re
import subprocess
import sys

import numpy as np
import pytest
from typer.testing import CliRunner

from megatron_dapo.cli.main import app
from megatron_dapo.config import ConfigError, load_config
from megatron_dapo.plan.memory import trainer_memory
from megatron_dapo.plan.planner import least_recompute, make_plan
from megatron_dapo.plan.rollout import groups
from megatron_dapo.plan.scenario import BUILT_IN, Scenario, changed, model_dimensions
from megatron_dapo.plan.trainer_time import update_time
from tests.plan.conftest import MIXTURES, RECIPES
from tools.plan_search import possible

FITTING = {
    "h100_16_colocated": 16,
    "h100_32_colocated": 32,
    "h100_128_colocated": 128,
    "h100_16": 16,
    "h100_32": 32,
    "h100_128": 128,
    "qwen2.5_7b_8gpu": 8,
    "qwen2.5_1.5b_1gpu": 1,
}
WITHOUT_LAYOUT = {"paper", "verl"}


def planned(constants, recipe: str, changes: dict | None = None, **assumed):
    config = changed(load_config(RECIPES / f"{recipe}.yaml"), changes or {})
    hf = model_dimensions(config.model.path)[0]
    return make_plan(Scenario(config, hf, dataclasses.replace(constants, **assumed)), steps=1)


def test_every_recipe_is_planned_here():
    assert {file.stem for file in RECIPES.glob("*.yaml")} == set(FITTING) | WITHOUT_LAYOUT


@pytest.mark.parametrize("recipe", FITTING)
def test_a_recipe_with_a_layout_fits_on_its_gpus(recipe, constants):
    plan = planned(constants, recipe)
    assert not plan.misfits
    assert plan.case.config.actor.recompute == least_recompute(plan.case), (
        "no more is computed again than memory asks for"
    )
    assert plan.step.gpus == FITTING[recipe]
    assert plan.step.optimizer_steps == 16
    assert plan.step.trained_tokens < plan.step.generated_tokens
    assert 0.05 < plan.step.mfu < constants.train_efficiency
    steps = 400 if "7b" in recipe or "1.5b" in recipe else 600
    assert plan.gpu_hours == pytest.approx(plan.step.seconds * steps * FITTING[recipe] / 3600)


@pytest.mark.parametrize("recipe", sorted(WITHOUT_LAYOUT))
def test_one_without_a_layout_does_not(recipe, constants):
    config = load_config(RECIPES / f"{recipe}.yaml")
    hf = BUILT_IN["Qwen2.5-32B"]
    plan = make_plan(Scenario(config, hf, constants))
    assert {misfit.part for misfit in plan.misfits} == {"trainer", "server"}


@pytest.mark.parametrize(
    ("file", "gpu_memory", "least"),
    [
        (RECIPES / "h100_32.yaml", 150e9, "none"),
        (RECIPES / "h100_32.yaml", 60e9, 6),
        (RECIPES / "h100_32.yaml", 20e9, "full"),
        (RECIPES / "h100_16.yaml", 48e9, ("mlp",)),
        (MIXTURES / "h100_16.yaml", 80e9, ("layernorm",)),
        (MIXTURES / "h100_16.yaml", 78e9, 3),
    ],
    ids=str,
)
def test_the_least_recompute_is_the_fastest_that_leaves_the_spare_part(file, gpu_memory, least, constants):
    """Of all that can be set, tried one by one, in the time of a mini-batch."""
    config = load_config(file)
    case = Scenario(
        config, model_dimensions(config.model.path)[0], dataclasses.replace(constants, gpu_memory=gpu_memory)
    )
    drawn = groups(case.workload, seed=3)
    lengths = np.array([length for _ in range(32) for length in next(drawn).lengths])
    layers = case.hf.num_layers // config.actor.layout.pipeline
    parts = [part for size in (1, 2) for part in itertools.combinations(("mlp", "moe", "layernorm"), size)]
    seconds = {}
    for amount in ("none", *range(1, layers), *parts, "full"):
        one = case.changed({"actor.recompute": amount})
        if possible(one):
            ranks = trainer_memory(one)
            if amount == "full" or max(rank.peaks["update"] for rank in ranks) <= 0.95 * gpu_memory:
                seconds[amount] = update_time(one, lengths, ranks[0].state).seconds
    assert least_recompute(case) == least == min(seconds, key=seconds.get)


def test_an_output_layer_in_float32_costs_time_on_both_sides_and_memory_on_the_servers(constants):
    usual, wide = (planned(constants, "h100_32", {"model.fp32_head": told}) for told in (False, True))
    assert not wide.misfits
    assert wide.step.rollout_s > usual.step.rollout_s
    assert wide.step.update_s > usual.step.update_s
    assert wide.step.mfu < usual.step.mfu, "no more work of the model is done"
    full = {"model.fp32_head": True, "rollout.memory_fraction": 0.93, "rollout.weight_sync": "disk"}
    [misfit] = planned(constants, "h100_32", full).misfits
    assert misfit.what == "framework and the output layer in float32, outside memory_fraction"
    assert misfit.needed == constants.framework_memory + wide.server.head


def test_longer_responses_and_a_lower_pass_rate_cost_time(constants):
    usual = planned(constants, "h100_128").step
    assert planned(constants, "h100_128", mean_response=8000.0).step.rollout_s > 1.3 * usual.rollout_s
    rare = planned(constants, "h100_128", pass_rate=0.25).step
    assert rare.generated_groups > 1.5 * usual.generated_groups
    assert rare.seconds > usual.seconds


@pytest.mark.parametrize(("pass_rate", "said"), [("0.05", "such a run stops"), ("0.4", "")])
def test_a_run_that_would_stop_at_the_limit_of_over_sampling_is_told(capsys, pass_rate, said):
    shown = CliRunner().invoke(app, ["plan", str(RECIPES / "h100_32.yaml"), "--pass-rate", pass_rate]).output
    assert ("Over-sampling ends at its limit with" in shown) == bool(said)
    assert said in shown


def test_without_dynamic_sampling_nothing_is_generated_in_vain(constants):
    step = planned(constants, "h100_128", {"algorithm.dynamic_sampling.filter": "off"}).step
    assert step.generated_groups == 512
    assert step.generated_tokens == step.trained_tokens


def test_a_layout_that_does_not_divide_the_model_is_refused(constants):
    with pytest.raises(ConfigError, match=r"actor.layout.pipeline"):
        planned(constants, "h100_32", {"actor.layout.pipeline": 3})


def test_a_server_on_several_nodes_is_said_with_what_is_not_counted():
    recipe, server = str(RECIPES / "h100_32.yaml"), ["rollout.servers=1", "rollout.tensor_parallel=10"]
    text = CliRunner().invoke(app, ["plan", recipe, *server])
    assert text.exit_code == 0, text.output
    assert "10 generate (1 servers of 10, each on 2 nodes)" in text.stdout
    assert "Not counted: a server's sums over the network, evaluation" in " ".join(text.stdout.split())
    small = CliRunner().invoke(app, ["plan", recipe]).stdout
    assert "nodes" not in small
    assert "over the network" not in small


def test_a_server_without_equal_parts_on_nodes_is_refused(constants):
    sizes = {"rollout.servers": 1, "rollout.tensor_parallel": 20}
    with pytest.raises(ConfigError, match=r"which has 8, and 3 nodes cannot hold equal parts of it; set it to 24"):
        planned(constants, "h100_32", sizes)


def test_an_unknown_model_is_named_with_those_that_are_known():
    with pytest.raises(ConfigError, match=r"model.path = models/Unknown.*Qwen2.5-32B"):
        model_dimensions("models/Unknown")


def test_the_command_prints_tables_or_json():
    recipe = str(RECIPES / "qwen2.5_7b_8gpu.yaml")
    text = CliRunner().invoke(app, ["plan", recipe])
    assert text.exit_code == 0
    for word in ("master weights", "KV cache", "gradients and Adam", "GPU-hours", "Assumed"):
        assert word in text.stdout
    tree = json.loads(CliRunner().invoke(app, ["plan", recipe, "--json", "actor.recompute=full"]).stdout)
    assert tree["fits"]
    assert tree["step"]["gpu_hours"] > 0


@pytest.mark.parametrize("file", [RECIPES / "h100_128.yaml", MIXTURES / "h100_16_colocated.yaml"], ids=str)
def test_the_parts_that_are_printed_add_up(file):
    """An update's to its seconds, the phases to the step's; the tail is a part of the rollout."""
    text = CliRunner().invoke(app, ["plan", str(file)]).stdout
    rows = dict(re.findall(r"^(rollout|log-probs|update|weight sync|handover|all) +(\d+)  ", text, re.MULTILINE))
    assert sum(int(value) for name, value in rows.items() if name != "all") == pytest.approx(int(rows["all"]), abs=3)
    steps, parts = re.search(r"(\d+) x \((arithmetic .*? s)\)", text, re.DOTALL).groups()
    assert "recompute" in parts
    seconds = [float(value) for value in re.findall(r" (\d+\.\d\d)\b", parts)]
    assert int(steps) * sum(seconds) == pytest.approx(int(rows["update"]), abs=2)


def test_a_model_that_cpus_train_is_planned_for_gpus_and_the_plan_says_so():
    text = CliRunner().invoke(app, ["plan", str(RECIPES.parent / "quickstart" / "dapo.yaml")]).stdout
    assert "Model: 0.8" in text
    assert "million parameters" in text
    assert "Planned for GPUs, as the calibration describes them." in text


def test_the_command_fails_where_something_does_not_fit():
    answer = CliRunner().invoke(app, ["plan", str(RECIPES / "h100_32.yaml"), "--gpu-memory", "40"])
    assert answer.exit_code == 2
    assert "trainer, pipeline stage 0, update: needs" in answer.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "dynamic sampling keeps 50% of the groups. Not"),
        (["algorithm.dynamic_sampling.filter=off"], "every group is trained: dynamic sampling is off"),
        (["algorithm.group_size=2", "--pass-rate", "0.9"], "keeps 50% of the groups (groups of 2 have both right and"),
    ],
    ids=["usual", "off", "impossible"],
)
def test_what_was_assumed_of_dynamic_sampling_is_said(arguments, words):
    shown = CliRunner().invoke(app, ["plan", str(RECIPES / "h100_32.yaml"), *arguments])
    assert words in " ".join(shown.output.split())


def test_it_needs_no_torch():
    code = (
        "import sys; from typer.testing import CliRunner; from megatron_dapo.cli.main import app; "
        f"assert CliRunner().invoke(app, ['plan', {str(RECIPES / 'paper.yaml')!r}]).exit_code == 2; "
        "assert not {'torch', 'ray', 'megatron', 'sglang', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_modes_differ_in_what_runs_at_the_same_time(constants):
    """Sync adds the phases up, async counts the longer side, colocated has fewer GPUs and moves memory."""
    sync = planned(constants, "qwen2.5_7b_8gpu").step
    ahead = planned(constants, "qwen2.5_7b_8gpu", {"run.mode": "async"}).step
    training = ahead.log_prob_total_s + ahead.update_s
    assert ahead.seconds == pytest.approx(max(ahead.rollout_s - ahead.tail_s, training) + ahead.sync_s)
    assert max(sync.rollout_s - sync.tail_s, sync.update_s) < ahead.seconds < sync.seconds
    layout = load_config(RECIPES / "qwen2.5_7b_8gpu.yaml").actor.layout
    shared = {"run.mode": "colocated", "actor.offload.between_phases": "all", "actor.recompute": "full"}
    plan = planned(constants, "qwen2.5_7b_8gpu", shared | {"rollout.servers": layout.world_size // 4})
    assert not plan.misfits
    assert plan.step.gpus == layout.world_size < sync.gpus
    assert plan.step.handover_s > 0
    total = plan.step.rollout_s + plan.step.log_prob_total_s + plan.step.update_s + plan.step.sync_s
    assert plan.step.seconds == pytest.approx(total + plan.step.handover_s)


def test_colocated_servers_must_match_the_layout_and_leave_room_beside_the_trainers_framework(constants):
    with pytest.raises(ConfigError, match=r"= 32 must be the 16 GPUs of actor\.layout; set rollout\.servers to 2"):
        planned(constants, "h100_32_colocated", {"actor.layout.data": 1})
    assert not planned(constants, "h100_32_colocated").misfits
    assert planned(constants, "h100_32_colocated", {"rollout.memory_fraction": 0.93}).misfits


def test_the_reference_of_the_kl_term_goes_over_the_batch_once_more(constants):
    without = planned(constants, "qwen2.5_7b_8gpu").step
    with_it = planned(constants, "qwen2.5_7b_8gpu", {"algorithm.kl.coefficient": 0.001}).step
    assert with_it.log_prob_total_s >= with_it.log_prob_s, "what the rollout hides is not negative"
    assert with_it.seconds - without.seconds == pytest.approx(without.log_prob_total_s, rel=1e-6)


def test_a_colocated_trainer_may_fill_the_gpu_when_the_servers_have_left(constants):
    """Beside the server only what the trainer keeps between its phases must fit."""
    changes = {"run.mode": "colocated", "rollout.memory_fraction": 0.8}
    all_away = planned(constants, "qwen2.5_1.5b_1gpu", changes | {"actor.offload.between_phases": "all"})
    assert not all_away.misfits
    peak = max(max(rank.peaks.values()) for rank in all_away.ranks)
    assert peak > 0.2 * all_away.case.constants.gpu_memory, (
        "more than what the server leaves free: the test shows nothing otherwise"
    )
