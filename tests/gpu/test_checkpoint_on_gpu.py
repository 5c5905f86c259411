"""A checkpoint that one device wrote goes on at the other: also between TransformerEngine's layers and PyTorch's."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_dapo.actor.step_data import UpdateMetrics
from megatron_dapo.algorithm.policy_loss import PolicyObjective
from megatron_dapo.config.actor_config import ActorConfig, OptimizerConfig
from tests.actor.gloo import RankPlace
from tests.actor.mini_batches import TEMPERATURE, Columns, columns, mini_batch, start_actor
from tests.gpu.place import DEVICE, DTYPES, save_small

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

Step = tuple[int, float, float]


def config_of(device: str, **fields: Any) -> ActorConfig:
    # After large steps the gradient is so small that bfloat16's rounding is as large.
    optimizer = OptimizerConfig(lr=1e-4, eps=1e-2, warmup_rollout_steps=0)
    return ActorConfig(device=device, micro_batch_tokens=40, optimizer=optimizer, **fields)


def steps(reports: list[UpdateMetrics]) -> list[Step]:
    return [(report.optimizer_step, report.loss, report.grad_norm) for report in reports]


def begin(
    place: RankPlace, folder: Path, data: Columns, device: str, dtype: str, target: Path, fields: dict[str, Any]
) -> list[Step]:
    """Two steps, a checkpoint, and two more, which are returned."""
    config = config_of(device, **fields)
    actor = start_actor(place, folder, config, dtype=dtype)
    batch = mini_batch(data, config, without=("reference_log_probs", "correction"))
    actor.update([batch] * 2, PolicyObjective(), TEMPERATURE)
    actor.save_checkpoint(target)
    return steps(actor.update([batch] * 2, PolicyObjective(), TEMPERATURE))


def go_on(
    place: RankPlace, folder: Path, data: Columns, device: str, dtype: str, source: Path, fields: dict[str, Any]
) -> list[Step]:
    """Two steps after it."""
    config = config_of(device, **fields)
    actor = start_actor(place, folder, config, dtype=dtype)
    actor.load_checkpoint(source)
    batch = mini_batch(data, config, without=("reference_log_probs", "correction"))
    return steps(actor.update([batch] * 2, PolicyObjective(), TEMPERATURE))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("to_gpu", [True, False], ids=["from the CPU", "to the CPU"])
def test_a_checkpoint_crosses(gloo, on_device, record, dtype, to_gpu, tmp_path):
    folder = save_small(tmp_path / "model", tied=False)
    data = columns(folder)

    def on_cpu(*arguments: Any) -> Any:
        return gloo(1, *arguments)[0]

    write, read = (on_cpu, on_device) if to_gpu else (on_device, on_cpu)
    devices = ("cpu", DEVICE) if to_gpu else (DEVICE, "cpu")
    wanted = write(begin, folder, data, devices[0], dtype, tmp_path / "step", {})
    got = read(go_on, folder, data, devices[1], dtype, tmp_path / "step", {})
    record(f"{devices[0]} to {devices[1]}, {dtype}: step, loss, norm", {"there": wanted[0], "here": got[0]})
    assert [step for step, *_ in got] == [3, 4]
    # The next gradient is of the same weights, to what the type rounds. Later ones in bfloat16 multiply the difference.
    near, compared = (1e-3, 2) if dtype == "float32" else (0.1, 1)
    norms, wanted_norms = ([norm for *_, norm in found[:compared]] for found in (got, wanted))
    np.testing.assert_allclose(norms, wanted_norms, rtol=near)
