"""Stages of `rollout`: what was drawn in one way is trained, judged and cut off in that way, and in no other."""

import asyncio
import time
from types import SimpleNamespace

import numpy as np
import pytest

from megatron_dapo.actor.step_data import LogProbs
from megatron_dapo.algorithm.dynamic_sampling import PassRate
from megatron_dapo.cluster.trainer import TrainerError
from megatron_dapo.cluster.waits import Waits
from megatron_dapo.config import load_config
from megatron_dapo.config.algorithm_config import AlgorithmConfig, DynamicSamplingConfig
from megatron_dapo.coordinator.batch import LogProbStream, step_arrays, update_actor
from megatron_dapo.coordinator.sampler import DynamicSampler
from megatron_dapo.experience.groups import SamplerState
from megatron_dapo.monitor.timeline import StepTimer
from megatron_dapo.storage.ledger import Ledger
from rollout.config import RolloutConfig, StageConfig
from tests.coordinator.test_batch import GROUP as BATCH_GROUP
from tests.coordinator.test_batch import make_groups
from tests.coordinator.test_sampler import GROUP, Script, ran

STAGES = "[{from_step: 3, temperature: 1.2}, {from_step: 5, max_new_tokens: 160}]"


@pytest.fixture
def config(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text(
        "run: {dir: x, rollout_steps: 9}\nmodel: {path: m, context_length: 200}\ndata: {path: p}\n"
        f"evaluation: {{path: e}}\nrollout: {{max_new_tokens: 100, stages: {STAGES}}}\n"
        f"algorithm: {{group_size: {BATCH_GROUP}, prompts_per_step: 6, mini_batch_responses: 24,\n"
        "            overlong: {buffer: 10}, kl: {coefficient: 0.1}, aggregation: sequence_sum_constant}\n"
    )
    return load_config(file)


def test_a_stage_holds_from_its_step_on_and_keeps_what_it_does_not_name():
    stages = (StageConfig(from_step=3, temperature=1.2), StageConfig(from_step=5, max_new_tokens=60))
    rollout = RolloutConfig(max_new_tokens=100, stages=stages)
    found = [(rollout.at_step(step).max_new_tokens, rollout.at_step(step).temperature) for step in range(1, 7)]
    assert found == [(100, 1.0), (100, 1.0), (100, 1.2), (100, 1.2), (60, 1.2), (60, 1.2)]
    assert rollout.longest_response == 100
    assert RolloutConfig(max_new_tokens=7).at_step(9) == RolloutConfig(max_new_tokens=7)


def test_a_context_must_hold_the_longest_response_of_all_stages(config):
    assert config.longest_prompt == 40


class Calls:
    """A trainer that notes the temperature of every call."""

    def __init__(self):
        self.temperatures: list[float] = []
        self.weights = None

    async def log_probs(self, responses, temperature, *, reference=False):
        self.temperatures.append(temperature)
        values = np.zeros(responses.num_response_tokens, np.float32)
        return LogProbs(log_probs=values, entropy=values)

    async def update(self, batches, objective, temperature):
        self.temperatures.append(temperature)
        self.weights = sum(float(batch.weights.sum()) for batch in batches)
        return []


@pytest.mark.parametrize(("step", "temperature", "longest"), [(2, 1.0, 100), (4, 1.2, 100), (5, 1.2, 160)])
def test_the_trainer_reads_the_log_probs_at_the_temperature_of_the_steps_stage(config, step, temperature, longest):
    trainer, groups = Calls(), make_groups()

    async def one_step():
        async with LogProbStream(trainer, config.at_step(step), pytest.fail) as stream:
            for each in groups:
                stream.add(each)
            old = await stream.finish()
        batch = SimpleNamespace(arrays=step_arrays(groups, config), old=old)
        await update_actor(trainer, config.at_step(step), batch, step, StepTimer(), 64)

    asyncio.run(one_step())
    assert set(trainer.temperatures) == {temperature}
    lengths = [len(each.generation.token_ids) for group in groups for each in group.responses]
    constant = sum(lengths) / (len(lengths) * longest)  # Dr. GRPO's: the longest response of the step
    assert trainer.weights == pytest.approx(constant, rel=1e-6)


def test_ranks_that_fail_end_the_rollout_at_once(config):
    """Not when the batch is full, which may take an hour."""

    class Failing:
        async def log_probs(self, responses, temperature):
            raise TrainerError("trainer log_probs failed")

    async def one_step():
        waits = Waits()
        async with LogProbStream(Failing(), config, waits.lose) as stream:
            for each in make_groups():
                stream.add(each)
            await waits.wait_for("batch of groups", "rollout servers", 30.0, asyncio.sleep(60.0))

    began = time.monotonic()
    with pytest.raises(TrainerError, match="log_probs failed"):
        asyncio.run(one_step())
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("killed_after", [None, 3, 4])
def test_a_stage_trains_on_nothing_that_was_sent_before_it(tmp_path, killed_after):
    """Ahead of the actor by two batches, with a stage that begins in step 5: also over a resume."""
    sampling = DynamicSamplingConfig(max_staleness=9, surplus=0.0)
    algorithm = AlgorithmConfig(
        prompts_per_step=8, group_size=GROUP, mini_batch_responses=GROUP, dynamic_sampling=sampling
    )
    start = SamplerState(cursor=0, pass_rate=PassRate.start(0.5), carried=())

    async def run(state, steps, name, stages=(5,)):
        ledger = Ledger(tmp_path / name)
        sampler = DynamicSampler(algorithm, Script(), ledger, state, lambda position: position, stages)
        batches = [await sampler.fill(step, step - 1, ahead=16) for step in steps]
        state = sampler.snapshot(steps[-1])
        await sampler.close()
        ledger.close()
        return batches, state

    if killed_after is None:
        batches, _ = ran(run(start, range(1, 8), "whole.jsonl"))
    else:
        first, state = ran(run(start, range(1, killed_after + 1), "first.jsonl"))
        rest, _ = ran(run(state, range(killed_after + 1, 8), "rest.jsonl"))
        batches = first + rest
    oldest = [min(group.weight_version for group in batch.kept) for batch in batches]
    assert min(oldest[4:]) == 4, "the version that the stage began with"
    assert batches[4].expired > 0
    assert oldest[5] == 4, "what the stage itself sent ahead stays"
    without, _ = ran(run(start, range(1, 8), "without.jsonl", stages=()))
    assert min(group.weight_version for group in without[4].kept) < 4
