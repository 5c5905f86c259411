"""The worked examples of docs/extending.md, run as they stand there."""

import ast
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_dapo.config import ConfigError, load_config
from megatron_dapo.monitor.writer import read_metrics
from megatron_dapo.report.page import report_page
from megatron_dapo.report.source import Run
from reward.registry import load_named
from tests.actor.gloo import RankPlace, run_ranks
from tests.actor.mini_batches import (
    TEMPERATURE,
    Columns,
    actor_config,
    columns,
    mini_batch,
    reference_log_probs,
    start_actor,
)
from tests.actor.ranks import assemble, logits_of
from tests.actor.tiny import load_reference, random_sequences, reference_logits, save_tiny
from tests.docs.documents import ROOT, blocks
from tests.processes import Running

PAGE = (ROOT / "docs" / "extending.md").read_text()


def written(name: str, folder: Path) -> Path:
    """The block `file=NAME`, as a file."""
    (body,) = [block.body for block in blocks(PAGE) if block.options.get("file") == name]
    file = folder / name
    file.write_text(body)
    return file


def entry(name: str) -> Any:
    """The value of the block `entry=NAME`."""
    (body,) = [block.body for block in blocks(PAGE) if block.options.get("entry") == name]
    return ast.literal_eval(body.strip())


def train_words() -> list[str]:
    """The page's command that trains with all of them, after the program's name."""
    _, command = (block.body for block in blocks(PAGE) if block.info == "bash")
    words = shlex.split(command.replace("\\\n", " "))
    assert words[:2] == ["PYTHONPATH=.", "megatron-dapo"]
    return words[2:]


FILES = ("units_verifier.py", "two_sided.py", "largest_deviation.py", "short_first.py")
SMALL = (
    "run.rollout_steps=2",
    "run.export_at_end=false",
    "algorithm.prompts_per_step=6",
    "algorithm.mini_batch_responses=16",
    "actor.layout.data=1",
    "rollout.servers=1",
    "evaluation.limit=2",
    "evaluation.greedy=false",
    "evaluation.forbidden_start=null",
)


def test_the_command_of_the_page_names_what_the_page_wrote(tmp_path, monkeypatch) -> None:
    """Its config is valid, and each `module:function` in it can be imported."""
    for name in FILES:
        written(name, tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    _, config, *overrides = train_words()
    load_config(ROOT / config, overrides)
    names = [value for _, _, value in (word.partition("=") for word in overrides) if re.fullmatch(r"\w+:\w+", value)]
    assert {f"{name.partition(':')[0]}.py" for name in names if callable(load_named(name))} == set(FILES)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_trains_with_all_that_the_page_wrote(tmp_path, monkeypatch) -> None:
    """Verifier, loss, advantage and order, by the page's own command, as small as it can be."""
    for name in FILES:
        written(name, tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    run_dir = tmp_path / "run"
    done = Running(*train_words(), f"run.dir={run_dir}", *SMALL, log=tmp_path / "log.txt").finish(240)
    assert done.code == 0, done.output
    lines = read_metrics(run_dir)
    assert [line["rollout_step"] for line in lines] == [1, 2]
    assert all(0 <= line["objective/outside"] < 1 and line["grad_norm"] > 0 for line in lines)
    samples = [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]
    assert {sample["verifier"] for sample in samples} == {"units_verifier:judge"}
    assert "length" in {sample["rule"] for sample in samples}
    texts = sorted({sample["prompt"]: len(sample["prompt_text"]) for sample in samples}.items())
    assert [length for _, length in texts] == sorted(length for _, length in texts), "the shortest prompts come first"
    board = EventAccumulator(str(run_dir / "tensorboard" / "by_rollout_step"))
    board.Reload()
    drawn = [event.value for event in board.Scalars("objective/outside")]
    assert drawn == pytest.approx([line["objective/outside"] for line in lines], rel=1e-6)
    assert "Of the policy loss: mean" in report_page([Run(run_dir)])


def test_the_advantage_is_what_its_text_says(tmp_path, monkeypatch) -> None:
    written("largest_deviation.py", tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    rewards = torch.tensor([[1.0, -1.0, -1.0, -1.0], [1.0, 1.0, 1.0, 1.0]], dtype=torch.float64)
    advantages = load_named("largest_deviation:advantages")(rewards, torch.ones(2, 4, dtype=torch.int64))
    assert advantages[0].tolist() == pytest.approx([1.0, -1 / 3, -1 / 3, -1 / 3])
    assert advantages[1].tolist() == [0.0] * 4


def test_the_verifier_judges_by_the_command_of_the_page(tmp_path) -> None:
    written("units_verifier.py", tmp_path)
    shell, _ = (block.body for block in blocks(PAGE) if block.info == "bash")
    more = [
        {"response": "about 4.9 km", "ground_truth": "5 km"},
        {"response": "no idea", "ground_truth": "5 km"},
        {"response": "5 km", "ground_truth": "far"},
        {"response": "Answer: 7", "ground_truth": "0.007 km"},
    ]
    (tmp_path / "more.jsonl").write_text("".join(json.dumps(line) + "\n" for line in more))
    command = shell.splitlines()[-1]
    shell = shell.replace(command, f"cat more.jsonl >> lines.jsonl\n{command}")
    shell = shell.replace("PYTHONPATH=.", f"PYTHONPATH=.:{ROOT}").replace("python -m", f"{sys.executable} -m")
    done = subprocess.run(["bash", "-ec", shell], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    verdicts = [json.loads(line) for line in done.stdout.splitlines()]
    assert [verdict["accuracy"] for verdict in verdicts] == [True, False, False, False, True]
    assert [verdict["rule"] for verdict in verdicts] == ["length", "length", "none", "unjudged", "length"]


@pytest.fixture
def own_loss(tmp_path, monkeypatch) -> str:
    """The page's loss, where the run can import it."""
    written("two_sided.py", tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    keys = dict(word.split("=", 1) for word in train_words() if "=" in word)
    return f"policy_loss: '{keys['algorithm.policy_loss']}'\nloss_options: {keys['algorithm.loss_options']}"


def objective(own_loss: str) -> Any:
    from megatron_dapo.config.algorithm_config import AlgorithmConfig
    from megatron_dapo.coordinator.batch import objective_of

    return objective_of(AlgorithmConfig(**yaml.safe_load(own_loss)))


def test_the_loss_is_what_its_text_says_and_is_selected_by_key(own_loss) -> None:
    from megatron_dapo.algorithm.token_loss import LossColumns

    old = torch.tensor([-1.0, -2.0, -0.5, -3.0], dtype=torch.float64)
    ratio = torch.tensor([1.0, 1.1, 0.4, 3.5], dtype=torch.float64)  # high is 1.2: the options of the command
    advantages = torch.tensor([1.0, -2.0, 1.5, -1.0], dtype=torch.float64)
    columns = LossColumns(
        advantages=advantages,
        old_log_probs=old,
        sequence_index=torch.zeros(4, dtype=torch.int64),
        sequence_lengths=torch.tensor([4]),
    )
    log_probs = (old + ratio.log()).requires_grad_()
    result = objective(own_loss)(log_probs, torch.zeros(4), columns)
    result.loss.sum().backward()
    assert torch.allclose(result.loss, -torch.tensor([1.0, 1.1, 0.5, 1.2]).double() * advantages)
    assert log_probs.grad is not None
    assert torch.allclose(log_probs.grad, torch.tensor([-1.0, 2.2, 0.0, 0.0]).double())
    assert result.stats["outside"].tolist() == [0, 0, 1, 1]


def test_in_the_package_a_loss_is_one_line_of_the_table(own_loss, monkeypatch) -> None:
    from megatron_dapo.algorithm.losses import LOSSES, Entry
    from megatron_dapo.coordinator.batch import objective_of

    line = Entry(path="two_sided:TwoSided", reads=(), options=("low", "high"))
    monkeypatch.setitem(LOSSES, "two_sided", line)
    words = ["algorithm.policy_loss=two_sided", "algorithm.loss_options={high: 1.2}"]
    config = load_config(ROOT / "examples" / "quickstart" / "dapo.yaml", words)
    assert objective_of(config.algorithm).loss == objective(own_loss).loss
    monkeypatch.delitem(LOSSES, "two_sided")
    with pytest.raises(ConfigError, match="two_sided"):
        load_config(ROOT / "examples" / "quickstart" / "dapo.yaml", words)


def update_of(place: RankPlace, folder: Path, home: Path, own_loss: str, data: Columns) -> Any:
    sys.path.insert(0, str(home))
    config = actor_config()
    actor = start_actor(place, folder, config)
    batch = mini_batch(data, config, without=("reference_log_probs", "correction"))
    return actor.update([batch], objective(own_loss), TEMPERATURE)


def test_the_actor_trains_with_the_loss_and_its_statistic_is_a_metric(tmp_path, own_loss) -> None:
    from megatron_dapo.coordinator.step_metrics import update_metrics
    from tests.monitor.declared import check_declared

    model = save_tiny(tmp_path, "qwen3", tied=True)
    data = columns(model)
    (updates,) = run_ranks(1, update_of, model, tmp_path, own_loss, data)
    with torch.no_grad():
        log_probs, _ = reference_log_probs(load_reference(model), data.responses)
    ratio = (log_probs - torch.from_numpy(data.columns["old_log_probs"])).exp()[data.columns["weights"] > 0]
    metrics = update_metrics(updates)
    outside = ((ratio < 0.5) | (ratio > 1.2)).double().mean()
    assert metrics["objective/outside"] == pytest.approx(float(outside), abs=1e-6)
    assert outside > 0
    assert metrics["grad_norm"] > 0
    check_declared(metrics)


@pytest.fixture
def mistral(tmp_path, monkeypatch) -> Path:
    """A tiny random Mistral by transformers, with the page's entries in their tables."""
    import transformers

    from megatron_dapo.actor.model import hf_config
    from rollout.weights import server_tensors as held

    monkeypatch.setattr(hf_config, "_FAMILIES", {**hf_config._FAMILIES, **entry("_FAMILIES")})
    monkeypatch.setattr(hf_config, "_FIXED", {**hf_config._FIXED, **entry("_FIXED")})
    monkeypatch.setattr(held, "ARCHITECTURES", (*held.ARCHITECTURES, *entry("ARCHITECTURES")))
    config = transformers.MistralConfig(
        vocab_size=101,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        sliding_window=None,
    )
    torch.manual_seed(0)
    transformers.MistralForCausalLM(config).save_pretrained(tmp_path)
    return tmp_path


def test_the_family_is_read_and_its_sliding_window_refused(mistral) -> None:
    from megatron_dapo.actor.model.hf_config import HFModelConfig
    from megatron_dapo.actor.weights.model_tensors import hf_shapes
    from megatron_dapo.config.base import ConfigError

    shape = HFModelConfig.load(mistral)
    theirs = {name: tuple(tensor.shape) for name, tensor in load_reference(mistral).named_parameters()}
    assert hf_shapes(shape) == theirs, "the table of parameters is the file's"
    fields = json.loads((mistral / "config.json").read_text()) | {"sliding_window": 4096}
    with pytest.raises(ConfigError, match="sliding_window = 4096: only None is supported"):
        HFModelConfig.of(fields, shown="config.json")


def logits_of_family(place: RankPlace, folder: Path, families: dict, micro_batches: list) -> list:
    """In a rank's process, which other tests use after this one."""
    from megatron_dapo.actor.model import hf_config

    before = hf_config._FAMILIES
    hf_config._FAMILIES = {**before, **families}
    try:
        return logits_of(place, [folder], {}, micro_batches)
    finally:
        hf_config._FAMILIES = before


def test_the_family_computes_what_transformers_computes(mistral) -> None:
    micro_batches = [random_sequences([5, 90, 33]), random_sequences([64], seed=2)]
    ((parts,),) = run_ranks(1, logits_of_family, mistral, entry("_FAMILIES"), micro_batches)
    for got, sequences in zip(assemble([parts], micro_batches), micro_batches, strict=True):
        for ours, theirs in zip(got, reference_logits(mistral, sequences), strict=True):
            assert (ours[:, : theirs.shape[1]] - theirs).abs().max() <= 1e-4


def test_a_server_of_the_family_can_be_checked(mistral) -> None:
    from rollout.weights.checksums import expected_checksums
    from rollout.wire.client import ServerInfo

    info = ServerInfo(tensor_parallel=1, device="cpu", dtype="float32")
    (tensors,) = expected_checksums(mistral, info).values()
    assert "model.layers.1.self_attn.qkv_proj.weight" in tensors
