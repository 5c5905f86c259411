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


def test_data_parallel_moves_gradients_and_weights_once(constants):
    state = StateBytes(parameters=2 * 10**9, gradients=4 * 10**9, master_weights=0, moments=0)
    one = update_time(case(constants, tensor=8, data=2), EQUAL[:2] // 8, state)
    link = constants.network_bandwidth * constants.communication_efficiency
    assert one.data_s == pytest.approx(3e9 / link + 6e9 / constants.memory_bandwidth)
