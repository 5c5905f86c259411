"""`actor.overlap` changes when ranks communicate and no number: one life of an actor with it, and one without.

With it the distributed optimizer's weights are whole only after the next forward or a gather. So each thing that reads
or moves weights does so here right after an update.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from safetensors.torch import load_file

from megatron_dapo.algorithm.policy_loss import PolicyObjective
from megatron_dapo.config.actor_config import LoraConfig, OffloadConfig
from tests.actor.gloo import RankPlace
from tests.actor.mini_batches import TEMPERATURE, Columns, actor_config, columns, mini_batch, start_actor
from tests.actor.model.test_routing_replay import foreign
from tests.actor.tiny import MIXTURE, save_tiny
from tools.actor_job import loss_and_gradients

OPTIMIZER = {"lr": 2e-2, "eps": 1e-2, "clip_norm": 0.0}
"""The norm that would clip is summed over ranks' parts, which end where buckets end: it is equal but for rounding."""

PARTS = ("parameters", "gradients", "optimizer")


@contextmanager
def small_buckets() -> Iterator[Counter[str]]:
    """Several gradient buckets in a tiny model, as large ones have; counts what is under way when it is waited for."""
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup as Group

    from megatron_dapo.actor import optimizer

    seen: Counter[str] = Counter()

    def counting(real: Any, handle: str, group: Any, *args: Any, **options: Any) -> None:
        seen[handle] += getattr(group, handle) is not None
        real(group, *args, **options)

    with mock.patch.multiple(
        Group,
        finish_param_sync=partial_method(counting, Group.finish_param_sync, "param_gather_handle"),
        finish_grad_sync=partial_method(counting, Group.finish_grad_sync, "grad_reduce_handle"),
    ):
        small = partial(optimizer.DistributedDataParallelConfig, bucket_size=20_000)
        with mock.patch.object(optimizer, "DistributedDataParallelConfig", small):
            yield seen


def partial_method(function: Any, *given: Any) -> Any:
    return lambda self, *args, **options: function(*given, self, *args, **options)


def life(
    place: RankPlace,
    folder: Path,
    layout: dict[str, Any],
    options: dict[str, Any],
    data: Columns,
    overlap: bool,
    out: Path,
) -> tuple[dict[str, Any], Counter[str], Any]:
    """What rank 0 computed, in order; on each rank what was under way, and the config of its model."""
    options = dict(options)
    settings, dtype = OPTIMIZER | options.pop("optimizer", {}), options.pop("dtype", "float32")
    config = actor_config(layout, optimizer=settings, overlap=overlap, **options)
    found: dict[str, Any] = {}
    with small_buckets() as seen:
        actor = start_actor(place, folder, config, dtype=dtype, keep_reference=True)
        batch = mini_batch(data, config, without=("reference_log_probs", "correction"))

        def update() -> None:
            reports = actor.update([batch, batch], PolicyObjective(), TEMPERATURE)
            found[f"reports {len(found)}"] = np.array([[report.loss, report.grad_norm] for report in reports])

        def note(name: str, result: Any) -> None:
            found[name] = None if result is None else result.log_probs

        def exported(name: str) -> None:
            actor.export_hf(out / name)
            if place.rank == 0:
                tensors = load_file(out / name / "model.safetensors")
                found.update({f"{name}: {key}": value.float().numpy() for key, value in tensors.items()})

        update()
        exported("exported")
        update()
        actor.memory.offload(*PARTS)
        exported("offloaded")
        actor.memory.onload(*PARTS)
        update()
        actor.reset_reference(optimizer=False)
        note("reference", actor.reference_log_probs(data.responses, batch.plan, TEMPERATURE))
        update()
        actor.save_checkpoint(out / "saved")
        update()
        note("log-probs", actor.log_probs(data.responses, batch.plan, TEMPERATURE))
        actor.load_checkpoint(out / "saved")
        exported("loaded")
        note("log-probs of the checkpoint", actor.log_probs(data.responses, batch.plan, TEMPERATURE))
        update()
        gradient = loss_and_gradients(actor, batch, PolicyObjective(), TEMPERATURE)
        if gradient is not None:
            found |= {f"gradient: {name}": value.numpy() for name, value in gradient[1].items()}
        exported("after a certificate")
        model = actor.optimizer.chunks[0].config
        actor.close()
    return found, seen, (model.overlap_p2p_comm, model.batch_p2p_comm)


DATA, VIRTUAL = {"data": 2}, {"data": 2, "pipeline": 2, "virtual_pipeline": 2}
LAYOUTS = [
    pytest.param("qwen3", DATA, {"dtype": "bfloat16", "offload": OffloadConfig(optimizer_state=True)}, id="data"),
    pytest.param(
        MIXTURE,
        DATA | {"expert": 2},
        {"recompute": 2, "routing_replay": True, "dtype": "bfloat16"},
        id="experts",
        marks=pytest.mark.slow,
    ),
    pytest.param("qwen2", VIRTUAL, {"recompute": "full"}, id="virtual pipeline"),
    pytest.param("qwen2", {"context": 2}, {"fused_linear_log_prob": True}, id="context", marks=pytest.mark.slow),
    pytest.param("qwen2", {"context": 2, "data": 2}, {}, id="context and data", marks=pytest.mark.slow),
    pytest.param("qwen2", DATA, {"optimizer": {"distributed": False}}, id="plain optimizer", marks=pytest.mark.slow),
    pytest.param("qwen3", VIRTUAL, {"dtype": "bfloat16"}, id="virtual pipeline, bfloat16", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("family", "layout", "options"), LAYOUTS)
def test_overlap_changes_no_number(gloo, tmp_path, family, layout, options):
    folder = save_tiny(tmp_path / "model", family, tied=family == "qwen3")
    data = columns(folder)
    if options.get("routing_replay"):
        data = replace(data, responses=replace(data.responses, routing=foreign(data.responses)))
    size = int(np.prod([layout.get(name, 1) for name in ("pipeline", "context", "data")]))
    place = size, life, folder, layout, options, data
    ranks = gloo(*place, True, tmp_path / "with", timeout_s=240)
    plain = gloo(*place, False, tmp_path / "without", timeout_s=240)
    found, wanted = ranks[0][0], plain[0][0]
    assert found.keys() == wanted.keys()
    # Bit for bit, but where gloo adds up four ranks, in an order that depends on where a number lies in its bucket.
    rounding = 0 if layout.get("context", 1) * layout.get("data", 1) == 2 else 1e-5
    for name, value in wanted.items():
        near = {"rtol": 1e-5} if "reports" in name else {"rtol": rounding, "atol": rounding}
        np.testing.assert_allclose(found[name], value, **near, err_msg=name)
    changed = [name for name, value in wanted.items() if name.startswith("loaded: ") and value.ndim > 1]
    assert changed
    assert not any(np.array_equal(wanted[name], wanted[name.replace("loaded", "exported")]) for name in changed)
    distributed = options.get("optimizer", {}).get("distributed", True)
    for _, seen, _ in ranks:
        assert seen["grad_reduce_handle"] > 12
        assert (seen["param_gather_handle"] > 12) == distributed
    assert not any(count for _, seen, _ in plain for count in seen.values())
    virtual = "virtual_pipeline" in layout
    assert {p2p for _, _, p2p in ranks} == {(virtual, not virtual)}
    assert {p2p for _, _, p2p in plain} == {(False, not virtual)}


@pytest.mark.slow
def test_adapters_take_no_part(gloo, tmp_path):
    """Their gradients come from those of whole weights."""
    folder = save_tiny(tmp_path / "model", "qwen2", tied=False)
    place = 2, life, folder, DATA, {"lora": LoraConfig(rank=2)}, columns(folder)
    (found, seen, _), _ = gloo(*place, True, tmp_path / "with")
    assert not any(seen.values())
    wanted = gloo(*place, False, tmp_path / "without")[0][0]
    for name, value in wanted.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)
