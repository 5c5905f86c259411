"""Bytes of trainer ranks and servers in every phase.

Activations are those that backward needs, counted tensor by tensor for the layer of Qwen and Llama with flash
attention, a fused SwiGLU and RMSNorm, no dropout. Per layer and token of a rank, in numbers of the
weights' type (t = tensor-parallel size; with sequence parallel the first term is divided by t too):

    none        4 h + ((heads + 2 groups) + (heads + groups) + heads) x head size / t + 3 ffn / t
    layernorm   without h, the experts' input
    core_attn   the same as none: Megatron keeps what attention gets, queries and keys after their rotation
    mlp         without the MLP's input after its norm, h, and without 3 ffn / t
    moe         without what stands below in the place of 3 ffn / t
    full        h, and for the one layer that is being repeated what `none` has

Where queries and keys are normalised (Qwen3), they are kept before that too: (heads + groups) x head size / t.

In a mixture of experts a rank gets k x i tokens for each of its own (k experts a token, i: `Calibration.imbalance`),
has f / e of an expert's ffn f (e: expert-tensor size), and E routing weights a token; instead of 3 ffn / t that is

    (k i (h e + 3 f) + 8 E) / t

and its backward needs, instead of ffn / t, a routed token's gradient before and after the exchange, 2 k i h e / t.

Backward of a layer's MLP needs besides the gradients of the first product's output, less what is freed by then
(ffn / t), and of its input (h); with sequence parallel also that input, gathered again (h). On the last stage this and
the logits are not there at the same time: the larger counts.

Pipeline stage i of p keeps them for min(p - i, micro-batches) micro-batches at once (1F1B); with v virtual chunks a
stage keeps 2 (p - i - 1) + (v - 1) p + 1 chunks of layers.
"""

from dataclasses import dataclass

from megatron_dapo.actor.model.hf_config import HFModelConfig
from megatron_dapo.actor.packing import round_up
from megatron_dapo.config import Config
from megatron_dapo.config.actor_config import ActorConfig, Recompute
from megatron_dapo.coordinator.inputs import ROUTING_COPIES
from megatron_dapo.plan.rank_state import GRADIENT_BYTES, STATE_BYTES, StateBytes, adapted, base_bytes, rank_state
from megatron_dapo.plan.scenario import Scenario
from megatron_dapo.plan.sync import host_bytes, rank_bytes

PIECE_ELEMENTS = 2**26
"""Logits that the actor brings to float32 at a time on a GPU (`log_prob.piece_elements`; a test compares)."""

MIN_BLOCK = 128
"""Columns of the vocabulary that `log_prob.linear_token_log_probs` takes at a time, at least (a test compares)."""

_PIECES = 3
"""Copies of such a piece that are alive at once: the piece, its exponentials, one temporary."""

_TOKEN_BYTES = 28
"""Of a response token: id, version, log-probs of engine and trainer, entropy, advantage, weight."""

_ROUTER_NUMBERS = 8
"""Of an expert and token: logit, probability, and where it goes, in numbers of bfloat16."""

TRAINER, SERVER = "a trainer process", "a server process"
CHECKPOINT_STATE = "a trainer process more, while it writes a checkpoint"
CHECKPOINT_WEIGHTS = "a trainer process that writes the weights, besides"

PHASES = ("rollout", "log-probs", "update", "optimizer step", "weight sync")
"""`update` is forward and backward of a mini-batch, after which the `optimizer step` comes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMemory:
    """A trainer rank on a pipeline stage."""

    stage: int
    state: StateBytes
    items: dict[str, dict[str, float]]
    """Bytes by phase, then by what they hold; the state's parts among them."""

    @property
    def peaks(self) -> dict[str, float]:
        """Bytes by phase."""
        return {phase: sum(items.values()) for phase, items in self.items.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerMemory:
    """One GPU of a server."""

    weights: float
    kv_cache: float
    """What `rollout.memory_fraction` leaves for it, or `kv_cache_tokens` takes; negative: the weights are more."""

    kv_bytes_per_token: float
    """On this GPU."""

    rest: float
    """Outside `memory_fraction`: activations, graphs, the framework, and a trainer that shares the GPU."""

    head: float
    """Float32 copies of the output layer's weight, also outside: the decode graphs' and the prefill's."""

    @property
    def kv_tokens(self) -> int:
        """Tokens that the server's cache holds."""
        return max(0, int(self.kv_cache / self.kv_bytes_per_token))


def trainer_memory(case: Scenario) -> list[RankMemory]:
    """One for each pipeline stage."""
    return [_rank_memory(case, stage) for stage in range(case.config.actor.layout.pipeline)]


def row_tokens(config: Config) -> int:
    """Tokens of the longest row on one rank: the budget, or one sequence that is longer than it."""
    layout = config.actor.layout
    return max(config.actor.micro_batch_tokens, round_up(config.model.context_length, layout.context) // layout.context)


def repeated_layers(actor: ActorConfig, layers: float) -> float:
    """How many of a rank's layers backward computes again as a whole."""
    if isinstance(actor.recompute, int):
        return min(layers, actor.recompute * (actor.layout.virtual_pipeline or 1))
    return layers if actor.recompute == "full" else 0


def activation_numbers(hf: HFModelConfig, actor: ActorConfig, recompute: Recompute, imbalance: float = 1.0) -> float:
    """What a rank keeps of one layer and token, in numbers, without what is made again in backward. A number of layers
    to recompute: of a layer that is not among them."""
    tensor = actor.layout.tensor
    whole = tensor if actor.layout.sequence_parallel else 1
    heads, kv_heads, head_dim = hf.num_attention_heads, hf.num_query_groups, hf.head_dim
    if recompute == "full":
        return hf.hidden_size / whole
    again = recompute if isinstance(recompute, tuple) else ()
    attention = (3 + hf.qk_norm) * (heads + kv_heads) * head_dim
    normed = 0.0 if {"mlp", "layernorm"}.intersection(again) else hf.hidden_size / whole
    mlp = 3.0 * hf.ffn_hidden_size
    if hf.experts is not None:
        numbers = hf.hidden_size * actor.layout.expert_tensor + 3 * hf.experts.ffn_hidden_size
        mlp = hf.experts.top_k * imbalance * numbers + _ROUTER_NUMBERS * hf.experts.count
    if {"mlp", "moe"}.intersection(again):
        mlp = 0.0
    return 3 * hf.hidden_size / whole + normed + (attention + mlp) / tensor


def _alive(case: Scenario, stage: int) -> float:
    """Micro-batches whose activations of the whole stage are kept at once."""
    config, constants = case.config, case.constants
    layout, virtual = config.actor.layout, config.actor.layout.virtual_pipeline
    mean = min(constants.mean_response, config.rollout.longest_response) + constants.mean_prompt
    tokens = config.algorithm.mini_batch_responses * mean / (layout.data * layout.context)
    micro_batches = max(1, round(tokens / config.actor.micro_batch_tokens))  # of an optimizer step on one rank, about
    if virtual is None:
        return min(layout.pipeline - stage, micro_batches)
    in_flight = 2 * (layout.pipeline - stage - 1) + (virtual - 1) * layout.pipeline + 1
    return min(in_flight, virtual * micro_batches) / virtual


def _rank_memory(case: Scenario, stage: int) -> RankMemory:
    hf, actor, layout, size = case.hf, case.config.actor, case.config.actor.layout, case.dtype_bytes
    state = rank_state(hf, actor, case.config.model.dtype, stage=stage)
    resident: dict[str, float] = {**state.items(), "framework": case.constants.framework_memory}
    tokens, layers = row_tokens(case.config), hf.num_layers / layout.pipeline
    spare = 1 + case.constants.fragmentation
    alive, imbalance = _alive(case, stage), case.constants.imbalance(layout)
    whole_again = repeated_layers(actor, layers)

    def kept_of(recompute: Recompute) -> float:
        return tokens * size * activation_numbers(hf, actor, recompute, imbalance)

    kept = alive * (whole_again * kept_of("full") + (layers - whole_again) * kept_of(actor.recompute))
    whole = hf.hidden_size * (2 if layout.sequence_parallel else 1)
    inside = float(hf.ffn_hidden_size)
    if hf.experts is not None:
        inside = 2 * hf.experts.top_k * imbalance * hf.hidden_size * layout.expert_tensor
    layer = tokens * size * (whole + inside / layout.tensor) + kept_of("none")
    # Layers that are kept lie behind those that are repeated: backward has let go of them by then.
    layer -= kept_of(actor.recompute) if whole_again < layers else 0
    # The gradient of a weight with an adapter, and in float32 the part of it that is being taken.
    layer += max(adapted(hf, actor), default=0) * (size + 4)
    forward, update, items = {}, {}, {}
    if stage == layout.pipeline - 1:
        if layout.sequence_parallel:
            # Megatron keeps the buffer that it gathers the output layer's input in.
            resident["gathered hidden states"] = float(tokens * size * hf.hidden_size)
        forward["logits and log-probs"] = _log_prob_bytes(case, tokens, backward=False)
        update["logits and log-probs"] = _log_prob_bytes(case, tokens, backward=True)
    forward["activations"] = max(0.0, kept_of("none") - sum(forward.values())) * spare
    update["a layer's backward"] = max(0.0, layer - sum(update.values())) * spare
    update["activations"] = kept * spare
    if rows := tokens * routing_bytes(case.config, hf):
        forward["routing"], update["routing"] = float(rows), rows * alive
    extra = {"log-probs": forward, "update": update, "weight sync": rank_bytes(case, stage)}
    for phase in PHASES:
        away = _away(actor, phase)
        items[phase] = {name: value for name, value in resident.items() if name not in away} | extra.get(phase, {})
    return RankMemory(stage=stage, state=state, items=items)


def _away(actor: ActorConfig, phase: str) -> set[str]:
    """What of the state is in host memory during a phase."""
    offload, away = actor.offload, set()
    if actor.optimizer.on_cpu or (offload.optimizer_state and phase != "optimizer step"):
        away = {"master weights", "moments"}
    # Log-probs and a weight sync bring back the parameters alone.
    if phase in ("rollout", "log-probs", "weight sync") and offload.between_phases != "none":
        away |= {"gradients", "master weights", "moments"}
        away |= {"parameters"} if offload.between_phases == "all" and phase == "rollout" else set()
    return away


def _log_prob_bytes(case: Scenario, tokens: int, *, backward: bool) -> float:
    hf, actor, size = case.hf, case.config.actor, case.dtype_bytes
    columns = -(-hf.vocab_size // actor.layout.tensor)
    rows = None if actor.fused_linear_log_prob or case.config.model.upcasts_head else actor.logprob_chunk_tokens
    piece = min(PIECE_ELEMENTS if rows is None else rows * columns, tokens * columns) * 4 * _PIECES
    hidden, weight = tokens * hf.hidden_size, columns * hf.hidden_size
    trained = 0 if actor.lora.rank else weight * size
    if case.config.model.upcasts_head:
        # In float32 too: hidden states twice (all rows, those wanted), a block of the weight and of its gradient.
        blocks = 2 * 4 * min(weight, max(MIN_BLOCK, PIECE_ELEMENTS // tokens) * hf.hidden_size)
        return piece + blocks + 4 * hidden * (4 if backward else 2) + (trained if backward else 0)
    if actor.fused_linear_log_prob:
        # Hidden states whole on each rank, their gradient in float32, the gradient of the layer's weight.
        return piece + hidden * size + (hidden * (4 + size) + trained if backward else 0)
    # The second: their gradient; in forward alone those of the micro-batch before, which Megatron's schedule holds.
    return piece + 2 * tokens * columns * size


def server_memory(case: Scenario) -> ServerMemory:
    """Of each GPU of a server."""
    rollout, parallel = case.config.rollout, case.config.rollout.tensor_parallel
    weights = case.served_bytes / parallel
    token = kv_bytes_per_token(case.hf, parallel, case.dtype_bytes)
    cache = rollout.memory_fraction * case.constants.gpu_memory - weights
    if rollout.kv_cache_tokens is not None:
        cache = min(cache, rollout.kv_cache_tokens * token)
    rest = (1 - rollout.memory_fraction) * case.constants.gpu_memory
    head = 2 * 4 * case.head_parameters / parallel
    return ServerMemory(weights=weights, kv_cache=cache, kv_bytes_per_token=token, rest=rest, head=head)


def kv_bytes_per_token(hf: HFModelConfig, parallel: int, size: int) -> float:
    """On each of a server's `parallel` GPUs; `size`: bytes of a number. More GPUs than key/value heads hold some of
    them twice."""
    return 2.0 * hf.num_layers * max(1.0, hf.num_query_groups / parallel) * hf.head_dim * size


def batch_responses(config: Config) -> int:
    """Responses of a rollout step."""
    return config.algorithm.prompts_per_step * config.algorithm.group_size


def routing_bytes(config: Config, hf: HFModelConfig) -> int:
    """Of a token's experts in all layers; 0 without `actor.routing_replay`."""
    return hf.num_layers * hf.experts.top_k if config.actor.routing_replay and hf.experts is not None else 0


def host_memory(case: Scenario, mean_tokens: float) -> dict[str, float]:
    """Bytes of host memory by what holds them; `mean_tokens`: prompt and response of a trained response."""
    config, size = case.config, case.dtype_bytes
    state = rank_state(case.hf, config.actor, config.model.dtype, stage=0)
    # The reference's weights, and the rank's own while the reference is swapped in; pinned, each in a power of two.
    reference = 4 * state.parameters if config.algorithm.kl.coefficient > 0 else 0
    reference += 2 * base_bytes(case.hf, config.actor, config.model.dtype)
    offload, on_cpu, offloaded = config.actor.offload, config.actor.optimizer.on_cpu, 0
    kept = STATE_BYTES[config.actor.optimizer.compact]
    if offload.optimizer_state or offload.between_phases != "none" or on_cpu:
        offloaded = state.master_weights + state.moments
    if on_cpu:
        # Pinned: gradients, in powers of two, and what Megatron first copies, a rank's whole weights, is kept by
        # PyTorch for other such memory.
        offloaded += 2 * GRADIENT_BYTES * state.moments // kept[1] + state.parameters
    if offload.between_phases != "none":
        offloaded += state.gradients + (state.parameters if offload.between_phases == "all" else 0)
    parameters = state.gradients / GRADIENT_BYTES  # those that are trained
    # With the distributed optimizer every rank writes its own part of the state, else the first data-parallel ranks
    # all of it; these write the weights too.
    written = state.moments / kept[1] if config.actor.optimizer.distributed else parameters
    copied = config.run.checkpoint_in_background
    responses, row = batch_responses(config), routing_bytes(config, case.hf)
    # A server pins 4 bytes for each expert of each token in its KV cache, and the weights that it takes off the GPU.
    pinned = server_memory(case).kv_tokens * row * 4.0 if row else 0.0
    pinned += case.served_bytes / config.rollout.tensor_parallel if config.run.mode == "colocated" else 0
    routing = {"coordinator: routing of a batch": responses * mean_tokens * row * ROUTING_COPIES} if row else {}
    return {
        TRAINER: case.constants.process_memory + reference + offloaded,
        CHECKPOINT_STATE: written * sum(kept) if copied else 0,
        CHECKPOINT_WEIGHTS: parameters * size if copied else 0,
        SERVER: case.constants.process_memory + pinned,
        "coordinator: tokens of a batch, and of its messages": responses * mean_tokens * _TOKEN_BYTES * 2,
        **routing,
        **host_bytes(case),
    }


def node_memory(case: Scenario, processes: int) -> float:
    """Bytes of host memory of a machine on whose GPUs `processes` of trainer and servers run, all responses as long as
    the context."""
    parts = host_memory(case, float(case.config.model.context_length))
    needed = sum(value for name, value in parts.items() if not name.startswith(("a ", "page cache")))
    layout = case.config.actor.layout
    # The first data-parallel ranks write what all hold, the first that hold an expert its weights.
    first = min(processes, max(layout.tensor, layout.expert * layout.expert_tensor) * layout.pipeline)
    writing = min(processes, layout.world_size) if case.config.actor.optimizer.distributed else first
    both = parts[TRAINER] + parts[SERVER]
    needed += processes * (both if case.config.run.mode == "colocated" else max(parts[TRAINER], parts[SERVER]))
    return needed + writing * parts[CHECKPOINT_STATE] + first * parts[CHECKPOINT_WEIGHTS]


def disk_bytes(case: Scenario) -> float:
    """All that the run keeps on disk at once: weight versions, one more being written, checkpoints, export."""
    config, run = case.config, case.config.run
    # Experts of the tokens of groups that a checkpoint carries, at most about a batch.
    carried = routing_bytes(config, case.hf) if config.algorithm.dynamic_sampling.max_staleness else 0
    carried *= batch_responses(config) * config.model.context_length
    versions = 3 if run.export_at_end else 2
    return versions * case.model_bytes + (run.keep_checkpoints + 1) * (case.checkpoint_bytes + carried)
