"""The model chunks of a rank in Megatron's DistributedDataParallel, its AdamW over them, and the learning rate.

Gradients are summed over micro-batches and ranks in float32 and never divided: the token weights already hold every
denominator. Master weights and moments are float32, whatever the type of the weights in forward and backward.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import ParamKey, ParamPredicate, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding

from megatron_dapo.actor.checkpoint.optimizer_state import load_optimizer_state
from megatron_dapo.actor.offload import DeviceMemory
from megatron_dapo.actor.step_data import LearningRate, NonFiniteUpdateError
from megatron_dapo.config.actor_config import OptimizerConfig


class ActorOptimizer:
    """AdamW over the chunks of all ranks. Collective: every rank makes every call."""

    def __init__(
        self, chunks: Sequence[GPTModel], config: OptimizerConfig, learning_rate: LearningRate, *, overlap: bool
    ) -> None:
        """Wrap `chunks`, whose weights are loaded.

        Args:
            overlap: reduce gradients while backward still runs; worth it where communication is not the CPU's work.
        """
        self.config = config
        self.learning_rate = learning_rate
        self.chunks = _wrap(chunks, distributed=config.distributed, overlap=overlap)
        model_config = chunks[0].config
        megatron_config = MegatronOptimizerConfig(
            optimizer="adam",
            lr=learning_rate.peak,
            min_lr=learning_rate.final,
            weight_decay=config.weight_decay,
            adam_beta1=config.betas[0],
            adam_beta2=config.betas[1],
            adam_eps=config.eps,
            clip_grad=config.clip_norm,
            bf16=model_config.bf16,
            params_dtype=model_config.params_dtype,
            use_distributed_optimizer=config.distributed,
        )
        # Biases and norms are the vectors. Megatron 0.16 decays them too unless told.
        no_decay = ParamKey(predicate=ParamPredicate(name="vectors", fn=lambda parameter: parameter.ndim == 1))
        self.megatron = get_megatron_optimizer(
            megatron_config,
            self.chunks,
            config_overrides={no_decay: {"wd_mult": 0.0}},
            use_gloo_process_groups=False,
        )
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
        that are off the device are on it meanwhile.

        Returns:
            The global L2 norm before clipping, and the learning rate.

        Raises:
            NonFiniteUpdateError: the gradient is not finite; on all ranks, and nothing has changed.
        """
        with self.memory.resident("optimizer", give_back=False):
            self.megatron.prepare_grads()
            grad_norm = float(self.megatron.get_grad_norm())
            if not math.isfinite(grad_norm):
                raise NonFiniteUpdateError(
                    f"optimizer step {self.optimizer_steps + 1}: the gradient norm is {grad_norm}; not finite are the "
                    f"gradients of {_name_non_finite(self.chunks)}"
                )
            self.scheduler.step(1)
            if self.config.clip_norm > 0:
                clip_grad_by_total_norm_fp32(self.megatron.get_parameters(), self.config.clip_norm, grad_norm)
            self.megatron.step_with_ready_grads()
        return grad_norm, self.scheduler.get_lr({})

    def load_state(self, state: dict[str, Any], optimizer_steps: int) -> None:
        """Take over what `sharded_optimizer_state` gave when it was saved, after `optimizer_steps` steps.

        Rates, betas and epsilon stay those of the config: a checkpoint must not undo what the config says.
        """
        configured = {
            "max_lr": self.learning_rate.peak,
            "min_lr": self.learning_rate.final,
            "betas": self.config.betas,
            "eps": self.config.eps,
        }
        for group in state.get("optimizer", state)["param_groups"]:
            group.update(configured)
        load_optimizer_state(self.megatron, state)
        self.scheduler.step(optimizer_steps - self.scheduler.num_steps)


def sum_gradients(model: Sequence[torch.nn.Module], num_tokens: torch.Tensor | None, **options: Any) -> None:
    """Megatron's end of backward: sum gradients over ranks, and that is all.

    Its argument `num_tokens` would divide them by the number of tokens, which the token weights have done.
    """
    finalize_model_grads(model, None, **options)


def _wrap(chunks: Sequence[GPTModel], *, distributed: bool, overlap: bool) -> list[DistributedDataParallel]:
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=distributed, overlap_grad_reduce=overlap
    )
    config = chunks[0].config
    # What differs between tensor-parallel ranks; the norm counts the rest once. Megatron marks it while it draws
    # initial weights, which a model that is read from files skips.
    split = (ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding)
    for module in (module for chunk in chunks for module in chunk.modules() if isinstance(module, split)):
        for parameter in module.parameters(recurse=False):
            parameter.tensor_model_parallel = True
    wrapped = [
        DistributedDataParallel(config=config, ddp_config=ddp_config, module=chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(chunks)
    ]
    config.finalize_model_grads_func = sum_gradients
    if overlap:
        no_sync = [chunk.no_sync for chunk in wrapped]
        config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
    return wrapped


def _name_non_finite(chunks: Sequence[DistributedDataParallel], limit: int = 5) -> str:
    """Parameters with a gradient that is not finite, on any rank; the first few and how many more."""
    here = [
        f"{name} (rank {dist.get_rank()})"
        for chunk in chunks
        for name, parameter in chunk.module.named_parameters()
        if not torch.isfinite(parameter.main_grad).all()
    ]
    everywhere: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everywhere, here)
    names = [name for rank in everywhere for name in rank]
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
