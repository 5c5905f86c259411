"""`rollout.quantization`: what it cannot go with, where it is refused, and what the other verbs make of it."""

import importlib.util
from pathlib import Path

import pytest

from megatron_dapo.cluster.engines import own_engines
from megatron_dapo.cluster.placement import PlacementError
from megatron_dapo.config import Config, ConfigError, load_config
from megatron_dapo.coordinator.inputs import read_inputs
from megatron_dapo.plan.memory import server_memory
from megatron_dapo.plan.planner import make_plan
from megatron_dapo.plan.scenario import BUILT_IN, Scenario, changed, load_calibration
from megatron_dapo.plan.step_plan import fleet_of
from rollout.config import QUANTIZATION
from tests.actor.tiny import save_tiny

RECIPES = Path(__file__).parents[2] / "examples" / "qwen2.5_32b"
FP8 = ["rollout.quantization=fp8", "algorithm.importance.mode=truncated"]


def config_of(folder: Path, *overrides: str) -> Config:
    file = folder / "config.yaml"
    file.write_text(
        f"run: {{dir: {folder / 'run'}, rollout_steps: 3}}\n"
        f"model: {{path: {folder / 'model'}, context_length: 256}}\n"
        f"data: {{path: {folder / 'train.jsonl'}}}\nrollout: {{max_new_tokens: 128}}\n"
        "algorithm: {overlong: {shape: none}}\n"
    )
    (folder / "train.jsonl").write_text('{"prompt": "1 + 1", "answer": "2"}\n')
    return load_config(file, overrides)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["actor.device=cpu"], ["actor.device = cpu", "GPUs alone"]),
        (["model.dtype=float32"], ["model.dtype", "bfloat16"]),
        (["rollout.deterministic=true"], ["rollout.deterministic"]),
        (["rollout.weight_sync=delta"], ["rollout.weight_sync", "one type"]),
        (["rollout.speculative.algorithm=ngram"], ["rollout.speculative.algorithm", "draft model"]),
        (["rollout.extra_args=[--json_model_override_args, '{}']"], ["--json_model_override_args would replace"]),
        (["algorithm.importance.mode=auto"], ["importance.mode = auto", "needs a correction: truncated or masked"]),
        (["algorithm.importance.mode=none"], ["importance.mode = none", "needs a correction: truncated or masked"]),
        (["rollout.quantization=int8"], ["rollout.quantization = 'int8'", "none", "fp8"]),
    ],
)
def test_what_contradicts_it_is_named_with_a_remedy(tmp_path: Path, overrides: list[str], expected: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        config_of(tmp_path, *FP8, *overrides)
    for part in ("rollout.quantization", *expected):
        assert part in str(error.value)


@pytest.mark.parametrize(
    "corrected",
    [
        [],
        ["algorithm.importance.mode=masked"],
        ["algorithm.importance.mode=auto", "algorithm.policy_loss=reinforce"],
        ["algorithm.importance.mode=auto", "algorithm.dynamic_sampling.max_staleness=1"],
    ],
    ids=str,
)
def test_fp8_rollouts_are_trained_with_any_correction(tmp_path: Path, corrected: list[str]) -> None:
    assert config_of(tmp_path, *FP8, *corrected).rollout.quantization_config == QUANTIZATION
    assert config_of(tmp_path).rollout.quantization_config is None


def test_servers_on_a_cpu_are_refused_before_one_starts(tmp_path: Path) -> None:
    with pytest.raises(PlacementError, match=r"rollout\.quantization: need GPUs.* quantization to none"):
        own_engines(config_of(tmp_path, *FP8), tmp_path, gpus=())
    assert len(own_engines(config_of(tmp_path, *FP8), tmp_path, gpus=("0",))) == 1


def test_a_model_whose_blocks_would_be_cut_is_refused_before_anything_starts(tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", "qwen2", tied=False)
    with pytest.raises(ConfigError, match="hidden size 64 over 1 server ranks is no multiple of 128"):
        read_inputs(config_of(tmp_path, *FP8))


def test_llama_is_refused_since_sglang_drops_its_scales(tmp_path: Path) -> None:
    """Its name for them stands in SGLang's own table; when it is gone, FP8 may work."""
    save_tiny(tmp_path / "model", "llama", tied=False, hidden_size=512, intermediate_size=512, num_key_value_heads=4)
    with pytest.raises(ConfigError, match="Llama; set it to none"):
        read_inputs(config_of(tmp_path, *FP8))
    source = Path(importlib.util.find_spec("sglang").submodule_search_locations[0]) / "srt/models/llama.py"
    assert 'name.replace(".weight_scale_inv", ".weight_scale")' in source.read_text()


def test_the_plan_refuses_what_a_run_would() -> None:
    config = load_config(RECIPES.parent / "qwen3_30b_a3b" / "h100_16.yaml")
    asked = {"rollout.quantization": "fp8", "algorithm.importance.mode": "truncated"}
    case = Scenario(changed(config, asked), BUILT_IN["Qwen3-30B-A3B"], load_calibration())
    assert config.rollout.tensor_parallel == 4
    with pytest.raises(ConfigError, match="intermediate size 768 over 4 server ranks"):
        make_plan(case)
    assert make_plan(case.changed({"rollout.tensor_parallel": 2, "rollout.servers": 1})).server is not None


def test_the_plan_has_half_the_weights_and_more_room_for_responses() -> None:
    hf, constants = BUILT_IN["Qwen2.5-32B"], load_calibration()
    config = load_config(RECIPES / "h100_32.yaml")
    asked = {"rollout.quantization": "fp8", "algorithm.importance.mode": "truncated"}
    plain, fp8 = (Scenario(changed(config, changes), hf, constants) for changes in ({}, asked))
    before, after = server_memory(plain), server_memory(fp8)
    ends = 2 * hf.vocab_size * hf.hidden_size / config.rollout.tensor_parallel
    assert after.weights - 2 * ends == pytest.approx((before.weights - 2 * ends) / 2)
    assert after.kv_cache - before.kv_cache == pytest.approx(before.weights - after.weights)
    assert after.kv_bytes_per_token == before.kv_bytes_per_token
    assert fleet_of(fp8, after).step_s(1, 0) < fleet_of(plain, before).step_s(1, 0)
    assert fp8.model_bytes == plain.model_bytes
