"""LoRA (arXiv 2106.09685): of each adapted projection only A [rank, in] and B [out, rank] are trained, in float32.

The model's own weights hold W + alpha / rank x B A at all times. So the layers, whatever kernels they have, every
layout, and what is sent to servers stay as they are: trainer and servers calculate with the same numbers. In bfloat16
the sum is rounded to that type once, from W and the float32 product: a change too small for the weights is not lost in
A and B. W, read from `model.path`, waits in host memory until the next merge. With G the gradient of a merged weight,
in the weight's type, as backward gives it for each micro-batch and forgets it,

    dA = alpha / rank x B^T G        dB = alpha / rank x G A^T

are added up in float32. Backward costs what it costs without adapters; gradient buffers and optimizer state shrink to
the adapters. Tensor parallelism cuts B with the weight's rows, or A with its columns, and adds the gradients of the
other half, which all ranks have. Each projection has its own A, as PEFT has it, also where Megatron joins several in
one weight.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.distributed import finalize_model_grads
from safetensors.torch import save
from torch import Tensor
from torch.nn import Module, Parameter, ParameterDict

from megatron_dapo.actor.model.hf_config import HFModelConfig
from megatron_dapo.actor.offload import to_host
from megatron_dapo.actor.weights.hf_files import SafetensorsReader
from megatron_dapo.actor.weights.hf_weights import hf_tensors, named_parameters, place_of
from megatron_dapo.actor.weights.model_tensors import model_shards
from megatron_dapo.actor.weights.shards import Shards
from megatron_dapo.config.actor_config import LoraConfig

Halves = tuple[Any, Any]
"""A and B of a projection: parameters, to which Megatron's wrapper adds `main_grad`."""


SMALL_CHANGE = 0.05
"""Of alpha / rank x B, against what `Adapters.draw` gives A."""


def adapter_shards(hf: HFModelConfig, config: LoraConfig) -> dict[str, Shards]:
    """Every A and B of the whole model in its order, by its name in Megatron's modules with the global layer number:
    `decoder.layers.3.lora.q_proj_A`. Their tensors have PEFT's names."""
    shards = {}
    for name, weight in model_shards(hf).items():
        for tensor, (rows, *columns) in weight.shapes.items():
            path = tensor.removesuffix(".weight")
            if path.rpartition(".")[2] in config.modules:
                names = _adapter_names(name, tensor)
                first, second = (f"base_model.model.{path}.lora_{half}.weight" for half in "AB")
                shards[names[0]] = Shards(shapes={first: (config.rank, *columns)}, dim=1 if weight.dim else None)
                shards[names[1]] = Shards(shapes={second: (rows, config.rank)}, dim=None if weight.dim else 0)
    return shards


class Adapters:
    """Those of one rank's model chunks. Collective: every rank makes every call."""

    def __init__(self, chunks: list[Any], hf: HFModelConfig, config: LoraConfig, folder: Path, *, seed: int) -> None:
        """Put them into the layers of `chunks`, whose weights are loaded from `folder`, and freeze everything else."""
        self.config, self.shards = config, adapter_shards(hf, config)
        with SafetensorsReader(folder) as reader:
            self.base = reader.digest()
        ranks = parallel_state.get_tensor_model_parallel_world_size()
        self._place = parallel_state.get_tensor_model_parallel_rank(), ranks
        weights = dict(named_parameters(chunks, hf))
        self.parameters: dict[str, Any] = {}
        """This rank's, by name as in `shards`."""
        self._weights: list[tuple[Parameter, Shards, Tensor, dict[str, Halves]]] = []
        """A merged weight, how it is split, W, and the adapters in it by Hugging Face tensor."""
        for chunk in chunks:
            chunk.requires_grad_(False)
            if chunk.pre_process:  # a layer that is recomputed has no backward where no input has a gradient
                chunk.embedding.register_forward_hook(lambda module, given, output: output.requires_grad_())
            for layer in chunk.decoder.layers:
                self._put_into(layer, ranks)
        for name, shards in model_shards(hf).items():
            names = {tensor: _adapter_names(name, tensor) for tensor in shards.shapes}
            halves = {
                tensor: (self.parameters[first], self.parameters[second])
                for tensor, (first, second) in names.items()
                if first in self.parameters and tensor.endswith(".weight")
            }
            if halves:
                self._weights.append((weights[name], shards, to_host(weights[name]), halves))
        self.draw(seed)

    def _put_into(self, layer: Any, ranks: int) -> None:
        above, device = f"decoder.layers.{layer.layer_number - 1}.lora.", next(layer.parameters()).device
        layer.lora = ParameterDict()
        for name, shards in self.shards.items():
            if name.startswith(above):
                made: Any = Parameter(torch.empty(shards.local_shape(ranks), dtype=torch.float32, device=device))
                made.tensor_model_parallel = shards.split  # what the gradient's norm counts on each rank
                self.parameters[name] = layer.lora[name.removeprefix(above)] = made

    def _parts(self, shard: Tensor, shards: Shards, halves: Mapping[str, Halves]) -> Iterator[tuple[Tensor, Halves]]:
        """Views of a weight, or of what has its shape, that have an adapter."""
        for part, name, _, _ in shards.blocks(shard, *self._place):
            if name in halves:
                yield part, halves[name]

    @torch.no_grad()
    def draw(self, seed: int, *, both: bool = False) -> None:
        """PEFT's beginning: A uniform within 1 / sqrt(in), B zeros. The same numbers at any layout.

        `both`: B small and random, so that both have gradients and the merged weights are near W. Far from it a trained
        model is noise, and a gradient's rounding no measure of anything.
        """
        generator = torch.Generator().manual_seed(seed)
        for name, shards in self.shards.items():
            (shape,) = shards.shapes.values()
            whole = torch.empty(shape).uniform_(-1, 1, generator=generator).div_(math.sqrt(shape[1]))
            if name.endswith("B"):
                whole *= SMALL_CHANGE / self.config.scale if both else 0
            if name in self.parameters:
                shards.load(self.parameters[name], partial(_slice, whole), *self._place)
        self.merge()

    @torch.no_grad()
    def merge(self) -> None:
        """Bring the model's weights up to date."""
        for weight, shards, base, halves in self._weights:
            weight.copy_(base, non_blocking=True)
            for part, (first, second) in self._parts(weight, shards, halves):
                part.copy_((second @ first).mul_(self.config.scale).view(part.shape).add_(part))

    def begin(self, config: Any) -> None:
        """Take what backward finds from now on; `config` is the chunks', which are wrapped and have their optimizer."""
        config.finalize_model_grads_func = self._sum_gradients
        for weight, shards, _, halves in self._weights:
            weight.requires_grad_(True)
            weight.register_post_accumulate_grad_hook(partial(self._take, shards, halves))

    @torch.no_grad()
    def _take(self, shards: Shards, halves: Mapping[str, Halves], weight: Any) -> None:
        gradient, weight.grad = weight.grad, None
        for part, (first, second) in self._parts(gradient, shards, halves):
            of_change = part.reshape(len(second), -1).float()
            first.main_grad.addmm_(second.T, of_change, alpha=self.config.scale)
            second.main_grad.addmm_(of_change, first.T, alpha=self.config.scale)

    def _sum_gradients(self, model: Sequence[Module], num_tokens: Tensor | None, **options: Any) -> None:
        """As `optimizer.sum_gradients`; and over the tensor-parallel ranks, of which each has a part of the weight."""
        finalize_model_grads(model, None, **options)
        if self._place[1] > 1:
            whole = [each.main_grad for name, each in self.parameters.items() if not self.shards[name].split]
            joined = torch.cat([each.flatten() for each in whole])
            dist.all_reduce(joined, group=parallel_state.get_tensor_model_parallel_group())
            for each, summed in zip(whole, joined.split([each.numel() for each in whole]), strict=True):
                each.copy_(summed.view_as(each))

    def sharded_state(self, chunk: Module) -> dict[str, ShardedTensor]:
        """All that a checkpoint holds of a chunk, by name in it."""
        name_of, (rank, ranks), state = {each: name for name, each in self.parameters.items()}, self._place, {}
        copy = parallel_state.get_data_parallel_rank(with_context_parallel=True)
        for local, parameter in chunk.named_parameters():
            if name := name_of.get(parameter):
                dim = self.shards[name].dim
                cut = [] if dim is None else [(dim, rank, ranks)]
                replica = (0, rank if dim is None else 0, copy)
                state[local] = ShardedTensor.from_rank_offsets(name, parameter, *cut, replica_id=replica)
        return state

    def files(self, chunks: Sequence[Module], hf: HFModelConfig, base: str) -> dict[str, bytes]:
        """`adapter_files`; empty tensors elsewhere than on global rank 0."""
        return adapter_files(self.config, dict(hf_tensors(chunks, hf, dtype=torch.float32, shards=self.shards)), base)


def adapter_files(lora: LoraConfig, tensors: dict[str, Tensor], base: str) -> dict[str, bytes]:
    """The adapter in PEFT's format, by file. `base`: the model's folder."""
    config: dict[str, Any] = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base}
    config |= {"r": lora.rank, "lora_alpha": lora.alpha, "target_modules": list(lora.modules)}
    told, saved = json.dumps(config, indent=2).encode(), save(tensors, metadata={"format": "pt"})
    return {"adapter/adapter_config.json": told, "adapter/adapter_model.safetensors": saved}


def _adapter_names(name: str, tensor: str) -> tuple[str, str]:
    """Of A and B, for a tensor that is in a layer's weight `name`."""
    at = f"{place_of(name)}.lora.{tensor.split('.')[-2]}"
    return f"{at}_A", f"{at}_B"


def _slice(tensor: Tensor, name: str, dim: int, start: int, stop: int) -> Tensor:
    return tensor.narrow(dim, start, stop - start)
