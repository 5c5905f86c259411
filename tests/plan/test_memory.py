"""Memory on top of the state: against Megatron's own saved activations, and what makes it grow and shrink."""

import dataclasses
import itertools
from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import patch

import pytest

from megatron_dapo.actor.model.hf_config import HFModelConfig
from megatron_dapo.config import load_config
from megatron_dapo.config.actor_config import ActorConfig, LayoutConfig, LoraConfig, Recompute
from megatron_dapo.coordinator import batch
from megatron_dapo.plan import memory, step_plan, sync
from megatron_dapo.plan.memory import (
    CHECKPOINT_STATE,
    CHECKPOINT_WEIGHTS,
    SERVER,
    TRAINER,
    activation_numbers,
    disk_bytes,
    host_memory,
    node_memory,
    server_memory,
    trainer_memory,
)
from megatron_dapo.plan.rank_state import base_bytes, rank_state, trained_parameters
from megatron_dapo.plan.scenario import BUILT_IN, Scenario, changed
from tests.actor.gloo import run_ranks
from tests.actor.tiny import MIXTURE, random_sequences, save_tiny
from tests.plan.conftest import RECIPES
from tools.rank_pool import RankPlace

HF = BUILT_IN["Qwen2.5-32B"]


def saved_bytes(place: RankPlace, folder, recompute: Recompute, tokens: int, layout: dict | None = None) -> int:
    """Bytes of storage that autograd keeps for backward after the forward pass of one sequence, weights not counted."""
    import torch
    from megatron.core.tensor_parallel import random

    from tests.actor.ranks import build, micro_batch

    # Megatron's recompute of norms asks TransformerEngine for FP8, and its layers there have one norm of their own.
    norms = isinstance(recompute, tuple) and "layernorm" in recompute
    parts = tuple(part for part in recompute if part != "layernorm") or "none" if norms else recompute
    built = build(place, folder, layout or {}, recompute=parts)
    [chunk] = built.chunks
    chunk.train()
    for layer in chunk.decoder.layers if norms else ():
        layer.recompute_pre_mlp_layernorm = True
    weights = {parameter.untyped_storage().data_ptr() for parameter in chunk.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    ids, packed = micro_batch(built, random_sequences([tokens]))
    no_fp8 = SimpleNamespace(is_fp8_enabled=lambda: False)
    stand_ins = {"FP8GlobalStateManager": no_fp8, "activation_recompute_forward": lambda **_: nullcontext()}
    with (
        patch.multiple(random, create=True, **stand_ins),
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
    ):
        output = chunk(ids, torch.zeros_like(ids), None, packed_seq_params=packed)
    assert output.requires_grad
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def more_on_a_cpu(hf: HFModelConfig, recompute: Recompute) -> float:
    """Numbers of a token and layer that Megatron's local layers with our norm and attention keep beside the plan's,
    which are those of TransformerEngine's layers."""
    if recompute == "full":
        return 0
    again = recompute if isinstance(recompute, tuple) else ()
    queries, keys = (heads * hf.head_dim for heads in (hf.num_attention_heads, hf.num_query_groups))
    heads = hf.num_attention_heads + hf.num_query_groups
    # Each norm's 1 / rms, unless it is made again. Keys are normalised where the fused product has them, uncopied.
    more = 2 - ("layernorm" in again) + (heads - keys) * hf.qk_norm
    # Our attention rotates inside: its checkpoint keeps queries, and keys where a norm made them, as they were before.
    # The sums of the softmax are one float32 number a head, which the plan leaves out.
    unrotated = queries + keys * hf.qk_norm
    more += unrotated - queries - keys if "core_attn" in again else hf.num_attention_heads
    if hf.experts is None:
        # PyTorch's SwiGLU keeps its two factors besides; a norm apart from the product gives the checkpoint its input.
        return more + (hf.hidden_size if "mlp" in again else 2 * hf.ffn_hidden_size)
    if "moe" in again:
        return more
    # Both factors, and their product before the routing weight. Of the router float32 logits and a mask of bytes for
    # each expert, six numbers of 4 bytes for each that is chosen, where the plan has 8 an expert for fused kernels.
    each, chosen = hf.experts.count, hf.experts.top_k
    return more + 3 * chosen * hf.experts.ffn_hidden_size + 1.25 * each + 6 * chosen - memory._ROUTER_NUMBERS * each


DENSE: list[Recompute] = ["none", "full", ("core_attn",), ("mlp",)]
EXPERTS: list[Recompute] = ["none", "full", ("core_attn",), ("layernorm",), ("moe",), ("layernorm", "moe")]


@pytest.mark.parametrize(
    ("family", "recompute"),
    [*itertools.product(["qwen2"], DENSE), ("qwen3", ("mlp", "core_attn")), *itertools.product([MIXTURE], EXPERTS)],
    ids=str,
)
def test_activations_of_a_layer_are_those_that_autograd_keeps(family, recompute, tmp_path):
    """To 0.01%: the plan's numbers and those that only a CPU's layers keep. So what a way saves is right too."""
    tokens, per_layer = 128, []
    for layers in (2, 4):
        shape = {"hidden_size": 128, "moe_intermediate_size": 96} if family == MIXTURE else {}
        folder = save_tiny(tmp_path / str(layers), family, tied=False, num_hidden_layers=layers, **shape)
        [kept] = run_ranks(1, saved_bytes, folder, recompute, tokens)
        per_layer.append(kept / tokens / 4)
    measured = (per_layer[1] - per_layer[0]) / 2
    hf, actor = HFModelConfig.load(folder), ActorConfig(layout=LayoutConfig(), recompute=recompute)
    planned = activation_numbers(hf, actor, recompute)
    assert measured == pytest.approx(planned + more_on_a_cpu(hf, recompute), rel=1e-4)
    if recompute == ("core_attn",):
        assert planned == activation_numbers(hf, actor, "none"), "it saves nothing where Megatron rotates before it"


@pytest.mark.parametrize("recompute", ["full", "none"])
def test_activations_of_a_layer_whose_experts_are_on_two_ranks(recompute, tmp_path):
    """The mean of both: what one has too many tokens, the other has too few."""
    tokens, per_layer, layout = 128, [], {"data": 2, "expert": 2}
    shape = {"hidden_size": 128, "moe_intermediate_size": 96}
    for layers in (2, 4):
        folder = save_tiny(tmp_path / f"{layers}", MIXTURE, tied=False, num_hidden_layers=layers, **shape)
        per_layer.append(sum(run_ranks(2, saved_bytes, folder, recompute, tokens, layout)) / 2 / tokens / 4)
    measured = (per_layer[1] - per_layer[0]) / 2
    hf, actor = HFModelConfig.load(folder), ActorConfig(layout=LayoutConfig(**layout), recompute=recompute)
    planned = activation_numbers(hf, actor, recompute)
    assert measured == pytest.approx(planned + more_on_a_cpu(hf, recompute), rel=1e-3)


def test_constants_that_stand_in_modules_with_torch_are_the_same():
    import torch

    from megatron_dapo.actor.model.log_prob import MIN_BLOCK, piece_elements
    from megatron_dapo.actor.weights.hf_weights import EXPORT_FILE_BYTES

    assert piece_elements(torch.device("cuda")) == memory.PIECE_ELEMENTS
    assert MIN_BLOCK == memory.MIN_BLOCK
    assert EXPORT_FILE_BYTES == sync.EXPORT_FILE_BYTES
    assert batch.CHUNKS == step_plan.LOG_PROB_PARTS


def update_peak(changes: dict, constants, stage: int = -1) -> float:
    config = changed(load_config(RECIPES / "h100_32.yaml"), {"actor.offload.optimizer_state": False} | changes)
    return trainer_memory(Scenario(config, HF, constants))[stage].peaks["update"]


def test_each_remedy_lowers_the_peak(constants):
    usual = {"actor.recompute": "none"}
    peak = update_peak(usual, constants)
    amounts = ["full", 31, 8, 1, "none"]
    peaks = [update_peak({"actor.recompute": amount}, constants) for amount in amounts]
    assert peaks == sorted(peaks)
    assert len(set(peaks)) == len(peaks)
    assert update_peak({"actor.recompute": 32}, constants) == peaks[0], "a stage has 32 layers"
    assert peaks[0] < update_peak({"actor.recompute": ("mlp",)}, constants) < peak
    assert update_peak(usual | {"actor.fused_linear_log_prob": True}, constants) < peak
    assert update_peak(usual | {"actor.layout.data": 2}, constants) < peak
    assert update_peak(usual | {"actor.layout.sequence_parallel": False}, constants) > peak
    assert update_peak(usual | {"actor.micro_batch_tokens": 45056}, constants) > peak


def test_an_output_layer_in_float32_is_counted_on_both_sides(constants):
    """The trainer holds no logits, but hidden states in float32; a server two copies of its share of the weight."""
    config = load_config(RECIPES / "h100_32.yaml")
    usual, wide = (Scenario(changed(config, {"model.fp32_head": told}), HF, constants) for told in (False, True))
    tokens, share = memory.row_tokens(config), HF.vocab_size * HF.hidden_size / config.actor.layout.tensor
    needed = trainer_memory(wide)[-1].items["update"]["logits and log-probs"]
    assert needed > 4 * 4 * tokens * HF.hidden_size + 2 * share
    assert needed < 4 * 4 * tokens * HF.hidden_size + 2 * share + 1.2e9
    assert trainer_memory(wide)[0] == trainer_memory(usual)[0], "the first stage has no output layer"
    copies = 2 * 4 * HF.vocab_size * HF.hidden_size / config.rollout.tensor_parallel
    assert (server_memory(usual).head, server_memory(wide).head) == (0, copies)


def test_what_is_offloaded_is_away_but_for_the_optimizers_step(constants):
    config = changed(load_config(RECIPES / "h100_32.yaml"), {"actor.offload.optimizer_state": True})
    [rank, _] = trainer_memory(Scenario(config, HF, constants))
    optimizer = {"master weights", "moments"}
    assert {phase for phase, items in rank.items.items() if optimizer <= set(items)} == {"optimizer step"}
    config = changed(config, {"actor.offload.between_phases": "all"})
    [rank, _] = trainer_memory(Scenario(config, HF, constants))
    assert set(rank.items["rollout"]) == {"framework"}
    for phase in ("log-probs", "weight sync"):
        assert "parameters" in rank.items[phase]
        assert not {"gradients", *optimizer} & set(rank.items[phase])
    assert {"parameters", "gradients"} <= set(rank.items["update"])


def test_a_step_on_the_cpu_keeps_the_state_away_and_in_host_memory(constants):
    """There besides: pinned gradients, and what Megatron copied first."""
    config = changed(load_config(RECIPES / "h100_32.yaml"), {"actor.offload.optimizer_state": False})
    there, here = (
        Scenario(changed(config, {"actor.optimizer.on_cpu": on_cpu}), HF, constants) for on_cpu in (False, True)
    )
    for before, after in zip(trainer_memory(there), trainer_memory(here), strict=True):
        state = before.state.master_weights + before.state.moments
        assert {phase: before.peaks[phase] - peak for phase, peak in after.peaks.items()} == pytest.approx(
            dict.fromkeys(after.peaks, state)
        )
    [state, _] = (one.state for one in trainer_memory(here))
    more = host_memory(here, 5000.0)[TRAINER] - host_memory(there, 5000.0)[TRAINER]
    owned = state.moments / 8
    assert more == pytest.approx(owned * (12 + 2 * 4) + state.parameters)
    colocated = {"run.mode": "colocated", "actor.offload.between_phases": "all"}
    moved = [
        step_plan.handover_seconds(one.changed(colocated), server_memory(one), state) * constants.host_bandwidth
        for one in (there, here)
    ]
    assert moved[0] - moved[1] == pytest.approx(2 * owned * 12)


@pytest.mark.parametrize(("compact", "each"), [("weights", 10), ("all", 6)])
def test_compact_state_takes_less_on_the_device_and_in_checkpoints(compact, each, constants):
    config = changed(load_config(RECIPES / "h100_32.yaml"), {"actor.offload.optimizer_state": False})
    usual, less = (
        Scenario(changed(config, {"actor.optimizer.compact": value}), HF, constants) for value in ("none", compact)
    )
    for before, after in zip(trainer_memory(usual), trainer_memory(less), strict=True):
        owned = before.state.moments / 8
        assert before.state.total - after.state.total == pytest.approx(owned * (12 - each))
    assert usual.checkpoint_bytes - less.checkpoint_bytes == pytest.approx(
        trained_parameters(HF, LoraConfig()) * (12 - each)
    )
    lora = Scenario(changed(config, {"actor.lora.rank": 8}), HF, constants)
    adapters = trained_parameters(HF, lora.config.actor.lora)
    assert lora.checkpoint_bytes == adapters * (4 + 12), "adapters are float32, and so is their copy in the optimizer"
    written = [host_memory(case, 5000.0)[CHECKPOINT_STATE] for case in (less, usual)]
    assert written[0] / written[1] == pytest.approx(each / 12)


def test_a_budget_below_one_sequence_saves_nothing(constants):
    assert update_peak({"actor.micro_batch_tokens": 1024}, constants) == update_peak({}, constants)


def test_the_first_stage_keeps_more_micro_batches_than_the_last(constants):
    config = changed(load_config(RECIPES / "h100_32.yaml"), {"actor.layout.pipeline": 4, "actor.recompute": "none"})
    kept = [rank.items["update"]["activations"] for rank in trainer_memory(Scenario(config, HF, constants))]
    assert [value / kept[-1] for value in kept] == pytest.approx([4, 3, 2, 1])


def test_the_last_stage_holds_two_logits_and_with_sequence_parallel_megatrons_buffer(constants):
    """Against traces at true size: docs/measurements/symbolic.md."""
    config = load_config(RECIPES / "h100_32.yaml")
    first, last = trainer_memory(Scenario(config, HF, constants))
    logits, piece = 22528 * 152064 // 8 * 2, 2**26 * 4
    assert "logits and log-probs" not in first.items["log-probs"]
    for phase in ("log-probs", "update"):
        assert last.items[phase]["logits and log-probs"] == 2 * logits + 3 * piece
        assert last.items[phase]["gathered hidden states"] == 22528 * 5120 * 2
    for fused, same in ((True, True), (False, False)):  # which has rows of its own
        held = [
            trainer_memory(Scenario(changed(config, {"actor.fused_linear_log_prob": fused} | rows), HF, constants))[1]
            for rows in ({}, {"actor.logprob_chunk_tokens": 64})
        ]
        assert (held[0].items["update"] == held[1].items["update"]) is same
    plain = changed(config, {"actor.layout.sequence_parallel": False})
    assert all(
        "gathered hidden states" not in rank.items["update"] for rank in trainer_memory(Scenario(plain, HF, constants))
    )


def test_backward_of_a_layer_counts_where_no_logits_are_larger(constants):
    config = changed(load_config(RECIPES / "h100_32.yaml"), {"actor.recompute": "full"})
    case = Scenario(config, HF, dataclasses.replace(constants, fragmentation=0.0))
    first, last = (rank.items["update"]["a layer's backward"] for rank in trainer_memory(case))
    repeated = 22528 * 2 * (4 * 5120 + (2 * 40 + 2 * 8 + 40 + 8) * 128 + 3 * 27648) / 8
    assert first == pytest.approx(repeated + 22528 * 2 * (2 * 5120 + 27648 / 8), rel=0.05)
    assert last == 0
    [some, _] = trainer_memory(case.changed({"actor.recompute": 31}))
    freed = first - some.items["update"]["a layer's backward"]
    assert freed == pytest.approx(repeated), "the layer that was kept is let go of before"


def test_kv_cache_of_a_token_is_that_of_the_published_model(constants):
    config = load_config(RECIPES / "h100_32.yaml")
    server = server_memory(Scenario(config, HF, constants))
    assert server.kv_bytes_per_token * config.rollout.tensor_parallel == 256 * 1024
    assert server.weights * config.rollout.tensor_parallel == pytest.approx(65.5e9, rel=0.001)
    assert server.kv_cache == pytest.approx(0.8 * 80e9 - server.weights)


def test_more_ranks_than_key_heads_store_them_twice(constants):
    config = changed(load_config(RECIPES / "qwen2.5_7b_8gpu.yaml"), {"rollout.tensor_parallel": 8})
    hf = BUILT_IN["Qwen2.5-7B"]
    assert server_memory(Scenario(config, hf, constants)).kv_bytes_per_token == 2 * 28 * 128 * 2


def test_a_checkpoint_takes_host_memory_of_the_ranks_that_write_it(constants):
    """A first data-parallel rank: its own part of the optimizer's state, and the weights for all of them."""
    config = load_config(RECIPES / "h100_128.yaml")
    layout = config.actor.layout
    ranks = layout.data * layout.context
    assert ranks > 1
    average = 32.76e9 / (layout.tensor * layout.pipeline)

    def copied(changes):
        parts = host_memory(Scenario(changed(config, changes), HF, constants), 5000.0)
        return [parts[CHECKPOINT_STATE] / average, parts[CHECKPOINT_WEIGHTS] / average]

    assert copied({}) == pytest.approx([12 / ranks, 2], rel=0.1)
    assert copied({"actor.optimizer.distributed": False}) == pytest.approx([12, 2], rel=0.1)
    assert copied({"run.checkpoint_in_background": False}) == [0, 0]


def test_a_colocated_node_holds_both_processes_and_the_servers_weights_on_the_host(constants):
    config = load_config(RECIPES / "h100_128_colocated.yaml")
    parts = host_memory(Scenario(config, HF, constants), 5000.0)
    weights = parts[SERVER] - constants.process_memory
    assert weights * config.rollout.tensor_parallel == pytest.approx(2 * 32.76e9, rel=0.01)
    assert node_memory(Scenario(config, HF, constants), 8) > 8 * (parts[TRAINER] + parts[SERVER])


def test_routed_tokens_and_their_rows_take_memory_where_experts_are(constants):
    """By hand, EP 8 of one node: a layer's own activations, the busiest rank's; rows of one micro-batch, not of all."""
    hf = BUILT_IN["Qwen3-30B-A3B"]
    layout = {"actor.layout": LayoutConfig(data=8, expert=8), "actor.recompute": "none"}
    config = changed(load_config(RECIPES / "h100_16.yaml"), layout | {"actor.routing_replay": True})
    [rank] = trainer_memory(Scenario(config, hf, constants))
    attention = ((32 + 8) + (32 + 4) + (32 + 4) + 32) * 128  # queries and keys before their norm and after, rotated
    experts = 8 * constants.expert_imbalance * (2048 + 3 * 768) + 8 * 128
    layer = 22528 * 2 * (4 * 2048 + attention + experts)
    assert rank.items["update"]["activations"] == pytest.approx(48 * layer * (1 + constants.fragmentation))
    assert rank.items["update"]["routing"] == rank.items["log-probs"]["routing"] == 22528 * 48 * 8
    [without] = trainer_memory(Scenario(changed(config, {"actor.routing_replay": False}), hf, constants))
    assert "routing" not in without.items["update"]
    case = Scenario(changed(config, {"actor.layout.pipeline": 2}), hf, constants)
    backward = 22528 * 2 * (2048 + 2 * 8 * constants.expert_imbalance * 2048)  # a routed token's gradient: both ways
    first = trainer_memory(case)[0].items["update"]
    assert first["a layer's backward"] == pytest.approx(backward * (1 + constants.fragmentation))
    pinned = host_memory(case, 1000.0)[SERVER] - constants.process_memory
    assert pinned == server_memory(case).kv_tokens * 48 * 8 * 4 > 0


def test_a_checkpoint_s_weights_are_those_of_all_experts(constants):
    """Each rank writes its own experts' state; of weights a first rank of those that hold the same."""
    hf = BUILT_IN["Qwen3-30B-A3B"]
    layout = {"actor.layout": LayoutConfig(tensor=2, data=8, sequence_parallel=True, expert=8)}
    parts = host_memory(Scenario(changed(load_config(RECIPES / "h100_16.yaml"), layout), hf, constants), 5000.0)
    experts = 48 * 128 * 3 * 2048 * 768
    dense = 30.532e9 - experts
    assert parts[CHECKPOINT_STATE] == pytest.approx(12 * (dense / 2 / 8 + experts / 16), rel=0.01)
    assert parts[CHECKPOINT_WEIGHTS] == pytest.approx(2 * (dense / 2 + experts / 8), rel=0.01)


def test_the_disk_is_that_of_the_model(constants):
    expected = 3 * 65.5e9 + 3 * 32.76e9 * 14
    needed = disk_bytes(Scenario(load_config(RECIPES / "h100_32.yaml"), HF, constants))
    assert needed == pytest.approx(expected, rel=0.001), "two checkpoints and one being written"


def test_a_node_has_a_checkpoint_of_the_ranks_that_write_it(constants):
    """Eight ranks of 4.1e9 parameters each: 53 GB a rank with the optimizer's state on the host, and 14 bytes a
    parameter more for a checkpoint."""
    case = Scenario(load_config(RECIPES / "h100_16.yaml"), HF, constants)
    needed = node_memory(case.changed({"rollout.weight_sync": "disk"}), processes=8)
    assert needed == pytest.approx(902.4e9, rel=1e-3), "8 x (53.2 + 57.3), 10.3 of the coordinator, 8.1 of an export"
    assert node_memory(case, processes=8) == pytest.approx(894.3e9, rel=1e-3), "nothing is exported to the servers"


def test_ranks_that_hold_different_experts_all_write_them(constants):
    """Eight ranks of one node, EP 8: dense weights of one of them, experts of all."""
    config = changed(
        load_config(RECIPES / "h100_16.yaml"),
        {"actor.layout": LayoutConfig(data=8, expert=8), "actor.offload.optimizer_state": False},
    )
    case = Scenario(config, BUILT_IN["Qwen3-30B-A3B"], constants)
    parts = host_memory(case, config.model.context_length)
    without = node_memory(case.changed({"run.checkpoint_in_background": False}), processes=8)
    written = 8 * (parts[CHECKPOINT_STATE] + parts[CHECKPOINT_WEIGHTS])
    assert node_memory(case, processes=8) - without == pytest.approx(written)
    assert 8 * parts[CHECKPOINT_WEIGHTS] > 2 * 30.5e9


def test_adapters_alone_have_gradients_and_optimizer_state():
    """By hand for rank 32: 64 layers, 5120 wide, 8 of 40 heads for keys and values, MLP of 27648; TP 8 x PP 2."""
    config = changed(load_config(RECIPES / "h100_32.yaml"), {"actor.lora.rank": 32})
    hidden, narrow, ffn = 5120, 1024, 27648
    numbers = 64 * 32 * (2 * (hidden + hidden) + 2 * (hidden + narrow) + 3 * (hidden + ffn))
    assert trained_parameters(HF, config.actor.lora) == numbers == 268_435_456
    few = changed(config, {"actor.lora.modules": ("q_proj", "v_proj")})
    assert trained_parameters(HF, few.actor.lora) == 64 * 32 * (2 * hidden + hidden + narrow)
    state = rank_state(HF, few.actor, "bfloat16", stage=0)
    here = 32 * 32 * (2 * hidden + (hidden + narrow) // 8)  # of 32 layers, each A whole and an eighth of each B
    assert (state.gradients, state.master_weights, state.moments) == (4 * here, 0, 8 * here)
    # Megatron joins queries, keys and values, whose weight waits in host memory without its adapters.
    assert base_bytes(HF, few.actor, "bfloat16") == 32 * hidden * (hidden + 2 * narrow) // 8 * 2
