"""Seconds of the trainer's passes against figures worked out from the equations."""

import dataclasses

import numpy as np
import pytest

from megatron_dapo.config import load_config
from megatron_dapo.config.actor_config import ActorConfig, LayoutConfig, Recompute
from megatron_dapo.plan.rank_state import StateBytes
from megatron_dapo.plan.scenario import BUILT_IN, Scenario
from megatron_dapo.plan.trainer_time import forward_flops, log_prob_time, update_time
from tests.plan.conftest import RECIPES

HF = BUILT_IN["Qwen2.5-7B"]
EQUAL = np.full(8, 4096)
NO_STATE = StateBytes(parameters=0, gradients=0, master_weights=0, moments=0)


@pytest.fixture
def free(constants):
    """The constants with links of no cost."""
    return dataclasses.replace(constants, nvlink_bandwidth=1e30, network_bandwidth=1e30)


def case(constants, recompute: Recompute = "none", **layout) -> Scenario:
    actor = ActorConfig(layout=LayoutConfig(**layout), micro_batch_tokens=4096, recompute=recompute)
    return Scenario(dataclasses.replace(load_config(RECIPES / "qwen2.5_7b_8gpu.yaml"), actor=actor), HF, constants)


def test_forward_costs_two_flops_a_parameter_and_the_causal_half_of_attention():
    layer = 3584 * (28 + 2 * 4) * 128 + 3584 * 28 * 128 + 3 * 3584 * 18944
    vectors = 28 * (2 * 3584 + (28 + 2 * 4) * 128) + 3584
    expected = 2 * 1000 * (28 * layer + 3584 * 152064 + vectors) + 28 * 4 * 28 * 128 * 1000**2 / 2
    assert forward_flops(HF, np.array([1000])).item() == pytest.approx(expected)


LAYERS = forward_flops(HF, EQUAL) - 2 * HF.vocab_size * HF.hidden_size * EQUAL
ATTENTION = 2 * HF.num_layers * HF.num_attention_heads * HF.head_dim * EQUAL.astype(float) ** 2


@pytest.mark.parametrize(
    ("recompute", "again"),
    [
        ("none", 0 * LAYERS),
        ("full", LAYERS),
        (7, LAYERS * 7 / 28),
        (("core_attn",), ATTENTION),
        (("mlp",), 2 * 28 * 3 * 3584 * 18944 * EQUAL),
    ],
    ids=str,
)
def test_one_rank_takes_its_flops_over_its_speed(recompute, again, free):
    seconds = update_time(case(free, recompute), EQUAL, NO_STATE).seconds
    speed = free.peak_flops * free.train_efficiency
    assert seconds == pytest.approx((3 * forward_flops(HF, EQUAL) + again).sum() / speed)


@pytest.mark.parametrize("layout", [{}, {"tensor": 4}, {"pipeline": 4}], ids=str)
def test_an_output_layer_in_float32_adds_its_products_on_the_last_stage(layout, free):
    plain = case(free, **layout)
    wide = plain.changed({"model.fp32_head": True})
    product = 2 * HF.vocab_size * HF.hidden_size * EQUAL.sum() / (layout.get("tensor", 1) * free.float32_flops)
    more = update_time(wide, EQUAL, NO_STATE).compute_s - update_time(plain, EQUAL, NO_STATE).compute_s
    assert more == pytest.approx(4 * product / free.train_efficiency)
    more = log_prob_time(wide, EQUAL).compute_s - log_prob_time(plain, EQUAL).compute_s
    assert more == pytest.approx(product / free.forward_efficiency)
    all_float32 = plain.changed({"model.fp32_head": True, "model.dtype": "float32"})
    assert update_time(all_float32, EQUAL, NO_STATE) == update_time(plain, EQUAL, NO_STATE)


@pytest.mark.parametrize("virtual", [None, 2])
def test_a_pipeline_waits_for_its_stages(virtual, free):
    """Eight equal micro-batches through four stages: the bubble is 3/8 of the arithmetic, over the virtual chunks."""
    layout = {"pipeline": 4, "virtual_pipeline": virtual}
    one = update_time(case(free, **layout), EQUAL, NO_STATE)
    assert one.bubble_s == pytest.approx(one.compute_s * 3 / 8 / (virtual or 1))


def test_the_slowest_data_parallel_rank_counts(free):
    lengths = np.array([4096, 2048])
    uneven = log_prob_time(case(free, data=2), lengths)
    alone = log_prob_time(case(free), lengths[:1])
    assert uneven.seconds == pytest.approx(alone.seconds)


def test_tensor_parallel_pays_its_all_reduces(constants):
    one = update_time(case(constants, tensor=4), EQUAL, NO_STATE)
    moved = 2 * 3 / 4 * EQUAL.sum() * HF.hidden_size * 2 * HF.num_layers * 4
    link = constants.nvlink_bandwidth * constants.communication_efficiency
    assert one.tensor_s == pytest.approx(moved / link)


@pytest.mark.parametrize(("recompute", "rings"), [("none", 3), ("full", 4), (14, 3.5)])
def test_keys_and_values_go_around_the_ring_and_in_backward_with_their_gradients(recompute, rings, constants):
    """Each of four ranks gets those of the other three: 4 key/value heads of 128, over two tensor-parallel ranks."""
    one = update_time(case(constants, recompute, tensor=2, context=4, sequence_parallel=True), EQUAL, NO_STATE)
    moved = 3 * EQUAL.sum() / 4 * 2 * 4 * 128 / 2 * 2 * 28 * rings
    assert one.neighbour_s == pytest.approx(moved / (constants.nvlink_bandwidth * constants.communication_efficiency))


@pytest.mark.parametrize("virtual", [None, 2])
def test_each_chunk_gives_its_activations_on_and_gets_their_gradients_back(virtual, constants):
    layout = {"tensor": 2, "pipeline": 4, "virtual_pipeline": virtual, "sequence_parallel": True}
    moved = EQUAL.sum() * HF.hidden_size / 2 * 2 * (virtual or 1)
    link = constants.nvlink_bandwidth * constants.communication_efficiency
    assert update_time(case(constants, **layout), EQUAL, NO_STATE).neighbour_s == pytest.approx(2 * moved / link)
    assert log_prob_time(case(constants, **layout), EQUAL).neighbour_s == pytest.approx(moved / link)


def test_what_is_recomputed_and_padded_is_a_part_of_the_arithmetic(free):
    """By hand: on one rank all layers forward once more; of two rows on two stages a quarter is padding, about; of two
    ranks one waits for the other."""
    lengths = np.array([4096, 2048])
    again, once = (update_time(case(free, told), EQUAL, NO_STATE) for told in ("full", "none"))
    assert once.recompute_s == 0
    assert again.recompute_s == pytest.approx(again.compute_s - once.compute_s)
    staged = update_time(case(free, pipeline=2), lengths, NO_STATE)
    assert staged.padding_s == pytest.approx(staged.compute_s / 4, rel=0.05)
    apart, flops = update_time(case(free, data=2), lengths, NO_STATE), forward_flops(HF, lengths)
    assert apart.padding_s == pytest.approx(apart.compute_s * (1 - flops.mean() / flops[0]))


def test_data_parallel_moves_gradients_and_weights_once(constants):
    state = StateBytes(parameters=2 * 10**9, gradients=4 * 10**9, master_weights=0, moments=0)
    apart = case(constants, tensor=8, data=2).changed({"actor.overlap": False})
    one = update_time(apart, EQUAL[:2] // 8, state)
    link = constants.network_bandwidth * constants.communication_efficiency
    assert one.data_s == pytest.approx(3e9 / link + 6e9 / constants.memory_bandwidth)


@pytest.mark.parametrize("billions", [1, 600])
def test_overlap_hides_gradients_behind_one_backward_and_weights_behind_one_forward(billions, constants):
    """Four micro-batches a rank. A few gigabytes hide, of very many a part."""
    state = StateBytes(parameters=billions * 10**9, gradients=2 * billions * 10**9, master_weights=0, moments=0)
    usual = case(constants, tensor=2, data=2)
    together, apart = (update_time(usual.changed({"actor.overlap": told}), EQUAL, state) for told in (None, False))
    link, micro_batch_s = constants.nvlink_bandwidth * constants.communication_efficiency, together.compute_s / 4
    gradients_s, weights_s = (billions * share * 1e9 / 2 / link for share in (2, 1))
    hidden = min(gradients_s, micro_batch_s * 2 / 3) + min(weights_s, micro_batch_s / 3)
    assert apart.data_s - together.data_s == pytest.approx(hidden)
    assert (hidden < gradients_s + weights_s) == (billions == 600)
    adapters = usual.changed({"actor.lora.rank": 8})
    assert update_time(adapters, EQUAL, state) == update_time(adapters.changed({"actor.overlap": False}), EQUAL, state)


def test_a_step_on_the_cpu_shares_its_threads_and_moves_gradients_and_weights(constants):
    """Of 10^9 numbers: 4.8 ns each for a thread, 6 bytes each over the bus."""
    state = StateBytes(parameters=2 * 10**9, gradients=4 * 10**9, master_weights=4 * 10**9, moments=8 * 10**9)
    one = case(constants)

    def data_s(threads: int) -> float:
        on_cpu = one.changed({"actor.optimizer.on_cpu": True, "actor.threads": threads})
        return update_time(on_cpu, EQUAL[:2] // 8, state).data_s

    assert data_s(1) == pytest.approx(4.8 + 6e9 / constants.host_bandwidth)
    assert data_s(8) == pytest.approx(0.6 + 6e9 / constants.host_bandwidth)


MIXTURE = BUILT_IN["Qwen3-30B-A3B"]
EXPERT = 3 * 2048 * 768


def mixture(constants, recompute: Recompute = "none", **layout) -> Scenario:
    return dataclasses.replace(case(constants, recompute, **layout), hf=MIXTURE)


def test_a_token_passes_its_own_experts_only():
    attention = 2048 * (32 + 2 * 4) * 128 + 32 * 128 * 2048
    vectors = 48 * (2 * 2048 + 2 * 128) + 2048
    weights = 48 * (attention + 128 * 2048 + 8 * EXPERT) + vectors + 2048 * 151936
    assert forward_flops(MIXTURE, np.array([1000])).item() == pytest.approx(
        2 * 1000 * weights + 2 * 48 * 32 * 128 * 1000**2
    )


@pytest.mark.parametrize(("recompute", "times", "reads"), [("none", 3, 2), (12, 3.25, 2.25), ("full", 4, 3)])
def test_grouped_products_are_slower_and_each_micro_batch_reads_all_experts(recompute, times, reads, free):
    """Eight micro-batches of one sequence; all experts on the rank, so that no rank is busier than another."""
    one = update_time(mixture(free, recompute), EQUAL, NO_STATE)
    own = 2 * 48 * 8 * EXPERT * EQUAL.sum()
    dense = forward_flops(MIXTURE, EQUAL).sum() - own
    speed = free.peak_flops * free.train_efficiency
    memory = 8 * 48 * 128 * EXPERT * (2 * reads + 8) / free.memory_bandwidth
    head = 2 * MIXTURE.vocab_size * MIXTURE.hidden_size * EQUAL.sum() * (times - 3)  # not made again
    assert one.compute_s == pytest.approx((times * (dense + own / free.expert_efficiency) - head) / speed + memory)
    assert (one.expert_s, one.flops) == (0, pytest.approx(3 * (dense + own)))


def test_the_busiest_rank_has_more_tokens(free):
    layout = {"data": 8, "expert": 8}
    even = dataclasses.replace(free, expert_imbalance=1.0)
    more = [update_time(mixture(each, **layout), EQUAL, NO_STATE).compute_s for each in (free, even)]
    own = 3 * 2 * 48 * 8 * EXPERT * 4096 / free.expert_efficiency / (free.peak_flops * free.train_efficiency)
    assert more[0] - more[1] == pytest.approx((free.expert_imbalance - 1) * own)


@pytest.mark.parametrize(
    ("layout", "near", "far"),
    [
        ({"data": 8, "expert": 8}, 7 / 8, 0.0),
        ({"data": 16, "expert": 16}, 7 / 16, 8 / 16),
        ({"tensor": 2, "sequence_parallel": True, "data": 4, "expert": 8}, 7 / 8, 0.0),
        # Two halves of each expert: a copy goes to another pair, and in a pair to both.
        ({"tensor": 2, "sequence_parallel": True, "data": 4, "expert": 4, "expert_tensor": 2}, 3 / 4 + 1, 0.0),
    ],
    ids=str,
)
def test_tokens_go_to_their_experts_and_back(layout, near, far, constants):
    """Eight copies of a token there and back, in forward and backward; experts on two nodes are half as near."""
    lengths = np.full(16, 4096)
    one = update_time(mixture(constants, **layout), lengths, NO_STATE)
    rows = len(lengths) / layout["data"]
    copies = rows * 4096 / layout.get("tensor", 1) * 8 * constants.expert_imbalance
    share = near / constants.nvlink_bandwidth + far / constants.network_bandwidth
    moved = copies * 2048 * 2 * 48 * 2 * 2
    assert one.expert_s == pytest.approx(moved * share / constants.communication_efficiency)
    forward = log_prob_time(mixture(constants, **layout), lengths)
    assert forward.expert_s == pytest.approx(one.expert_s / 2)


def test_attention_alone_is_reduced_over_tensor_parallel_ranks(constants):
    """A dense layer reduces twice in a pass."""
    one = update_time(mixture(constants, tensor=4, sequence_parallel=True, expert_tensor=4), EQUAL, NO_STATE)
    moved = 2 * 3 / 4 * EQUAL.sum() * 2048 * 2 * 48 * 2
    assert one.tensor_s == pytest.approx(moved / (constants.nvlink_bandwidth * constants.communication_efficiency))


def test_ranks_that_share_experts_wait_for_each_other(free):
    """Of two micro-batches each rank has a long and a short one; the longest of each turn counts."""
    even = dataclasses.replace(free, expert_imbalance=1.0, memory_bandwidth=1e30)
    lengths = np.array([4096, 4000, 3000, 2900])
    together, apart = (log_prob_time(mixture(even, data=2, **each), lengths) for each in ({"expert": 2}, {}))
    alone = [log_prob_time(mixture(even), np.array([length])).compute_s for length in lengths]
    assert together.compute_s == pytest.approx(alone[0] + alone[2])
    assert apart.compute_s == pytest.approx(max(alone[0] + alone[3], alone[1] + alone[2]))


def test_gradients_of_experts_are_summed_over_fewer_ranks(constants):
    """By hand, TP 1, DP 16, EP 8: a sixteenth of the dense part stays, half of the experts'."""
    layout = {"data": 16, "expert": 8}
    experts = 48 * 128 // 8 * EXPERT
    state = StateBytes(parameters=2 * 4 * experts, gradients=4 * 4 * experts, master_weights=0, moments=0)
    one = update_time(mixture(constants, **layout).changed({"actor.overlap": False}), np.full(16, 100), state)
    link = constants.network_bandwidth * constants.communication_efficiency
    moved = 6 * (3 * experts * 15 / 16 + experts * 1 / 2)
    assert one.data_s == pytest.approx(moved / link + 6 * 4 * experts / constants.memory_bandwidth)


def test_the_last_stage_makes_the_output_layer_alone(free):
    """All wait for it: what the four stages do on average, and three quarters of that layer more."""
    whole, staged = (log_prob_time(case(free, pipeline=size), EQUAL).compute_s for size in (1, 4))
    layer = 2 * HF.vocab_size * HF.hidden_size * EQUAL.sum() / (free.peak_flops * free.forward_efficiency)
    assert staged == pytest.approx(whole / 4 + layer * 3 / 4)
