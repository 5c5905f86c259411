"""Seconds of the trainer's passes: old log-probs, and the optimizer steps of one batch.

A micro-batch of packed sequences of s tokens costs, in forward, 2 x (parameters in matrix products) x s for each and
2 x layers x heads x head size x s^2 for causal attention; backward twice that; `recompute` the part that it repeats.
Micro-batches are planned by the actor's own packing, so imbalance over data-parallel ranks and the last, half-empty
micro-batch are in it. A pipeline of p stages with v chunks each adds (p - 1) / v micro-batches of bubble. The last
stage, which all wait for, makes the output layer's products alone; those in float32 are added at that type's speed.

Of a mixture's experts a token's own count, at the speed of grouped products, on the busiest rank; a micro-batch reads
the weights of all that the rank has, and adds to their gradients. A layer sends each token to its experts and back, in
forward and in backward; data-parallel ranks that share experts wait for each other there.

Context-parallel ranks pass keys and values around a ring, in backward their gradients too. A pipeline stage gives each
row's activations to the next one, in backward their gradients to the one before, once a chunk.

Of communication only that of data parallel overlaps with arithmetic, under `actor.overlap`: gradients are summed in
the last micro-batch's backward, two thirds of its time, and weights gathered in the first one's forward, a third. What
takes longer is added, and so is all other communication.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from megatron_dapo.actor.model.hf_config import HFModelConfig
from megatron_dapo.actor.packing import plan_for_actor
from megatron_dapo.config.actor_config import ActorConfig, LayoutConfig
from megatron_dapo.plan import rank_state
from megatron_dapo.plan.memory import repeated_layers
from megatron_dapo.plan.scenario import Calibration, Scenario

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

    recompute_s: float = 0.0
    """Part of `compute_s`: what backward computes again."""

    padding_s: float = 0.0
    """Part of `compute_s`: rows filled up to one length, and what the slowest data-parallel rank has above the mean."""

    neighbour_s: float = 0.0
    """Around context-parallel rings, and from pipeline stage to stage."""

    expert_s: float = 0.0
    """Tokens on their way to experts and back."""

    data_s: float = 0.0
    """Gradients and weights over data-parallel ranks, as far as nothing hides them, and the optimizer's own work."""

    flops: float = 0.0
    """Of the model, all ranks together, recomputation not counted."""

    @property
    def seconds(self) -> float:
        """Together."""
        return self.compute_s + self.bubble_s + self.exposed_s

    @property
    def exposed_s(self) -> float:
        """Communication that nothing hides, and the optimizer's own work."""
        return self.tensor_s + self.neighbour_s + self.expert_s + self.data_s


def matrix_parameters(hf: HFModelConfig) -> int:
    """Parameters that multiply a token: all active ones but the embedding, whose rows are looked up; a tied one
    multiplies."""
    return rank_state.active_parameters(hf) - (0 if hf.tied else hf.vocab_size * hf.hidden_size)


def forward_flops(hf: HFModelConfig, lengths: np.ndarray) -> np.ndarray:
    """FLOPs of the forward pass of sequences of these lengths, each."""
    lengths = lengths.astype(float)
    return 2 * matrix_parameters(hf) * lengths + attention_flops(hf, lengths)


def attention_flops(hf: HFModelConfig, lengths: np.ndarray) -> np.ndarray:
    return 2.0 * hf.num_layers * hf.num_attention_heads * hf.head_dim * lengths**2


def recomputed(hf: HFModelConfig, actor: ActorConfig, lengths: np.ndarray) -> tuple[np.ndarray, float]:
    """What `actor.recompute` repeats: FLOPs of sequences of these lengths, each, and which part of a layer's exchanges
    between ranks."""
    layers, lengths = hf.num_layers / actor.layout.pipeline, lengths.astype(float)
    if isinstance(actor.recompute, tuple):
        width = hf.ffn_hidden_size * ("mlp" in actor.recompute)
        if hf.experts is not None:
            width = hf.experts.top_k * hf.experts.ffn_hidden_size * ("moe" in actor.recompute)
        flops = 2.0 * hf.num_layers * 3 * hf.hidden_size * width * lengths
        more = 0.5 * ("mlp" in actor.recompute) + ("moe" in actor.recompute)
        return flops + attention_flops(hf, lengths) * ("core_attn" in actor.recompute), more
    share = repeated_layers(actor, layers) / layers
    head = 2 * hf.vocab_size * hf.hidden_size * lengths
    return share * (forward_flops(hf, lengths) - head), share


def log_prob_time(case: Scenario, lengths: np.ndarray) -> PassTime:
    """One forward pass over sequences of `lengths` (prompt and response)."""
    return _pass(case, lengths, forward_flops(case.hf, lengths))


def update_time(case: Scenario, lengths: np.ndarray, state: rank_state.StateBytes) -> PassTime:
    """One optimizer step over a mini-batch; `state`: the fullest rank's."""
    forward = forward_flops(case.hf, lengths)
    again, more = recomputed(case.hf, case.config.actor, lengths)
    one = _pass(case, lengths, 3 * forward + again, more)
    recompute_s = (one.compute_s - one.padding_s) * float(again.sum() / (3 * forward + again).sum())
    _, count = _micro_batches(lengths.tobytes(), case.hf.hidden_size, _packed_alike(case.config.actor))
    data_s = _data_seconds(case, state, one.compute_s * case.config.actor.layout.data / count)
    return replace(one, recompute_s=recompute_s, data_s=data_s, flops=float(3 * forward.sum()))


def _pass(case: Scenario, lengths: np.ndarray, flops: np.ndarray, more: float | None = None) -> PassTime:
    """`flops`: of each sequence. `more`: what part of a layer is repeated in an update; None: a forward pass alone."""
    hf, layout, efficiency = case.hf, case.config.actor.layout, case.constants.forward_efficiency
    # The forward's products that are in `flops`. Exchanges of a layer's activations, all passes together: all-reduces
    # after attention and after a dense MLP; to experts and back. Products of an output layer in float32.
    times, exchanges, heads = 1.0, 1.0, 1
    if more is not None:
        times, exchanges, heads, efficiency = 3 + more, 2 + more, 4, case.constants.train_efficiency
    places, count = _micro_batches(lengths.tobytes(), hf.hidden_size, _packed_alike(case.config.actor))
    work = np.bincount(places, flops, count).reshape(layout.data, -1)
    tokens = np.bincount(places, lengths, count).reshape(layout.data, -1)
    mean = work.sum() / layout.data
    if layout.pipeline > 1:  # rows of one length: padding costs what a token does
        padding = tokens.max(axis=1, keepdims=True) - tokens
        work, tokens = work + padding * flops.sum() / lengths.sum(), tokens + padding
    padded = work
    work = work + tokens * times * slow_flops(hf, layout, case.constants)
    work = work + tokens * min(times, 3) * 2 * hf.vocab_size * hf.hidden_size * (layout.pipeline - 1)  # not made again
    compute = work * layout.data / (layout.world_size * case.constants.peak_flops * efficiency)
    touched = case.dtype_bytes * exchanges + (2 * rank_state.GRADIENT_BYTES if times > 1 else 0)
    compute += rank_state.stage_experts(hf, layout) * touched / case.constants.memory_bandwidth
    head = 2 * case.head_parameters * heads / (layout.tensor * layout.context)
    compute += tokens * head / (case.constants.float32_flops * efficiency)
    ring = 2 * (layout.tensor - 1) / layout.tensor * hf.hidden_size * _BYTES
    layers = hf.num_layers / layout.pipeline
    reductions = exchanges * (2 if hf.experts is None else 1)
    reduce = tokens / layout.context * ring * layers * reductions / case.constants.link(layout.tensor)
    routed = tokens / layout.context * layers * exchanges * exchange_seconds(hf, layout, case.constants)
    pass_on = tokens / layout.context * _neighbour_seconds(case, layers, update=more is not None)
    if layout.expert * layout.expert_tensor > layout.tensor * layout.context:
        parts = (compute, reduce, routed, pass_on, padded)
        compute, reduce, routed, pass_on, padded = (part.max(axis=0, keepdims=True) for part in parts)
    together = compute + reduce + routed + pass_on
    slowest = int(together.sum(axis=1).argmax())
    waiting = (layout.pipeline - 1) / (layout.virtual_pipeline or 1)
    return PassTime(
        compute_s=float(compute[slowest].sum()),
        bubble_s=float(waiting * together[slowest].mean()),
        tensor_s=float(reduce[slowest].sum()),
        padding_s=max(0.0, float(compute[slowest].sum() * (1 - mean / padded[slowest].sum()))),
        neighbour_s=float(pass_on[slowest].sum()),
        expert_s=float(routed[slowest].sum()),
        flops=float(flops.sum()),
    )


def _packed_alike(actor: ActorConfig) -> ActorConfig:
    """With nothing in it that `plan_for_actor` does not look at, so that `_micro_batches` knows it again."""
    layout = actor.layout
    sizes: dict[str, Any] = {"context": layout.context, "data": layout.data, "pipeline": min(layout.pipeline, 2)}
    sizes |= {"pipeline": layout.pipeline, "virtual_pipeline": 2} if layout.virtual_pipeline else {}
    return ActorConfig(layout=LayoutConfig(**sizes), micro_batch_tokens=actor.micro_batch_tokens)


@lru_cache(maxsize=4096)
def _micro_batches(lengths: bytes, hidden_size: int, actor: ActorConfig) -> tuple[np.ndarray, int]:
    """`plan_for_actor` of int64 lengths: the number of each one's micro-batch, rank by rank, and of how many."""
    plan = plan_for_actor(np.frombuffer(lengths, np.int64), actor, hidden_size=hidden_size)
    batches = [batch for rank in plan.micro_batches for batch in rank]
    numbers = np.repeat(np.arange(len(batches)), [len(batch) for batch in batches])
    return numbers[np.argsort(np.concatenate(batches))], len(batches)


def _neighbour_seconds(case: Scenario, layers: float, *, update: bool) -> float:
    """Of a token on a rank of `layers` layers: keys and values from each other context-parallel rank, and its
    activations to the next pipeline stage. In backward keys and values again, with their gradients; what is recomputed
    as whole layers needs them once more."""
    hf, actor, layout, constants = case.hf, case.config.actor, case.config.actor.layout, case.constants
    rings = 3 + repeated_layers(actor, layers) / layers if update else 1
    ring = 2 * hf.num_query_groups * hf.head_dim / layout.tensor * _BYTES * layers * rings * (layout.context - 1)
    seconds = ring / constants.link(layout.tensor * layout.context)
    if layout.pipeline > 1:
        row = hf.hidden_size / (layout.tensor if layout.sequence_parallel else 1) * _BYTES
        seconds += row * (2 if update else 1) * (layout.virtual_pipeline or 1) / constants.link(layout.world_size)
    return seconds


def slow_flops(hf: HFModelConfig, layout: LayoutConfig, constants: Calibration) -> float:
    """What a token's forward loses in its experts, to grouped products and the busiest rank, as FLOPs of dense products
    that would take as long; 0 for a dense model."""
    if (experts := hf.experts) is None:
        return 0.0
    own = 2 * hf.num_layers * experts.top_k * 3 * hf.hidden_size * experts.ffn_hidden_size
    return own * (constants.imbalance(layout) / constants.expert_efficiency - 1)


def exchange_seconds(hf: HFModelConfig, layout: LayoutConfig, constants: Calibration) -> float:
    """Of a token and layer on a rank, to its experts and back; 0 for a dense model. Each copy goes to one
    expert-parallel rank, which may be on another node, and from there to those that have the expert's other parts."""
    if (experts := hf.experts) is None:
        return 0.0
    inside = min(1.0, constants.gpus_per_node / (layout.expert * layout.expert_tensor))
    near = inside - 1 / layout.expert + layout.expert_tensor - 1
    network = constants.network_bandwidth * constants.communication_efficiency
    seconds = near / constants.link(1) + (1 - inside) / network
    return 2 * experts.top_k * constants.imbalance(layout) / layout.tensor * hf.hidden_size * _BYTES * seconds


def _data_seconds(case: Scenario, state: rank_state.StateBytes, micro_batch_s: float) -> float:
    """Reduce gradients in float32, step, gather weights; over data- and context-parallel ranks, of experts over those
    that hold the same. Without what a micro-batch of `micro_batch_s` hides."""
    actor, layout, constants = case.config.actor, case.config.actor.layout, case.constants
    experts = rank_state.apart_parameters(case.hf, layout) * rank_state.GRADIENT_BYTES / max(1, state.gradients)
    reduce_s, gather_s, gathered = 0.0, 0.0, state.gradients if actor.lora.rank else state.parameters
    for part, ranks, each in (
        (1 - experts, layout.data * layout.context, layout.tensor),
        (experts, layout.expert_replicas, layout.expert * layout.expert_tensor),
    ):
        share = part * (ranks - 1) / ranks / constants.link(ranks * each)
        # An all-reduce moves twice what a reduce-scatter does.
        reduce_s += share * state.gradients * (1 if actor.optimizer.distributed else 2)
        gather_s += share * gathered if actor.optimizer.distributed else 0
    hides_s = 0 if actor.overlap is False or actor.lora.rank else micro_batch_s
    moved_s = max(0.0, reduce_s - hides_s * 2 / 3) + max(0.0, gather_s - hides_s / 3)
    # Adam reads gradient, master weight and both moments and writes the last three and the weight.
    touched = 2 * (state.master_weights + state.moments) + state.gradients + state.parameters
    # Moments and master weights that live in host memory come and go with every step.
    carried = 2 * (state.master_weights + state.moments) if actor.offload.optimizer_state else 0
    carried += rank_state.base_bytes(case.hf, actor, case.config.model.dtype)
    if actor.optimizer.on_cpu:
        numbers = state.moments / rank_state.MOMENT_BYTES
        step_s = numbers * constants.cpu_step_s / actor.threads
        return moved_s + step_s + numbers * (rank_state.GRADIENT_BYTES + case.dtype_bytes) / constants.host_bandwidth
    return moved_s + touched / constants.memory_bandwidth + carried / constants.host_bandwidth
