"""Law 7: the config cannot lie."""

import ast
import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_dapo.config import Config, ConfigError, dump_config, load_config
from megatron_dapo.config.load import load_with_sources

ROOT = Path(__file__).parents[2]


def test_the_defaults_are_the_papers(file):
    config = load_config(file())
    algorithm = config.algorithm
    assert (algorithm.prompts_per_step, algorithm.group_size, algorithm.mini_batches_per_step) == (512, 16, 16)
    assert (algorithm.clip.low, algorithm.clip.high, algorithm.clip.dual) == (0.2, 0.28, None)
    assert (config.rollout.max_new_tokens, algorithm.overlong.buffer, algorithm.overlong.shape) == (20480, 4096, "soft")
    assert (algorithm.kl.coefficient, algorithm.entropy_coefficient, algorithm.aggregation) == (0, 0, "token_mean")
    optimizer = config.actor.optimizer
    assert (optimizer.lr, optimizer.warmup_rollout_steps, optimizer.clip_norm, optimizer.weight_decay) == (
        1e-6,
        20,
        1,
        0.1,
    )
    assert (config.evaluation.samples, config.evaluation.temperature, config.evaluation.top_p) == (32, 1.0, 0.7)


def test_what_is_dumped_loads_to_the_same_config(file, tmp_path):
    config = load_config(
        file(), ["actor.layout.tensor=2", "rollout.extra_args=[--attention-backend, b]", "algorithm.clip.dual=10.0"]
    )
    again = tmp_path / "again.yaml"
    again.write_text(dump_config(config))
    assert load_config(again) == config


@pytest.mark.parametrize("text", ["1e5", "010", "1:30", "0o17", "2024-01-01", "2024-13-45", "on", "~", "é 'x\""])
def test_a_text_that_looks_like_something_else_stays_a_text(file, tmp_path, text):
    config = load_config(file(), ["evaluation.path=" + json.dumps(text, ensure_ascii=False)])
    assert config.evaluation.path == text
    again = tmp_path / "again.yaml"
    again.write_text(dump_config(config), encoding="utf-8")
    assert load_config(again) == config, "a resume reads the run's own config.yaml"


def test_a_date_is_a_text_and_an_empty_section_takes_overrides(file):
    config = load_config(file("reward:\n"), ["run.dir=2024-01-01", "reward.workers=3"])
    assert (config.run.dir, config.reward.workers) == ("2024-01-01", 3)


def test_a_mixture_of_prompt_files(file, tmp_path):
    path = file("reward: {by_source: {gsm8k: exact}}\n")
    files = "data: {mixture: [{path: a.jsonl, weight: 2.0}, {path: g.jsonl, schema: gsm8k, verifier: json}]}"
    path.write_text(path.read_text().replace("data: {path: train.jsonl}", files))
    config = load_config(path)
    assert [(source.path, source.weight, source.verifier) for source in config.data.mixture] == [
        ("a.jsonl", 2.0, None),
        ("g.jsonl", 1.0, "json"),
    ]
    assert config.reward.by_source == {"gsm8k": "exact"}
    again = tmp_path / "again.yaml"
    again.write_text(dump_config(config))
    assert load_config(again) == config
    path.write_text(path.read_text().replace("schema: gsm8k", "weigth: 1.0"))
    with pytest.raises(ConfigError, match=r"config.yaml:3: data.mixture.1.weigth: .*data.mixture.1.weight\?"):
        load_config(path)


@pytest.mark.parametrize("weight", ["0", "-1.0", "1e-300", ".inf", "inf", ".nan", "true"])
def test_a_weight_by_which_no_prompt_would_be_drawn_is_refused(file, weight):
    mixture = f"data.mixture=[{{path: a.jsonl, weight: {weight}}}, {{path: b.jsonl, weight: 1.0}}]"
    with pytest.raises(ConfigError, match=r"data\.mixture\.0\.weight = "):
        load_config(file(), ["data.path=null", mixture])
    for scale in (1e-9, 1e9):
        same = f"data.mixture=[{{path: a.jsonl, weight: {scale!r}}}, {{path: b.jsonl, weight: {scale!r}}}]"
        assert len(load_config(file(), ["data.path=null", same]).data.mixture) == 2


def test_one_prompt_file_or_a_mixture_not_both(file):
    with pytest.raises(ConfigError, match=r"data\.path and data\.mixture: both are given"):
        load_config(file(), ["data.mixture=[{path: a.jsonl}]"])
    with pytest.raises(ConfigError, match=r"data\.path and data\.mixture: neither is given"):
        load_config(file(), ["data.path=null"])


def test_overrides_replace_values_of_the_file(file):
    config = load_config(file("actor: {optimizer: {lr: 1e-4}}\n"), ["run.seed=7", "actor.optimizer.betas=[0.9, 0.98]"])
    assert config.run.seed == 7
    assert config.actor.optimizer.lr == 1e-4, "YAML 1.1 reads 1e-4 as a text; ours is a number"
    assert config.actor.optimizer.betas == (0.9, 0.98)


@pytest.mark.parametrize(
    ("text", "overrides", "expected"),
    [
        (
            "actor: {layout: {tensr: 2}}\n",
            [],
            ["config.yaml:5", "actor.layout.tensr", "did you mean actor.layout.tensor?"],
        ),
        ("", ["run.sed=1"], ["override 'run.sed=1'", "did you mean run.seed?"]),
        ("", ["nonsense=1"], ["nonsense", "valid: run, model"]),
        ("", ["run.rollout_steps=three"], ["run.rollout_steps", "valid integer"]),
        ("", ["run.rollout_steps=0"], ["run.rollout_steps", "greater than 0"]),
        ("", ["actor.layout.pipeline=2", "actor.layout.virtual_pipeline=1"], ["virtual_pipeline", "equal to 2"]),
        ("", ["actor.optimizer.lr=.nan"], ["actor.optimizer.lr"]),
        (
            "",
            ["algorithm.overlong.buffer=20480"],
            ["algorithm.overlong.buffer = 20480", "below max_new_tokens = 20480"],
        ),
        ("", ["algorithm.mini_batch_responses=500"], ["multiple of algorithm.group_size"]),
        ("", ["algorithm.clip.dual=1.1"], ["clip.dual = 1.1", "must exceed"]),
        ("", ["rollout.max_new_tokens=40000"], ["model.context_length"]),
        ("", ["rollout.stages=[{from_step: 9, max_new_tokens: 40000}]"], ["model.context_length"]),
        ("", ["rollout.stages=[{from_step: 9, max_new_tokens: 4096}]"], ["buffer = 4096", "max_new_tokens = 4096"]),
        ("", ["algorithm.kl.reset_every=9"], ["kl.reset_every = 9", "without kl.coefficient"]),
        (
            "",
            ["algorithm.entropy_control.target=0.2", "algorithm.entropy_coefficient=0.1"],
            ["entropy_coefficient = 0.1", "above entropy_control.maximum = 0.005"],
        ),
        ("", ["rollout.stages=[{from_step: 9, temprature: 1.0}]"], ["did you mean rollout.stages.0.temperature"]),
        ("", ["algorithm.dynamic_sampling.pools=[{at_least: 1.5, share: 0.1}]"], ["pools.0.at_least", "or equal to 1"]),
        ("", ["actor.layout.sequence_parallel=true"], ["sequence_parallel", "layout.tensor is 1"]),
        ("", ["actor.layout.expert=2"], ["expert x expert_tensor = 2", "tensor x context x data = 1"]),
        (
            "",
            ["actor.layout.data=2", "actor.layout.expert=2", "actor.optimizer.distributed=false"],
            ["actor.layout.expert = 2", "actor.optimizer.distributed=true"],
        ),
        ("", ["actor.fp8=hybrid", "actor.device=cpu"], ["actor.fp8 = hybrid", "needs CUDA", "set actor.fp8 to none"]),
        ("", ["actor.fp8=e4m3", "model.dtype=float32"], ["actor.fp8 = e4m3", "set model.dtype"]),
        ("", ["actor.fp8=e4m3", "actor.lora.rank=8"], ["actor.fp8 = e4m3", "actor.lora.rank = 8", "set one of them"]),
        ("", ["actor.lora.alpha=16"], ["actor.lora.alpha", "actor.lora.rank"]),
        ("", ["actor.lora.rank=8", "actor.lora.modules=[q_proj,q_proj]"], ["actor.lora.modules", "twice"]),
        ("", ["actor.lora.rank=8", "actor.lora.modules=[lm_head]"], ["actor.lora.modules", "q_proj"]),
        ("run: {dir: y}\n", [], ["given twice"]),
        ("", ["run"], ["section.key=value"]),
        ("a: [\n", [], ["not valid YAML", 'config.yaml", line']),
        (
            "actor: {optimizer: {lr: 3,0e-4}}\n",
            [],
            ["config.yaml:5: actor.optimizer.0e-4: a number is no key"],
        ),
        ("", ["rollout_steps=4"], ["rollout_steps: no such key; did you mean run.rollout_steps?"]),
        ("reward: &a {by_source: *a}\n", [], ["config.yaml", "not valid YAML"]),
        ("", ["run.seed=" + "9" * 5000], ["override", "not valid YAML"]),
        ("", ["run.seed=010"], ["run.seed = '010'", "valid integer"]),
        ("", ["run.seed=1:30"], ["run.seed = '1:30'", "valid integer"]),
        ("", ['run.dir="a\\0b"'], ["run.dir"]),
        ("", ["run.dir=~/x"], ["run.dir = ~/x", "in full"]),
        ("", ["rollout.extra_args=[--port, '1']"], ["--port", "set rollout.port"]),
        (
            "",
            ["actor.routing_replay=true", "rollout.extra_args=[--enable-hierarchical-cache]"],
            ["--enable-hierarchical-cache under actor.routing_replay", "other tokens"],
        ),
        ("", ["run.resume=yes"], ["run.resume = 'yes': must be true or false"]),
        ("", ["rollout.extra_args=[--tp=2]"], ["--tp=2", "set rollout.tensor_parallel"]),
        ("", ["rollout.extra_args=[--enable-fp32-lm-head]"], ["--enable-fp32-lm-head", "set model.fp32_head"]),
        ("", ["actor.layout.data=" + "9" * 30], ["actor.layout: asks for 999", "lower it"]),
        ("", ["rollout.extra_args=[--quantization=fp8]"], ["--quantization=fp8", "rounded weights", "remove it"]),
        ("", ["rollout.extra_args=[--enable_lora]"], ["--enable_lora", "names"]),
        ("", ["rollout.extra_args=[--dp, '2']"], ["--dp", "rollout.servers"]),
        (
            "",
            ["rollout.extra_args=[--load-forma, dummy]"],
            ["--load-forma", "short for --load-format", "write the option"],
        ),
        ("", ["rollout.extra_args=[--quantization fp8]"], ["--quantization fp8", "as two"]),
        ("", ["rollout.extra_args=[--config, more.yaml]"], ["--config", "the options themselves"]),
        ("", ["rollout.extra_args=[--nccl-port, '1']"], ["--nccl-port", "where its processes meet"]),
        ("", ["rollout.urls=[http://a:1, http://a:1/]"], ["rollout.urls", "twice"]),
        ("", ["run.mode=colocated"], ["between_phases = none", "needs all"]),
        ("", ["rollout.weight_sync=tensor"], ["weight_sync = tensor", "needs auto, disk, distributed or delta"]),
        ("", ["run.mode=colocated", "rollout.urls=[http://a:1]"], ["rollout.urls", "sync or async"]),
        ("", ["rollout.on_publish=recompute", "rollout.deterministic=true"], ["on_publish = recompute", "timing"]),
        ("", ["rollout.on_publish=recompute", "run.mode=colocated"], ["on_publish = recompute", "frees the KV cache"]),
        (
            "",
            ["rollout.on_publish=keep", "rollout.extra_args=[--disable-radix-cache]"],
            ["--disable-radix-cache", "on_publish = keep"],
        ),
        ("", ["rollout.on_publish=swap"], ["rollout.on_publish", "restart", "recompute", "keep"]),
        ("", ["run.mode=async", "algorithm.dynamic_sampling.max_staleness=0"], ["ahead = 1", "max_staleness = 0"]),
    ],
)
def test_a_wrong_config_is_refused_with_place_rule_and_remedy(file, text, overrides, expected):
    with pytest.raises(ConfigError) as error:
        load_config(file(text), overrides)
    for part in expected:
        assert part in str(error.value)


def test_other_options_of_a_server_are_passed_on(file):
    options = ("--kv-cache-dtype", "fp8_e4m3", "--enable-tf32-matmul", "--cuda-graph-backend-prefill=full")
    config = load_config(file(), [f"rollout.extra_args={json.dumps(options)}"])
    assert config.rollout.extra_args == options


def test_a_missing_key_and_a_missing_file_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.yaml: No such file"):
        load_config(tmp_path / "none.yaml")
    path = tmp_path / "config.yaml"
    path.write_text("run: {dir: x}\n")
    with pytest.raises(ConfigError) as error:
        load_config(path)
    assert "run.rollout_steps is missing" in str(error.value)
    assert "model is missing" in str(error.value)


def test_config_is_frozen(file):
    config = load_config(file())
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.run.seed = 3  # type: ignore[misc]


def test_every_key_is_read_by_the_code():
    """A key that nothing reads would be a lie: its name must be loaded as an attribute outside its own declaration."""
    read: set[str] = set()
    for package in ("megatron_dapo", "rollout", "reward"):
        for file in (ROOT / package).rglob("*.py"):
            tree = ast.parse(file.read_text())
            read |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}

    def keys(section: type, prefix: str = ""):
        for field in dataclasses.fields(section):
            if dataclasses.is_dataclass(field.type):
                yield from keys(field.type, f"{prefix}{field.name}.")
            else:
                yield f"{prefix}{field.name}", field.name

    unread = [path for path, name in keys(Config) if name not in read]
    assert not unread, f"keys that nothing reads: {unread}"


def test_config_needs_no_heavy_import():
    heavy = ["torch", "ray", "megatron", "sglang", "transformers", "aiohttp"]
    program = f"import sys, megatron_dapo.config; print([name for name in {heavy} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.strip() == "[]"


def test_reference_page_is_up_to_date():
    from tools.docs_pages import config_page

    committed = ROOT / "docs" / "config.md"
    assert committed.read_text() == config_page(), "run `make docs`"


def test_a_preset_lies_below_the_configs_own_keys_and_overrides(file):
    path = file("preset: gspo\nalgorithm: {clip: {high: 5.0e-4}}\n")
    algorithm = load_config(path, ["algorithm.group_size=8"]).algorithm
    assert (algorithm.policy_loss, algorithm.aggregation, algorithm.group_size) == ("gspo", "sequence_mean", 8)
    assert (algorithm.clip.low, algorithm.clip.high) == (3e-4, 5e-4)
    assert load_config(path, ["preset=cispo"]).algorithm.policy_loss == "cispo"
    with pytest.raises(ConfigError, match=r"config.yaml:5: preset = scalrl: no such preset; valid: .*scalerl"):
        load_config(file("preset: scalrl\n"))


@pytest.mark.parametrize("preset", ["scalerl", "cispo"])
def test_the_output_head_of_a_preset_is_in_float32_and_the_configs_own_key_wins(file, preset):
    model = load_config(file(f"preset: {preset}\n"), ["model.dtype=bfloat16"]).model
    assert model.fp32_head
    assert model.upcasts_head
    assert not load_config(file(f"preset: {preset}\n"), ["model.dtype=float32"]).model.upcasts_head, "all of it is"
    assert not load_config(file(f"preset: {preset}\n"), ["model.fp32_head=false"]).model.fp32_head


def test_scalerl_takes_its_ratio_to_the_engine(file):
    algorithm = load_config(file("preset: scalerl\n")).algorithm
    assert (algorithm.policy_loss, algorithm.importance.upper, algorithm.importance_mode) == ("reinforce", 5.0, "none")


def test_check_says_where_each_value_comes_from(file, tmp_path):
    path = file("preset: gspo\nalgorithm: {clip: {high: 5.0e-4}}\n")
    text = dump_config(*load_with_sources(path, ["algorithm.group_size=8", "rollout.extra_args=[--log-level, b]"]))
    rows = {row.split(":")[0].strip(): row.partition("  # ")[2] for row in text.splitlines()}
    assert rows["policy_loss"] == "preset gspo"
    assert rows["high"] == f"{path}:6"
    assert rows["group_size"] == "override 'algorithm.group_size=8'"
    assert rows["extra_args"].startswith("override")
    assert rows["prompts_per_step"] == ""
    again = tmp_path / "again.yaml"
    again.write_text(text)
    assert load_config(again) == load_config(path, ["algorithm.group_size=8", "rollout.extra_args=[--log-level, b]"])


def test_off_needs_no_quotes(file):
    for path, words in ((file(), ["algorithm.dynamic_sampling.filter=off"]), (file(OFF), [])):
        assert load_config(path, words).algorithm.dynamic_sampling.filter == "off"


OFF = "algorithm: {dynamic_sampling: {filter: off}}\n"
