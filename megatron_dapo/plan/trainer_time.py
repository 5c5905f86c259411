"""Seconds of the trainer's passes: old log-probs, and the optimizer steps of one batch.

A micro-batch of packed sequences of s tokens costs, in forward, 2 x (parameters in matrix products) x s for each and
2 x layers x heads x head size x s^2 for causal attention; backward twice that; `recompute` the part that it repeats.
Micro-batches are planned by the actor's own packing, so imbalance over data-parallel ranks and the last, half-empty
micro-batch are in it. A pipeline of p stages with v chunks each adds (p - 1) / v micro-batches of bubble. The products
of an output layer in float32 are added at the speed of that type; the last stage, which all wait for, makes them alone.

Nothing is assumed to overlap: tensor-parallel and data-parallel communication is added to the arithmetic.
"""

import dataclasses
from dataclasses import dataclass

import numpy as np

from megatron_dapo.actor.model.hf_config import HFModelConfig
from megatron_dapo.actor.packing import plan_for_actor
from megatron_dapo.plan.rank_state import StateBytes, base_bytes, model_parameters
from megatron_dapo.plan.scenario import Scenario

_BYTES = 2
"""Of a number that passes between ranks in bfloat16."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PassTime:
    """Seconds of one pass over some sequences, and where they go."""

    compute_s: float
    """Arithmetic of the slowest data-parallel rank, without the bubble."""

    bubble_s: float
    tensor_s: float
    """Tensor-parallel communication."""

    data_s: float = 0.0
    """Gradients and weights over data-parallel ranks, and the optimizer's own work."""

    flops: float = 0.0
    """Of the model, all ranks together, recomputation not counted."""

    @property
    def seconds(self) -> float:
        """Together."""
        return self.compute_s + self.bubble_s + self.tensor_s + self.data_s


def matrix_parameters(hf: HFModelConfig) -> int:
    """Parameters that multiply every token: all but the embedding, whose rows are looked up; a tied one multiplies."""
    return model_parameters(hf) - (0 if hf.tied else hf.vocab_size * hf.hidden_size)


def forward_flops(hf: HFModelConfig, lengths: np.ndarray) -> np.ndarray:
    """FLOPs of the forward pass of sequences of these lengths, each."""
    lengths = lengths.astype(float)
    return 2 * matrix_parameters(hf) * lengths + attention_flops(hf, lengths)


def attention_flops(hf: HFModelConfig, lengths: np.ndarray) -> np.ndarray:
    return 2.0 * hf.num_layers * hf.num_attention_heads * hf.head_dim * lengths**2


def log_prob_time(case: Scenario, lengths: np.ndarray) -> PassTime:
    """One forward pass over sequences of `lengths` (prompt and response)."""
    return _pass(
        case, lengths, forward_flops(case.hf, lengths), case.constants.forward_efficiency, reductions=2, heads=1
    )


def update_time(case: Scenario, lengths: np.ndarray, state: StateBytes) -> PassTime:
    """One optimizer step over a mini-batch; `state`: the fullest rank's."""
    forward = forward_flops(case.hf, lengths)
    again, reductions = {
        "none": (0.0, 4),
        "selective": (attention_flops(case.hf, lengths.astype(float)), 4),
        "full": (forward, 6),
    }[case.config.actor.recompute]
    work, efficiency = 3 * forward + again, case.constants.train_efficiency
    one = _pass(case, lengths, work, efficiency, reductions=reductions, heads=4)
    return dataclasses.replace(one, data_s=_data_seconds(case, state), flops=float(3 * forward.sum()))


def _pass(
    case: Scenario, lengths: np.ndarray, flops: np.ndarray, efficiency: float, *, reductions: int, heads: int
) -> PassTime:
    """`flops`: of each sequence. `reductions`: all-reduces of a layer's activations, all passes together. `heads`:
    products of an output layer in float32."""
    hf, layout = case.hf, case.config.actor.layout
    plan = plan_for_actor(lengths, case.config.actor, hidden_size=hf.hidden_size)
    split = layout.tensor * layout.pipeline * layout.context
    work = np.array([[flops[batch].sum() for batch in rank] for rank in plan.micro_batches])
    compute = work / (split * case.constants.peak_flops * efficiency)
    tokens = np.array([[lengths[batch].sum() for batch in rank] for rank in plan.micro_batches])
    head = 2 * case.head_parameters * heads / (layout.tensor * layout.context)
    compute += tokens * head / (case.constants.float32_flops * efficiency)
    ring = 2 * (layout.tensor - 1) / layout.tensor * hf.hidden_size * _BYTES
    layers = hf.num_layers / layout.pipeline
    reduce = tokens / layout.context * ring * layers * reductions / case.constants.link(layout.tensor)
    slowest = int((compute + reduce).sum(axis=1).argmax())
    waiting = (layout.pipeline - 1) / (layout.virtual_pipeline or 1)
    return PassTime(
        compute_s=float(compute[slowest].sum()),
        bubble_s=float(waiting * (compute + reduce)[slowest].mean()),
        tensor_s=float(reduce[slowest].sum()),
        flops=float(flops.sum()),
    )


def _data_seconds(case: Scenario, state: StateBytes) -> float:
    """Reduce gradients in float32, step, gather weights; over data- and context-parallel ranks."""
    actor, layout, constants = case.config.actor, case.config.actor.layout, case.constants
    ranks = layout.data * layout.context
    link = constants.link(ranks * layout.tensor)
    share = (ranks - 1) / ranks
    # An all-reduce moves twice what a reduce-scatter does.
    moved = state.gradients * share * (1 if actor.optimizer.distributed else 2)
    gathered = state.gradients if actor.lora.rank else state.parameters
    moved += gathered * share if actor.optimizer.distributed else 0
    # Adam reads gradient, master weight and both moments and writes the last three and the weight.
    touched = 2 * (state.master_weights + state.moments) + state.gradients + state.parameters
    # Moments and master weights that live in host memory come and go with every step.
    carried = 2 * (state.master_weights + state.moments) if actor.offload.optimizer_state else 0
    carried += base_bytes(case.hf, actor, case.config.model.dtype)
    return moved / link + touched / constants.memory_bandwidth + carried / constants.host_bandwidth
