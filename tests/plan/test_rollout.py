"""The rollout model against cases that can be worked out by hand, and the length model against its own promises."""

import dataclasses
import itertools
from statistics import mean

import numpy as np
import pytest

from megatron_dapo.config import load_config
from megatron_dapo.config.algorithm_config import AlgorithmConfig, DynamicSamplingConfig
from megatron_dapo.plan.memory import server_memory
from megatron_dapo.plan.rollout import Fleet, Group, Workload, fill_batches, groups, mean_running_context
from megatron_dapo.plan.scenario import BUILT_IN, Scenario
from megatron_dapo.plan.step_plan import fleet_of
from tests.plan.conftest import RECIPES

WORKLOAD = Workload(
    mean_response=4000,
    sigma=0.9,
    difficulty_share=0.5,
    mean_prompt=200,
    pass_rate=0.5,
    longest=20480,
    group_size=16,
)
SECOND_A_TOKEN = Fleet(slots=2, mean_prompt=0, prefill_s=0, step_s=lambda running, context: 1.0)


def algorithm(prompts: int, **sampling) -> AlgorithmConfig:
    return AlgorithmConfig(
        prompts_per_step=prompts,
        group_size=2,
        mini_batch_responses=2,
        dynamic_sampling=DynamicSamplingConfig(**sampling),
    )


def test_slots_are_taken_in_order_and_the_longest_ends_the_step():
    source = iter([Group(lengths=(10, 30), correct=1), Group(lengths=(5, 40), correct=0)])
    [step] = fill_batches(algorithm(2, filter="off"), SECOND_A_TOKEN, source, 1)
    # Two slots: 10 and 30 begin; 5 follows at 10; 40 at 15 and ends at 55, alone since 30.
    assert step.seconds == 55
    assert step.tail_s == 25
    assert (step.tokens, step.groups, tuple(step.lengths), len(step.flight)) == (85, 2, (10, 30, 5, 40), 0)


def test_a_decode_step_costs_what_its_context_costs():
    fleet = dataclasses.replace(SECOND_A_TOKEN, step_s=lambda running, context: context, mean_prompt=100)
    [step] = fill_batches(algorithm(1, filter="off"), fleet, iter([Group(lengths=(4, 4), correct=1)]), 1)
    assert step.seconds == 4 * (2 * 100 + 2 * 2), "both contexts, at their mean over the four tokens"


def test_a_decode_step_reads_or_calculates_whichever_takes_longer(constants):
    config, hf = load_config(RECIPES / "h100_32.yaml"), BUILT_IN["Qwen2.5-32B"]
    servers, parallel = config.rollout.servers, config.rollout.tensor_parallel
    case = Scenario(config, hf, constants)
    memory, seconds = server_memory(case), fleet_of(case, server_memory(case)).step_s
    overhead = constants.decode_overhead + 2 * 64 * constants.decode_reduce_latency
    bandwidth, speed = 3.35e12 * constants.decode_efficiency, 989e12 * constants.prefill_efficiency * parallel
    head = hf.vocab_size * hf.hidden_size
    weights, products = 2 * 32763876352 / parallel, 2 * (32763876352 - head)
    assert memory.weights == weights
    assert seconds(1, 0) == pytest.approx(overhead + weights / bandwidth)
    cache = memory.kv_bytes_per_token * 10**6 / servers
    assert seconds(1, 10**6) == pytest.approx(overhead + (weights + cache) / bandwidth)
    assert seconds(10**6, 0) == pytest.approx(overhead + 10**6 / servers * products / speed)
    wide = case.changed({"model.fp32_head": True})
    slow = 2 * head / (67e12 * constants.prefill_efficiency * parallel)
    later = seconds(10**6, 0) + 10**6 / servers * slow
    assert fleet_of(wide, server_memory(wide)).step_s(10**6, 0) == pytest.approx(later), "float32 comes after all else"


@pytest.mark.parametrize(
    ("interrupts", "seconds", "tokens"),
    [(False, (11.0, 2.0), (22, 4)), (True, (5.0, 4.0), (10, 8))],  # the batch is full when two useful ones are written
)
def test_filtered_groups_are_replaced_and_the_surplus_is_carried_over(interrupts, seconds, tokens):
    useless, useful = Group(lengths=(1, 1), correct=0), Group(lengths=(2, 2), correct=1)
    source = itertools.chain([useless], itertools.repeat(useful))
    config = algorithm(2, initial_pass_rate=0.5, max_staleness=1, surplus=0.0)
    first, second = fill_batches(config, SECOND_A_TOKEN, source, 2, interrupts=interrupts)
    # Four are sent for two. The useless one brings the pass rate from 2/4 to 2/5: five must be in flight, three are.
    assert (first.groups, tuple(first.lengths), len(first.flight)) == (6, (2, 2, 2, 2), 3)
    # Two of three were kept, the rate is 4/7: four must be in flight for the next two, three are.
    assert (second.groups, tuple(second.lengths), len(second.flight)) == (1, (2, 2, 2, 2), 2)
    assert (first.seconds, second.seconds) == seconds
    assert (first.tokens, second.tokens) == tokens


def test_the_limit_of_oversampling_ends_a_batch_that_cannot_be_filled():
    source = itertools.repeat(Group(lengths=(1, 1), correct=2))
    [step] = fill_batches(algorithm(4, max_oversampling=3.0), SECOND_A_TOKEN, source, 1)
    assert (step.groups, tuple(step.lengths)) == (12, ())


@pytest.mark.parametrize("pass_rate", [0.2, 0.5, 0.9])
def test_the_length_model_keeps_the_pass_rate_and_the_mean(pass_rate):
    workload = dataclasses.replace(WORKLOAD, pass_rate=pass_rate, longest=10**9)
    drawn = list(itertools.islice(groups(workload, seed=3), 4000))
    assert mean(group.kept for group in drawn) == pytest.approx(pass_rate, abs=0.03)
    lengths = np.array([group.lengths for group in drawn])
    assert lengths.mean() == pytest.approx(4000, rel=0.05)
    assert np.log(lengths).std() == pytest.approx(0.9, rel=0.03)


def test_hard_prompts_have_long_responses():
    drawn = list(itertools.islice(groups(WORKLOAD, seed=3), 2000))
    right = [mean(group.lengths) for group in drawn if group.correct == 16]
    wrong = [mean(group.lengths) for group in drawn if group.correct == 0]
    assert mean(wrong) > 2 * mean(right)


def test_lengths_are_cut_off():
    drawn = list(itertools.islice(groups(dataclasses.replace(WORKLOAD, longest=3000), seed=3), 200))
    assert max(length for group in drawn for length in group.lengths) == 3000


def test_context_of_a_running_response_weighs_long_ones_by_their_life():
    # Seen at a random moment, the one of 30 tokens is there three times as often, and half done.
    assert mean_running_context(np.array([10, 30]), 7) == 7 + 0.25 * 5 + 0.75 * 15
