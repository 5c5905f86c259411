"""Run as a process by test_compact_optimizer: Megatron's optimizer over TransformerEngine's real FusedAdam (te_stub).

    python -m tests.emulated.te_adam_session MODEL FOLDER

Its kernel is `fused_adam.adam_of_halves`. Prints what it saw as JSON in its last line.
"""

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

from tests.emulated import fused_adam, te_stub
from tests.emulated.te_session import _join_alone

ADAM = {"betas": (0.8, 0.9), "eps": 1e-8, "weight_decay": 0.1}


def main(model: Path, folder: Path) -> dict[str, Any]:
    te_stub.install()
    sys.modules[te_stub.COMPILED].multi_tensor_adam_param_remainder = fused_adam.adam_of_halves  # type: ignore[attr-defined]
    from transformer_engine.pytorch.optimizers import fused_adam as theirs

    from megatron_dapo.actor.device import cpu

    here = {name: module for name, module in sys.modules.items() if name.startswith("transformer_engine")}
    cpu.install()
    sys.modules.update(here)  # what a CPU rank must not see is what this process is about
    finder = next(finder for finder in sys.meta_path if isinstance(finder, cpu._MegatronFinder))
    theirs.torch = finder.stand_in  # its flag is on the device
    _join_alone(folder)
    return {compact: _saved_and_loaded(model, folder, compact) for compact in ("weights", "all")}


def _saved_and_loaded(model: Path, folder: Path, compact: str) -> dict[str, Any]:
    """Checkpoints before the first step and after two, read by another optimizer, which then makes the third too."""
    from megatron_dapo.actor.checkpoint import checkpoint
    from megatron_dapo.config.actor_config import LayoutConfig

    writer, reader = (_optimizer(model, compact) for _ in range(2))
    [inner] = writer._inner
    seen: dict[str, Any] = {"class": f"{type(inner.optimizer).__module__}.{type(inner.optimizer).__name__}"}
    checkpoint.begin(folder / compact / "0", writer, LayoutConfig(), background=False).finish()
    zeros = [not value.any() for state in inner.optimizer.state.values() for value in state.values()]
    seen["begins with zeros"] = [len(zeros), all(zeros)]
    same = _stand_in(inner.optimizer)
    for number in range(2):
        _step(writer, number)
        _step_alike(same, inner.optimizer)
    seen["as the stand-in"] = _equal(_tensors(inner.optimizer), _tensors(same))
    seen["types"] = sorted({str(value.dtype) for value in _tensors(inner.optimizer)})
    checkpoint.begin(folder / compact / "2", writer, LayoutConfig(), background=False).finish()
    checkpoint.load(folder / compact / "2", reader, LayoutConfig())
    for optimizer in (writer, reader):
        _step(optimizer, 2)
    seen["goes on"] = _equal(*(_tensors(optimizer._inner[0].optimizer) for optimizer in (writer, reader)))
    seen["steps"] = [group["step"] for group in reader._inner[0].optimizer.param_groups]
    return seen


def _optimizer(model: Path, compact: str) -> Any:
    from megatron_dapo.actor.device import DeviceChoice
    from megatron_dapo.actor.model.hf_config import HFModelConfig
    from megatron_dapo.actor.model.model_chunks import build_model
    from megatron_dapo.actor.optimizer import ActorOptimizer
    from megatron_dapo.actor.step_data import LearningRate
    from megatron_dapo.config.actor_config import ActorConfig, OptimizerConfig

    config = ActorConfig(optimizer=OptimizerConfig(compact=compact, lr=1e-2, **ADAM))
    choice = DeviceChoice(device=torch.device("cpu"), backend="gloo")
    chunks = build_model(HFModelConfig.load(model), config, "bfloat16", choice)
    for parameter in chunks[0].parameters():
        torch.nn.init.normal_(parameter)
    rate = LearningRate.of(config.optimizer, steps_per_rollout=1)
    return ActorOptimizer(chunks, config.optimizer, rate, overlap=False)


def _step(optimizer: Any, number: int) -> None:
    """With random gradients, those of `number`; without clipping, whose kernels are mocks here."""
    draw = torch.Generator().manual_seed(number)
    for parameter in optimizer.chunks[0].parameters():
        parameter.main_grad.copy_(torch.randn(parameter.shape, generator=draw))
    optimizer.megatron.prepare_grads()
    optimizer.scheduler.step(1)
    optimizer._inner[0].optimizer.step()


def _stand_in(real: Any) -> fused_adam.FusedAdam:
    """Over copies of its weights."""
    groups = [group | {"params": [weight.clone() for weight in group["params"]]} for group in real.param_groups]
    types = {"exp_avg_dtype": real.exp_avg_dtype, "exp_avg_sq_dtype": real.exp_avg_sq_dtype}
    held: dict[str, Any] = {"master_weights": True, "use_decoupled_grad": True, "store_param_remainders": True}
    return fused_adam.FusedAdam(groups, **types, **held)


def _step_alike(same: fused_adam.FusedAdam, real: Any) -> None:
    for group, other in zip(same.param_groups, real.param_groups, strict=True):
        group.update({name: other[name] for name in ("lr", "weight_decay")})
        for weight, theirs in zip(group["params"], other["params"], strict=True):
            weight.decoupled_grad = theirs.decoupled_grad
    same.step()


def _tensors(optimizer: Any) -> list[torch.Tensor]:
    """Of each weight: itself, moments, lower half."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    names = ("exp_avg", "exp_avg_sq", "master_param")
    return [each for weight in weights for each in (weight, *(optimizer.state[weight][name] for name in names))]


def _equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> list[int]:
    """How many there are, and how many are equal."""
    return [len(one), sum(torch.equal(a, b) for a, b in zip(one, other, strict=True))]


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(json.dumps(main(Path(sys.argv[1]), Path(sys.argv[2]))))
