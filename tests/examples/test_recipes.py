"""The recipes say what they claim: the paper's algorithm, the number of GPUs in their name, weights that fit."""

from pathlib import Path

import pytest

from megatron_dapo.actor.model.hf_config import check_layout
from megatron_dapo.config import Config, load_config
from megatron_dapo.config.config_diff import departures
from megatron_dapo.config.load import flatten_config
from megatron_dapo.plan.scenario import BUILT_IN

FOLDER = Path(__file__).parents[2] / "examples" / "qwen2.5_32b"
RECIPES = {file.stem: file for file in sorted(FOLDER.glob("*.yaml"))}
COLOCATED = {"h100_16_colocated": 16, "h100_32_colocated": 32, "h100_128_colocated": 128}
GPUS = COLOCATED | {"h100_16": 16, "h100_32": 32, "h100_128": 128, "qwen2.5_7b_8gpu": 8, "qwen2.5_1.5b_1gpu": 1}
MIXTURE = Path(__file__).parents[2] / "examples" / "qwen3_30b_a3b"
MIXTURES = {file.stem: file for file in sorted(MIXTURE.glob("*.yaml"))}
PARAMETERS = {"Qwen2.5-32B": 32.8e9, "Qwen2.5-7B": 7.6e9, "Qwen2.5-1.5B": 1.5e9}


def left(config: Config) -> dict:
    flat = flatten_config(config)
    return {each.key: flat[each.key] for each in departures(flat)}


def test_every_recipe_is_known_here():
    assert set(RECIPES) == {"paper", "verl", *GPUS}


@pytest.mark.parametrize("name", RECIPES)
def test_it_loads_strictly_without_model_or_data(name):
    config = load_config(RECIPES[name])
    assert not Path(config.model.path).exists()
    assert config.algorithm.mini_batches_per_step == 16, "section 4.1"
    assert config.longest_prompt == 2048
    assert config.data.deduplicate


@pytest.mark.parametrize("name", ["paper", "h100_16", "h100_32", "h100_128", *COLOCATED])
def test_the_papers_recipes_leave_it_nowhere(name):
    assert left(load_config(RECIPES[name])) == {}


def test_the_reproduction_leaves_it_where_it_said():
    config = load_config(RECIPES["verl"])
    assert left(config) == {
        "algorithm.aggregation": "verl_legacy",
        "algorithm.clip.dual": 10.0,
        "reward.verifier": "exact",
        "actor.optimizer.warmup_rollout_steps": 10.0,
    }
    assert departures(flatten_config(config), "verl") == []
    assert config.algorithm.dynamic_sampling.max_oversampling == 3 * 10, "ten batches of three times the prompts"
    assert config.reward.verifier == "exact"


@pytest.mark.parametrize("name", GPUS)
def test_it_takes_the_gpus_of_its_name(name):
    config = load_config(RECIPES[name])
    trainer = config.actor.layout.world_size
    servers = config.rollout.servers * config.rollout.tensor_parallel
    shared = name in COLOCATED or GPUS[name] == trainer == servers == 1
    assert (config.run.mode == "colocated") == (name in COLOCATED)
    assert GPUS[name] == (trainer if shared else trainer + servers)
    assert servers == trainer or not shared


@pytest.mark.parametrize("name", GPUS)
def test_weights_gradients_and_optimizer_leave_room_on_80_gb(name):
    config = load_config(RECIPES[name])
    layout = config.actor.layout
    split = layout.tensor * layout.pipeline
    state = 12 / (split * layout.data * layout.context)
    always = 6 / split + (0 if config.actor.offload.optimizer_state else state)
    parameters = PARAMETERS[Path(config.model.path).name]
    assert parameters * always < 46e9
    assert parameters * (6 / split + state) < 76e9, "in the optimizer's step, when there are no activations"


def test_every_recipe_of_the_mixture_is_known_here():
    assert set(MIXTURES) == {"h100_16", "h100_32", "h100_16_colocated", "h100_32_colocated"}


@pytest.mark.parametrize("name", MIXTURES)
def test_a_mixture_trains_as_the_paper_does_with_its_own_routing(name):
    config = load_config(MIXTURES[name])
    assert left(config) == {"actor.routing_replay": True}, "without it such runs collapse"
    assert config.algorithm.mini_batches_per_step == 16
    assert config.longest_prompt == 2048
    assert not Path(config.model.path).exists()


@pytest.mark.parametrize("name", MIXTURES)
def test_a_mixture_takes_the_gpus_of_its_name(name):
    config, gpus = load_config(MIXTURES[name]), int(name.split("_")[1])
    layout = config.actor.layout
    check_layout(BUILT_IN["Qwen3-30B-A3B-Base"], layout)
    servers = config.rollout.servers * config.rollout.tensor_parallel
    colocated = name.endswith("colocated")
    assert (config.run.mode == "colocated") == colocated
    assert layout.world_size + servers == (2 * gpus if colocated else gpus)
    assert layout.world_size == servers or not colocated
