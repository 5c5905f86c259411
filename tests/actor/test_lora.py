"""LoRA: adapters alone are trained, exactly, on every layout; what is written is what PEFT and transformers read.

The reference is transformers' forward in float64 with W + alpha / rank x B A written out, from the adapter's files.
"""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_dapo.actor.model.hf_config import HFModelConfig, check_actor
from megatron_dapo.actor.step_data import CheckpointError
from megatron_dapo.algorithm.policy_loss import PolicyObjective
from megatron_dapo.config.actor_config import ActorConfig, LayoutConfig, LoraConfig, OffloadConfig, OptimizerConfig
from megatron_dapo.config.base import ConfigError
from megatron_dapo.plan.rank_state import base_bytes, rank_state
from tests.actor.gloo import RankPlace
from tests.actor.mini_batches import (
    TEMPERATURE,
    Columns,
    actor_config,
    columns,
    eq8_loss,
    mini_batch,
    reference_log_probs,
    relative_error,
    start_actor,
)
from tests.actor.tiny import MIXTURE, load_reference, save_tiny
from tools.actor_job import loss_and_gradients

NONE_OF = ("reference_log_probs", "correction")
LORA = {"rank": 4, "alpha": 6.0}
SOME = LORA | {"modules": ("k_proj", "up_proj", "down_proj")}
ADAPTER = Path("adapter", "adapter_model.safetensors")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("qwen2"), "qwen2", tied=True)


@pytest.fixture(scope="module")
def data(model) -> Columns:
    return columns(model)


def size(layout: dict[str, Any]) -> int:
    return int(np.prod([layout.get(name, 1) for name in ("tensor", "pipeline", "context", "data")]))


def config_of(layout: dict[str, Any], lora: dict[str, Any] = LORA, **fields: Any):
    optimizer = {"lr": 5e-3, "weight_decay": 0.1} | fields.pop("optimizer", {})
    return actor_config(layout, optimizer=optimizer, lora=LoraConfig(**lora), **fields)


def gradients_of(place: RankPlace, folder: Path, layout: dict, data: Columns, lora: dict, out: Path, fields: dict):
    """Adapters at random, exported, and on rank 0 the gradient by PEFT's names."""
    config = config_of(layout, lora, **fields)
    actor = start_actor(place, folder, config)
    actor.optimizer.adapters.draw(5, both=True)
    actor.export_hf(out)
    results = [
        loss_and_gradients(actor, mini_batch(data, config, without=NONE_OF), PolicyObjective(), TEMPERATURE)
        for _ in range(2)
    ]
    if results[0] is None:
        return None
    assert results[0][0] == results[1][0]
    for name, gradient in results[0][1].items():
        assert torch.equal(gradient, results[1][1][name])
    return results[0][1]


def merged(folder: Path, adapter: Path, scale: float) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """(A and B in float64 by name in the file, every weight of the model by its name), with autograd between them."""
    halves = {name: half.double().requires_grad_() for name, half in load_file(adapter).items()}
    weights = dict(load_reference(folder).double().named_parameters())
    for name, second in halves.items():
        if name.endswith(".lora_B.weight"):
            path = name.removesuffix(".lora_B.weight")
            target = f"{path.removeprefix('base_model.model.')}.weight"
            weights[target] = weights[target] + scale * second @ halves[f"{path}.lora_A.weight"]
    return halves, weights


def wanted_gradient(folder: Path, data: Columns, adapter: Path, scale: float) -> dict[str, torch.Tensor]:
    """Of eq. 8, by name in the adapter's file."""
    halves, weights = merged(folder, adapter, scale)
    network = load_reference(folder).double()

    class Merged(torch.nn.Module):
        def forward(self, ids: torch.Tensor):
            return torch.func.functional_call(network, weights, (ids,))

    log_probs, _ = reference_log_probs(Merged(), data.responses)
    eq8_loss(log_probs, data).backward()
    return {name: half.grad for name, half in halves.items()}


@pytest.mark.parametrize(
    ("layout", "lora", "fields"),
    [
        pytest.param({}, LORA, {}, marks=pytest.mark.slow),
        ({}, SOME, {"recompute": "full"}),
        ({}, LORA, {"recompute": ["core_attn"], "fused_linear_log_prob": True, "optimizer": {"distributed": False}}),
        pytest.param({"tensor": 2}, LORA, {}, marks=pytest.mark.slow),
        ({"tensor": 2, "sequence_parallel": True}, SOME, {}),
        ({"tensor": 2, "sequence_parallel": True}, LORA, {"recompute": "full", "micro_batch_tokens": 1}),
        ({"pipeline": 2}, LORA, {"recompute": "full"}),
        ({"pipeline": 2, "virtual_pipeline": 2}, LORA, {}),
        ({"context": 2}, LORA, {}),
        ({"data": 2}, LORA, {}),
        pytest.param({"data": 2, "tensor": 2}, LORA, {}, marks=pytest.mark.slow),
        pytest.param({"context": 2, "pipeline": 2}, LORA, {}, marks=pytest.mark.slow),
        pytest.param({"tensor": 2, "pipeline": 2, "sequence_parallel": True}, LORA, {}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_gradient_is_that_of_the_merged_weights(gloo, layout, lora, fields, model, data, tmp_path):
    got = gloo(size(layout), gradients_of, model, layout, data, lora, tmp_path / "out", fields)[0]
    wanted = wanted_gradient(model, data, tmp_path / "out" / ADAPTER, LORA["alpha"] / LORA["rank"])
    assert len(got) == 2 * 4 * (7 if lora is LORA else 3)
    errors = relative_error(got, wanted)
    assert errors[""] < 5e-6
    assert max(errors.values()) < 4e-5, errors


def products_of_tokens(place: RankPlace, folder: Path, data: Columns) -> tuple[int, int]:
    """Batched matrix products, and others, of an update."""
    config = config_of({})
    actor = start_actor(place, folder, config)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        actor.update([mini_batch(data, config, without=NONE_OF)], PolicyObjective(), TEMPERATURE)
    calls = {event.key: event.count for event in profile.key_averages()}
    return calls.get("aten::bmm", 0), calls["aten::mm"]


def test_the_frozen_output_layer_multiplies_all_tokens_at_once(gloo, model, data):
    """Not a product with the whole weight for each token, which takes 20 times as long."""
    [(batched, others)] = gloo(1, products_of_tokens, model, data)
    assert (batched, others > 0) == (0, True)


def train(place: RankPlace, folder: Path, layout: dict, data: Columns, out: Path, fields: dict, load: Path | None):
    """Two steps, a checkpoint, two more and an export; with `load` the last two alone. Reports, the reference's
    log-probs before and after, and bytes of weights, gradients, moments and W."""
    fields = dict(fields)
    dtype = fields.pop("dtype", "float32")
    config = config_of(layout, **fields)
    actor = start_actor(place, folder, config, dtype=dtype, keep_reference=True)
    batch, objective, memory = mini_batch(data, config, without=NONE_OF), PolicyObjective(), []
    if load is None:
        actor.export_hf(out / "start")
        memory.append(actor.reference_log_probs(data.responses, batch.plan, TEMPERATURE))
        actor.update([batch] * 2, objective, TEMPERATURE)
        actor.save_checkpoint(out / "checkpoint")
    else:
        actor.load_checkpoint(load)
    reports = actor.update([batch] * 2, objective, TEMPERATURE)
    memory.append(actor.reference_log_probs(data.responses, batch.plan, TEMPERATURE))
    actor.export_hf(out / "end")
    chunks = actor.optimizer.chunks
    gradients = sum(each.main_grad.nbytes for chunk in chunks for each in chunk.params_with_grad)
    states = (each for one in actor.optimizer.megatron.chained_optimizers for each in one.optimizer.state.values())
    moments = sum(state[name].nbytes for state in states for name in ("exp_avg", "exp_avg_sq"))
    held = sum(each.nbytes for chunk in chunks for each in chunk.parameters())
    base = sum(weight.nbytes for _, _, weight, _ in actor.optimizer.adapters._weights)
    return [(one.loss, one.grad_norm) for one in reports], memory, (held, gradients, moments, base)


def stored_tensors(folder: Path) -> dict[str, int]:
    """Bytes of each tensor of a checkpoint."""
    entries = FileSystemReader(folder).read_metadata().state_dict_metadata.items()
    tensors = {name: entry for name, entry in entries if isinstance(entry, TensorStorageMetadata)}
    return {name: entry.size.numel() * entry.properties.dtype.itemsize for name, entry in tensors.items()}


def equal_files(one: Path, other: Path) -> bool:
    return one.read_bytes() == other.read_bytes()


@pytest.mark.parametrize(
    ("layout", "fields"),
    [
        pytest.param({}, {"optimizer": {"distributed": False}, "dtype": "bfloat16"}, marks=pytest.mark.slow),
        ({"tensor": 2, "sequence_parallel": True}, {"offload": "all"}),
        ({"data": 2}, {"dtype": "bfloat16"}),
        pytest.param({"pipeline": 2, "virtual_pipeline": 2}, {}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_adapters_alone_are_trained_and_stored_and_a_resume_is_bit_equal(gloo, layout, fields, model, data, tmp_path):
    dtype = fields.get("dtype", "float32")
    if "offload" in fields:
        fields = {"offload": OffloadConfig(between_phases="all")}
    found = gloo(size(layout), train, model, layout, data, tmp_path, fields, None)
    (reports, (first, later), (held, gradients, _, kept)) = found[0]
    np.testing.assert_array_equal(first.log_probs, later.log_probs)
    # What is trained: nothing but adapters, and merged they are what is exported.
    base = load_file(model / "model.safetensors")
    start, end = (load_file(tmp_path / name / "model.safetensors") for name in ("start", "end"))
    kind = getattr(torch, dtype)
    assert all(torch.equal(start[name], base[name].to(kind)) for name in base)
    halves = load_file(tmp_path / "end" / ADAPTER)
    for name, trained in end.items():
        path = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{path}.lora_A.weight" not in halves:
            assert torch.equal(trained, start[name]), name
            continue
        first_half, second_half = (halves[f"{path}.lora_{half}.weight"].double() for half in "AB")
        change = LORA["alpha"] / LORA["rank"] * second_half @ first_half
        # In bfloat16 rounded once, to the nearest.
        rounding = {"rtol": 1.001 * 2**-8, "atol": 0} if dtype == "bfloat16" else {"rtol": 1e-6, "atol": 1e-8}
        torch.testing.assert_close(trained.double(), start[name].double() + change, **rounding)
        assert not torch.equal(trained, start[name]), name
    # What is stored: A, B and their optimizer state, and no weight of the model.
    stored = stored_tensors(tmp_path / "checkpoint")
    kinds = ("exp_avg", "exp_avg_sq", *(("param",) if fields.get("optimizer") is None else ()))
    names = {name.partition("decoder.")[2] for name in stored}
    assert len(names) == len(halves)
    assert {name.partition("decoder.")[0] for name in stored} == {"", *(f"optimizer.state.{kind}." for kind in kinds)}
    assert sum(stored.values()) == (1 + len(kinds)) * 4 * sum(half.numel() for half in halves.values())
    # What the planner says of it.
    sizes = LayoutConfig(**layout)
    optimizer = OptimizerConfig(**fields.get("optimizer", {}))
    planner = HFModelConfig.load(model), ActorConfig(layout=sizes, optimizer=optimizer, lora=LoraConfig(**LORA)), dtype
    planned = rank_state(*planner, stage=0)
    assert kept == base_bytes(*planner)
    if "offload" not in fields:
        assert (held, gradients) == (planned.parameters, planned.gradients)
        assert abs(sum(one[2][2] for one in found) / len(found) - planned.moments) <= 8
    again = gloo(size(layout), train, model, layout, data, tmp_path / "again", fields, tmp_path / "checkpoint")
    assert again[0][0] == reports
    assert equal_files(tmp_path / "again" / "end" / ADAPTER, tmp_path / "end" / ADAPTER)
    assert equal_files(tmp_path / "again" / "end" / "model.safetensors", tmp_path / "end" / "model.safetensors")


def small_steps(place: RankPlace, folder: Path, data: Columns, out: Path) -> None:
    config = config_of({}, optimizer={"lr": 1e-6})
    actor = start_actor(place, folder, config, dtype="bfloat16")
    actor.update([mini_batch(data, config, without=NONE_OF)] * 3, PolicyObjective(), TEMPERATURE)
    actor.export_hf(out)


def test_a_change_that_bfloat16_rounds_away_is_kept_in_the_adapters(gloo, model, data, tmp_path):
    gloo(1, small_steps, model, data, tmp_path / "out")
    base, merged = load_file(model / "model.safetensors"), load_file(tmp_path / "out/model.safetensors")
    name = "model.layers.0.mlp.down_proj"
    second = load_file(tmp_path / "out" / ADAPTER)[f"base_model.model.{name}.lora_B.weight"]
    assert second.dtype == torch.float32
    torch.testing.assert_close(second.abs().median(), torch.tensor(3e-6), rtol=0.2, atol=0)  # as AdamW moves it
    moved = merged[f"{name}.weight"] != base[f"{name}.weight"].bfloat16()
    assert moved.float().mean() < 0.02


def saved(place: RankPlace, folder: Path, layout: dict, data: Columns, checkpoint: Path, write: bool):
    config = config_of(layout)
    actor = start_actor(place, folder, config)
    batch = mini_batch(data, config, without=NONE_OF)
    if write:
        actor.update([batch] * 2, PolicyObjective(), TEMPERATURE)
        actor.save_checkpoint(checkpoint)
    else:
        actor.load_checkpoint(checkpoint)
    return [(one.loss, one.grad_norm) for one in actor.update([batch] * 2, PolicyObjective(), TEMPERATURE)]


def test_a_checkpoint_loads_at_another_layout(gloo, model, data, tmp_path):
    written = gloo(2, saved, model, {"tensor": 2, "sequence_parallel": True}, data, tmp_path / "step", True)[0]
    read = gloo(2, saved, model, {"pipeline": 2}, data, tmp_path / "step", False)[0]
    np.testing.assert_allclose(read, written, rtol=1e-4)


def refusal(place: RankPlace, folder: Path, checkpoint: Path, lora: dict[str, Any]) -> str:
    actor = start_actor(place, folder, config_of({}, lora))
    with pytest.raises(CheckpointError) as error:
        actor.load_checkpoint(checkpoint)
    return str(error.value)


def test_other_adapters_are_refused(gloo, model, data, tmp_path):
    gloo(1, saved, model, {}, data, tmp_path / "step", True)
    for lora in ({}, LORA | {"rank": 8}, SOME):
        (said,) = gloo(1, refusal, model, tmp_path / "step", lora)
        assert "actor.lora" in said
        assert "'rank': 4" in said


def test_other_weights_below_the_adapters_are_refused(gloo, model, data, tmp_path):
    """The same base in another file or folder is the same one; in an older checkpoint nothing is known of it."""
    checkpoint = tmp_path / "step"
    written = gloo(1, saved, model, {}, data, checkpoint, True)
    tensors = load_file(model / "model.safetensors")
    same, other = tmp_path / "same", tmp_path / "other"
    for folder in (same, other):
        shutil.copytree(model, folder)
    save_file(dict(reversed(tensors.items())), same / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    save_file(tensors | {name: tensors[name] * 1.001}, other / "model.safetensors")
    assert gloo(1, saved, same, {}, data, checkpoint, False) == written
    (said,) = gloo(1, refusal, other, checkpoint, LORA)
    assert "trained on other weights; set model.path" in said


def test_a_mixture_of_experts_is_refused(tmp_path):
    folder = save_tiny(tmp_path / "moe", MIXTURE, tied=False)
    with pytest.raises(ConfigError, match=r"actor\.lora\.rank = 4.*experts"):
        check_actor(HFModelConfig.load(folder), config_of({}))


@pytest.mark.filterwarnings("ignore:builtin type Swig:DeprecationWarning")
def test_peft_loads_the_adapter_and_gives_the_merged_models_logits(gloo, model, data, tmp_path):
    from peft import PeftModel

    gloo(1, gradients_of, model, {}, data, SOME, tmp_path / "out", {})
    tuned = PeftModel.from_pretrained(load_reference(model), tmp_path / "out" / "adapter")
    ids = torch.arange(1, 40)[None]
    with torch.no_grad():
        base, merged = (load_reference(folder)(ids).logits for folder in (model, tmp_path / "out"))
        torch.testing.assert_close(tuned(ids).logits, merged, atol=1e-5, rtol=1e-5)
    assert (merged - base).abs().max() > 1e-2
