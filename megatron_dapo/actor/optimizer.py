"""The model chunks of a rank in Megatron's DistributedDataParallel, its AdamW over them, and the learning rate.

Gradients are summed over micro-batches and ranks in float32 and never divided: the token weights already hold every
denominator. Master weights and moments are float32, whatever the type of the weights in forward and backward, but for
`compact`; they are on the device, but for `on_cpu`.

Moments, master weights and step counts are stored as shards that fit any layout. The plain optimizer's state has the
shape of the weights, and Megatron shards it like them. The distributed optimizer's lies in flat buffers cut over the
data-parallel ranks, wherever the cut falls in a weight. Megatron's way to make that fit any layout
(`fully_reshardable`) gathers the state of a model-parallel group on its first data-parallel rank, which copies and
writes for all; in 0.16 and 0.19 it also takes a neighbour's moments behind the first padded bucket. Here a rank gathers
nothing: its part of a weight, a range of flat numbers, is at most three rectangles of that weight (rest of a row, whole
rows, begin of a row), each a shard of its own. What is stored is the same tensors under the same names.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import ParamKey, ParamPredicate, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32, get_grad_norm_fp32
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding

from megatron_dapo.actor.device.process_groups import gather_objects
from megatron_dapo.actor.offload import DeviceMemory
from megatron_dapo.actor.step_data import LearningRate, NonFiniteUpdateError
from megatron_dapo.actor.weights.lora import Adapters
from megatron_dapo.config.actor_config import LoraConfig, OptimizerConfig

NAMES = ("param", "exp_avg", "exp_avg_sq")
"""Master weight, first and second moment."""


class ActorOptimizer:
    """AdamW over the chunks of all ranks. Collective: every rank makes every call."""

    def __init__(
        self,
        chunks: Sequence[GPTModel],
        config: OptimizerConfig,
        learning_rate: LearningRate,
        *,
        overlap: bool,
        adapters: Adapters | None = None,
    ) -> None:
        """Wrap `chunks`, whose weights are loaded.

        Args:
            overlap: reduce gradients while backward still runs, and gather the distributed optimizer's weights while
                the next forward does; worth it where communication is not the CPU's work.
            adapters: of these chunks; then nothing else is trained.
        """
        self.config, self.learning_rate = config, learning_rate
        self.adapters, self.lora = adapters, adapters.config if adapters is not None else LoraConfig()
        self._gathers_late = overlap and config.distributed
        self.chunks = _wrap(chunks, distributed=config.distributed, overlap=overlap)
        model_config = chunks[0].config
        # Adapters are float32: no optimizer has copies of them.
        dtype = model_config.params_dtype if adapters is None else torch.float32
        on_cpu = config.on_cpu and next(chunks[0].parameters()).is_cuda
        moments = torch.bfloat16 if config.compact == "all" else torch.float32
        megatron_config = MegatronOptimizerConfig(
            optimizer="adam",
            lr=learning_rate.peak,
            min_lr=learning_rate.final,
            weight_decay=config.weight_decay,
            adam_beta1=config.betas[0],
            adam_beta2=config.betas[1],
            adam_eps=config.eps,
            clip_grad=config.clip_norm,
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=config.distributed,
            overlap_param_gather=self._gathers_late,
            optimizer_cpu_offload=on_cpu,
            optimizer_offload_fraction=1.0,
            overlap_cpu_optimizer_d2h_h2d=on_cpu,
            use_precision_aware_optimizer=config.compact != "none",
            exp_avg_dtype=moments,
            exp_avg_sq_dtype=moments,
        )
        if on_cpu:
            # Master weights leave the device too. As an argument it is checked against TransformerEngine's version,
            # which has no part in it and may be absent.
            megatron_config.use_precision_aware_optimizer = True
            megatron_config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True
        self._decoupled = megatron_config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
        # Biases and norms are the vectors. Megatron 0.16 decays them too unless told.
        no_decay = ParamKey(predicate=ParamPredicate(name="vectors", fn=lambda parameter: parameter.ndim == 1))
        self.megatron = get_megatron_optimizer(
            megatron_config, self.chunks, config_overrides={no_decay: {"wd_mult": 0.0}}, use_gloo_process_groups=False
        )
        # With expert parallelism two: the experts' gradients are summed over other ranks than the dense ones.
        self._inner = self.megatron.chained_optimizers
        self.memory = DeviceMemory(self.chunks, self.megatron)
        self.scheduler = OptimizerParamScheduler(
            self.megatron,
            init_lr=0.0,
            max_lr=learning_rate.peak,
            min_lr=learning_rate.final,
            lr_warmup_steps=learning_rate.warmup_steps,
            lr_decay_steps=learning_rate.decay_steps or learning_rate.warmup_steps + 1,
            lr_decay_style="constant" if learning_rate.decay_steps is None else "cosine",
            start_wd=config.weight_decay,
            end_wd=config.weight_decay,
            wd_incr_steps=1,
            wd_incr_style="constant",
        )
        if adapters is not None:
            adapters.begin(model_config)

    @property
    def optimizer_steps(self) -> int:
        """Steps made so far."""
        return self.scheduler.num_steps

    def zero_grad(self) -> None:
        """Forget all gradients; call before every forward and backward of a mini-batch."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.megatron.zero_grad()

    def step(self) -> tuple[float, float]:
        """Clip and apply the gradients that forward and backward have left in the chunks. Moments and master weights
        that are off the device are on it meanwhile. With overlap the weights are whole after the next forward, or
        `gather_weights`.

        Returns:
            The global L2 norm before clipping, and the learning rate.

        Raises:
            NonFiniteUpdateError: the gradient is not finite; on all ranks, and nothing has changed.
        """
        with self.memory.resident("optimizer", give_back=False):
            self.megatron.prepare_grads()
            grad_norm = self._grad_norm()
            if not math.isfinite(grad_norm):
                told = f"optimizer step {self.optimizer_steps + 1}: the gradient norm is {grad_norm}"
                raise NonFiniteUpdateError(f"{told}; not finite are the gradients of {_name_non_finite(self.chunks)}")
            self.scheduler.step(1)
            if self.config.clip_norm > 0:
                parameters = [one for inner in self._inner for one in inner.get_parameters()]
                clip_grad_by_total_norm_fp32(parameters, self.config.clip_norm, grad_norm, self._decoupled)
            self.megatron.step_with_ready_grads()
            if self.adapters is not None:
                self.adapters.merge()
        return grad_norm, self.scheduler.get_lr({})

    def _grad_norm(self) -> float:
        """Over all ranks, by Megatron's function, which is given norms: of gradients it waits for the device at each,
        where it has neither TransformerEngine nor Apex."""
        norms = []
        for inner in self._inner:
            # Its name in 0.16, and in 0.19.
            gradients = (getattr(inner, "get_main_grads_for_grad_norm", None) or inner.get_grads_for_grad_norm)()
            each = [torch.stack(torch._foreach_norm(gradients))] if gradients else []
            norms.append(get_grad_norm_fp32(each, grad_stats_parallel_group=inner.get_grad_stats_parallel_group()))
        return math.hypot(*norms)

    def gather_weights(self) -> None:
        """Make the weights whole on every rank, before anything but a forward pass reads or moves them."""
        for chunk in self.chunks if self._gathers_late else ():
            chunk.start_param_sync(force_sync=True)

    def reset(self) -> None:
        """AdamW's moments and their step count as before the first step. Weights and learning rate stay."""
        for inner in self._inner:
            _set_step(inner.optimizer, 0)
            for state in inner.optimizer.state.values():
                for name in NAMES[1:]:
                    state[name].zero_()

    def sharded_state(self, model_state: dict[str, Any], metadata: dict[str, Any], *, loading: bool) -> dict[str, Any]:
        """What `dist_checkpointing` saves, or with `loading` what it fills; then `load_state` takes it.

        Args:
            model_state: the model's sharded state dict, of the same parameters.
            metadata: the one that made `model_state`.
        """
        for inner in self._inner:
            # Zeros before the first step: a checkpoint holds the same entries at any time.
            if isinstance(inner.optimizer, HybridDeviceOptimizer):
                _begin_on_cpu(inner.optimizer)
            elif self._decoupled:  # FusedAdam has another argument by now than Megatron gives it
                for weight in (weight for group in inner.optimizer.param_groups for weight in group["params"]):
                    if not inner.optimizer.state[weight]:
                        inner.optimizer.initialize_state(weight, True)
            else:
                inner.init_state_fn(inner.optimizer, inner.config)
        dense = self._inner[0]
        if not self.config.distributed:
            return dense.sharded_state_dict(model_state, loading, metadata)
        places, _ = extract_sharded_tensors_and_factories(model_state)
        place_of = {place.data: place for place in nested_values(places)}
        own_ranges = itertools.chain.from_iterable(map(_own_ranges, self._inner))
        # The experts' groups hold what the dense ones do.
        common = dense.state_dict()
        for group in common["optimizer"]["param_groups"]:
            for name in [name for name, value in group.items() if isinstance(value, type)]:
                del group[name]  # which optimizers a HybridDeviceOptimizer is made of: code is not stored
        parts = {
            number: {name: dict(enumerate(_pieces(place_of[parameter], name, begin, own[name]))) for name in NAMES}
            for number, (parameter, begin, own) in enumerate(own_ranges)
        }
        return common | {"param_state": parts}

    def load_state(self, state: dict[str, Any], optimizer_steps: int) -> None:
        """Take over what was filled, saved after `optimizer_steps` steps.

        Rates, betas and epsilon stay those of the config: a checkpoint must not undo what the config says. The
        distributed optimizer's tensors are filled where they lie, so only the values of its parameter groups are left,
        the step count among them. Its own `load_state_dict` would hold all of them twice, with TransformerEngine's
        FusedAdam three times.
        """
        stored = state.get("optimizer", state)["param_groups"]
        if self.config.distributed:
            for inner in self._inner:
                _set_step(inner.optimizer, max(group.get("step", 0) for group in stored))
        else:
            rate, config = self.learning_rate, self.config
            for group in stored:
                group.update(max_lr=rate.peak, min_lr=rate.final, betas=config.betas, eps=config.eps)
            self.megatron.load_state_dict(state)
        self.scheduler.step(optimizer_steps - self.scheduler.num_steps)
        if self.adapters is not None:
            self.adapters.merge()


def sum_gradients(model: Sequence[torch.nn.Module], num_tokens: torch.Tensor | None, **options: Any) -> None:
    """Megatron's end of backward: sum gradients over ranks, and that is all.

    Its argument `num_tokens` would divide them by the number of tokens, which the token weights have done.
    """
    finalize_model_grads(model, None, **options)


def _wrap(chunks: Sequence[GPTModel], *, distributed: bool, overlap: bool) -> list[DistributedDataParallel]:
    late, interleaved = overlap and distributed, len(chunks) > 1
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=distributed,
        overlap_grad_reduce=overlap,
        overlap_param_gather=late,
        align_param_gather=interleaved,
    )
    config = chunks[0].config
    # What differs between tensor-parallel ranks; the norm counts the rest once. Megatron marks it while it draws
    # initial weights, which a model that is read from files skips.
    split = (ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding)
    for module in (module for chunk in chunks for module in chunk.modules() if isinstance(module, split)):
        for name, parameter in module.named_parameters(recurse=False):
            if name == "weight" or not isinstance(module, RowParallelLinear):  # its bias is the same on all
                parameter.tensor_model_parallel = True
    for chunk in chunks:  # each rank has experts, or parts of them, of its own
        for name, parameter in chunk.named_parameters():
            if ".experts." in name:
                parameter.tensor_model_parallel = True
    wrapped = [
        DistributedDataParallel(config=config, ddp_config=ddp_config, module=chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(chunks)
    ]
    config.finalize_model_grads_func = sum_gradients
    if overlap:
        no_sync = [chunk.no_sync for chunk in wrapped]
        config.no_sync_func = no_sync if interleaved else no_sync[0]
    if late and interleaved:  # a later chunk's weights come while an earlier one computes
        config.param_sync_func = [chunk.start_param_sync for chunk in wrapped]
    return wrapped


def _name_non_finite(chunks: Sequence[DistributedDataParallel], limit: int = 5) -> str:
    """Parameters with a gradient that is not finite, on any rank; the first few and how many more."""
    here = [
        f"{name} (rank {dist.get_rank()})"
        for chunk in chunks
        for name, parameter in chunk.module.named_parameters()
        if hasattr(parameter, "main_grad") and not torch.isfinite(parameter.main_grad).all()
    ]
    names = [name for rank in gather_objects(here) for name in rank]
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def rectangles(shape: Sequence[int], begin: int, end: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(offset, size) of the fewest blocks that hold the numbers `begin` .. `end` of a row-major array, in their order.

    (4, 10), 7 .. 32 is ((0, 7), (1, 3)), ((1, 0), (2, 10)), ((3, 0), (1, 2)).
    """
    if begin == end:
        return
    if len(shape) == 1:
        yield (begin,), (end - begin,)
        return
    row = math.prod(shape[1:])
    (first, skipped), (last, rest) = divmod(begin, row), divmod(end, row)
    if skipped:
        for offset, size in rectangles(shape[1:], skipped, row if first < last else rest):
            yield (first, *offset), (1, *size)
        first += 1
    if first < last:
        yield (first, *[0] * (len(shape) - 1)), (last - first, *shape[1:])
    if rest and first <= last:
        for offset, size in rectangles(shape[1:], 0, rest):
            yield (last, *offset), (1, *size)


def _own_ranges(optimizer: DistributedOptimizer) -> Iterator[tuple[torch.nn.Parameter, int, dict[str, torch.Tensor]]]:
    """In Megatron's order: a weight, where this rank's part of it begins, and the flat state of that part."""
    for by_dtype in optimizer.gbuf_ranges:
        for buckets in by_dtype.values():
            for bucket in buckets:
                for parameter, ranges in bucket["param_map"].items():
                    group, place = optimizer.model_param_group_index_map[parameter]
                    own = optimizer.optimizer.param_groups[group]["params"][place]
                    state = optimizer.optimizer.state[own]
                    # As they lie, of master weights maybe a half: Megatron's own way would copy those of FusedAdam.
                    tensors = state.get("master_param", own), state["exp_avg"], state["exp_avg_sq"]
                    yield parameter, ranges["param"].start, dict(zip(NAMES, tensors, strict=True))


def _pieces(
    shard: ShardedTensor | ShardedTensorFactory, name: str, begin: int, values: torch.Tensor
) -> Iterator[ShardedTensor]:
    """`values`, flat, of a weight from its number `begin` on, as blocks of the whole model's tensor.

    Args:
        shard: the weight's place; a factory, where Megatron cuts the weight (gate and up projection) into several.
    """
    key, end, done = f"optimizer.state.{name}.{shard.key}", begin + values.numel(), 0
    # Without numbers: only where each part begins in the weight is asked for.
    shard = replace(shard, key=key, data=torch.empty_like(shard.data, device="meta"))
    for part in [shard] if isinstance(shard, ShardedTensor) else nested_values(shard.build()):
        assert part.data is not None
        assert part.data.is_contiguous(), f"{key}: not cut along its first axis"
        start, prepended = part.data.storage_offset(), part.prepend_axis_num
        inside = (min(max(at - start, 0), part.data.numel()) for at in (begin, end))
        for offset, size in rectangles(part.local_shape, *inside):
            block = values[done : done + math.prod(size)].detach()
            done += block.numel()
            local_shape = (*[1] * prepended, *size)
            global_offset = [at + more for at, more in zip(part.global_offset[prepended:], offset, strict=True)]
            yield replace(
                part,
                data=block.view(local_shape),
                dtype=values.dtype,
                local_shape=local_shape,
                global_offset=(*part.global_offset[:prepended], *global_offset),
                axis_fragmentations=None,
                prepend_axis_num=0,
                replica_id=(*part.replica_id[:2], 0),  # among data-parallel ranks nobody else has this block
            )
    assert done == values.numel(), f"{key}: the parts hold {done} of {values.numel()} numbers"


def _set_step(optimizer: torch.optim.Optimizer, step: int) -> None:
    """AdamW's count of steps: a group has one, in PyTorch's AdamW, which is the one on the CPU, each weight."""
    for group in optimizer.param_groups:
        group["step"] = step
    for state in optimizer.state.values():
        if "step" in state:
            state["step"].fill_(step)


def _begin_on_cpu(optimizer: HybridDeviceOptimizer) -> None:
    """What PyTorch's AdamW makes in its first step. Megatron's `dummy_step` would change the weights."""
    for inner in optimizer.sub_optimizers:
        for weight in (weight for group in inner.param_groups for weight in group["params"]):
            if not inner.state[weight]:
                moments = {name: torch.zeros_like(weight) for name in NAMES[1:]}
                inner.state[weight].update(step=torch.zeros(()), **moments)
    optimizer._sync_sub_optimizers_state_to_hdo()
