"""The gradient's norm against Megatron's own, and how often the host would wait for the device meanwhile."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_iter

from megatron_dapo.algorithm.policy_loss import PolicyObjective
from tests.actor.gloo import RankPlace
from tests.actor.mini_batches import TEMPERATURE, actor_config, columns, mini_batch, start_actor
from tests.actor.test_actor import NONE_OF, size
from tests.actor.tiny import MIXTURE, save_tiny


class Waits(TorchFunctionMode):
    """Numbers that are read from tensors; each would wait for CUDA."""

    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.item, torch.Tensor.__float__):
            self.count += 1
        elif func is torch.tensor:
            self.count += sum(isinstance(value, torch.Tensor) for value in tree_iter(args))
        return func(*args, **(kwargs or {}))


def norms(place: RankPlace, folder: Path, layout: dict[str, int], distributed: bool) -> dict[str, float]:
    actor = start_actor(place, folder, actor_config(layout, optimizer={"distributed": distributed}))
    optimizer = actor.optimizer
    optimizer.zero_grad()
    batch = mini_batch(columns(folder), actor.config, without=NONE_OF)
    actor.passes.backward(batch, PolicyObjective(), TEMPERATURE)
    optimizer.megatron.prepare_grads()
    with Waits() as own:
        norm = optimizer._grad_norm()
    with Waits() as theirs:
        megatrons = float(optimizer.megatron.get_grad_norm())
    chained = optimizer.megatron.chained_optimizers
    weights = sum(len(inner.get_parameters()) for inner in chained)
    actor.close()
    return {
        "norm": norm,
        "Megatron's": megatrons,
        "waits": own.count / len(chained),
        "Megatron's waits": theirs.count,
        "weights": weights,
    }


@pytest.mark.parametrize(
    ("family", "layout", "distributed"),
    [
        ("qwen2", {}, False),
        ("qwen2", {"data": 2}, True),
        ("qwen2", {"tensor": 2, "sequence_parallel": True}, False),
        ("qwen2", {"pipeline": 2}, True),
        (MIXTURE, {"data": 2, "expert": 2}, True),
    ],
)
def test_the_norm_is_megatrons_with_few_waits(gloo, tmp_path, family, layout, distributed):
    folder = save_tiny(tmp_path, family, tied=family == "qwen2")
    found = gloo(size(layout), norms, folder, layout, distributed)
    assert len({each["norm"] for each in found}) == 1
    for each in found:
        assert each["norm"] == pytest.approx(each["Megatron's"], rel=1e-6)
        assert each["norm"] > 0
        assert each["waits"] <= 3 < each["weights"], "of Megatron's function on one tensor"
        # As soon as this is false Megatron waits no more.
        assert each["Megatron's waits"] > each["weights"] / 2
