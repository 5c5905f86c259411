"""The simulation of sampling: its clock, its servers against cases worked out by hand and against the planner's own
model of the same thing, and what it says of each policy."""

import asyncio
import itertools
import json
from dataclasses import replace

import numpy as np
import pytest

from megatron_dapo.config.algorithm_config import AlgorithmConfig, DynamicSamplingConfig
from megatron_dapo.plan.rollout import Fleet, Group, Workload, fill_batches
from megatron_dapo.storage.ledger import read_ledger
from tests.ledger_check import check_ledger
from tests.simulation.measure_sampling import main
from tests.simulation.modelled_engine import Speed
from tests.simulation.modelled_fleet import ModelledFleet, Prompts, useful
from tests.simulation.policies import BatchSynchronous, FirstCompleted, Ours
from tests.simulation.sampling_figures import Conditions, measure, reference
from tests.simulation.virtual_time import NothingLeftError, run_virtually

WORKLOAD = Workload(
    mean_response=4000,
    sigma=0.9,
    difficulty_share=0.5,
    mean_prompt=0,
    pass_rate=0.6,
    longest=20480,
    group_size=4,
)
SECOND_A_TOKEN = Speed(fixed_s=1.0, context_s=0.0, prefill_s=0.0)
CONDITIONS = Conditions(
    workload=WORKLOAD, speed=Speed(), engines=4, slots=16, train_s=20.0, sync_s=5.0, steps=6, warm_steps=2, seed=1
)


class Written:
    """Prompts whose groups are written down."""

    def __init__(self, *groups: Group) -> None:
        self.workload, self._groups = WORKLOAD, groups

    def group(self, position: int, attempt: int = 0) -> Group:
        return self._groups[position]


def algorithm(prompts: int = 32, **sampling) -> AlgorithmConfig:
    return AlgorithmConfig(
        prompts_per_step=prompts,
        group_size=4,
        mini_batch_responses=4,
        dynamic_sampling=DynamicSamplingConfig(**sampling),
    )


def test_virtual_seconds_pass_at_once_and_in_order():
    async def test():
        ended = []

        async def sleeper(seconds):
            await asyncio.sleep(seconds)
            ended.append((seconds, asyncio.get_running_loop().time()))

        await asyncio.gather(*map(sleeper, (86_400.5, 3, 1_000)))
        return ended

    assert run_virtually(test()) == [(3, 3), (1000, 1000), (86_400.5, 86_400.5)]


def test_a_wait_for_nothing_is_an_error_not_a_hang():
    async def test():
        await asyncio.get_running_loop().create_future()

    with pytest.raises(NothingLeftError):
        run_virtually(test())


async def ends(fleet: ModelledFleet, count: int) -> list[float]:
    loop = asyncio.get_running_loop()

    async def one(position):
        await fleet.generate(position, 0)
        return loop.time()

    return await asyncio.gather(*(one(position) for position in range(count)))


def test_slots_are_taken_in_order():
    async def test():
        prompts = Written(Group(lengths=(10, 30), correct=1), Group(lengths=(5, 40), correct=0))
        fleet = ModelledFleet(prompts, engines=1, slots=2, speed=SECOND_A_TOKEN)
        return await ends(fleet, 2), fleet.drawn_tokens

    # Two slots: 10 and 30 begin; 5 follows at 10; 40 at 15 and ends at 55, alone since 30.
    times, drawn = run_virtually(test())
    assert times == pytest.approx([30, 55])
    assert drawn == 85


def test_a_decode_step_costs_what_its_context_costs():
    async def test():
        prompts = Written(Group(lengths=(4, 4), correct=1))
        prompts.workload = replace(WORKLOAD, mean_prompt=100)
        fleet = ModelledFleet(prompts, engines=1, slots=2, speed=Speed(fixed_s=0.5, context_s=1.0, prefill_s=3.0))
        return await ends(fleet, 1)

    # Both prompts are read, then four steps at the mean context of both.
    assert run_virtually(test()) == pytest.approx([2 * 100 * 3 + 4 * (0.5 + 2 * 100 + 2 * 2)])


def test_seconds_and_steps_undo_each_other():
    for speed, context in itertools.product(
        (Speed(), SECOND_A_TOKEN, Speed(drafted=4, accepted=2.0)), (0, 5000, 600_000)
    ):
        for steps in (0.5, 1, 20480):
            assert speed.steps(speed.seconds(steps, 128, context), 128, context) == pytest.approx(steps)


def test_drafted_tokens_help_a_few_responses_more_than_many():
    plain, drafting = Speed(), Speed(drafted=4, accepted=2.0)
    times = [plain.seconds(100, n, 0) / drafting.seconds(100, n, 0) for n in (1, 16, 128)]
    assert times == sorted(times, reverse=True)
    assert times[0] == pytest.approx(2.0, rel=0.02)
    alone = Speed(fixed_s=1.0, context_s=0.0, prefill_s=0.1, drafted=4, accepted=2.0)
    assert alone.seconds(10, 5, 99.0) == pytest.approx(10 * (1.0 + 0.1 * 5 * 3) / 2)


def test_no_token_is_lost_when_groups_are_given_up_and_weights_change():
    async def test():
        fleet = ModelledFleet(Prompts(WORKLOAD, 0), engines=3, slots=8, speed=Speed())
        random = np.random.default_rng(0)
        tasks = [asyncio.ensure_future(fleet.generate(position, 0)) for position in range(60)]
        for _ in range(8):
            await asyncio.sleep(40.0)
            before = fleet.drawn_tokens
            await fleet.publish(5.0)
            assert fleet.drawn_tokens == before, "nothing is drawn while the servers stand still"
            for at in random.integers(0, len(tasks), 3):
                tasks[at].cancel()
        await asyncio.wait(tasks)
        return fleet, [task.result() for task in tasks if not task.cancelled()]

    fleet, groups = run_virtually(test())
    assert fleet.aborted_tokens > 0
    assert fleet.drawn_tokens == fleet.aborted_tokens + sum(group.tokens for group in groups)
    versions = [response.generation.weight_versions for group in groups for response in group.responses]
    assert all((np.diff(one) >= 0).all() for one in versions)
    assert any(one[0] < one[-1] for one in versions), "some response outlived an update"
    assert all(
        group.weight_version == min(int(one.generation.weight_versions[0]) for one in group.responses)
        for group in groups
    )


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("sampling", [{}, {"max_staleness": 1, "surplus": 1.0}, {"filter": "drop"}])
def test_the_sampler_on_one_engine_takes_as_long_as_the_planner_says(tmp_path, sampling, waits):
    """Two implementations of the same: the product's sampler on modelled servers, and the planner's short account."""
    config, prompts = algorithm(initial_pass_rate=0.5, **sampling), Prompts(replace(WORKLOAD, mean_prompt=50), 3)

    async def test():
        fleet = ModelledFleet(prompts, engines=1, slots=16, speed=Speed(fixed_s=0.01, context_s=1e-6, prefill_s=0.0))
        ours, seconds, tokens = Ours(fleet, config, tmp_path, hold=True, waits=waits), [], []
        for step in (1, 2, 3):
            begin, drawn = asyncio.get_running_loop().time(), fleet.drawn_tokens
            await ours.fill(step, 0)
            seconds.append(asyncio.get_running_loop().time() - begin)
            tokens.append(fleet.drawn_tokens - drawn)
        await ours.close()
        return seconds, tokens

    seconds, tokens = run_virtually(test())
    fleet = Fleet(slots=16, mean_prompt=50, prefill_s=0, step_s=lambda _, context: 0.01 + 1e-6 * context)
    source = (prompts.group(position) for position in itertools.count())
    planned = fill_batches(config, fleet, source, 3, interrupts=not waits)
    refill, carries = config.dynamic_sampling.filter == "refill", config.dynamic_sampling.max_staleness > 0
    given_up, interrupted = refill and not carries, carries and not waits
    # The planner counts what is given up at the end of a batch as if it had been written whole, and it draws whole
    # tokens of what is interrupted.
    assert tokens == pytest.approx([step.tokens for step in planned], rel=0.03 if given_up else 1e-4 * interrupted)
    exact = not given_up and not interrupted
    assert seconds == pytest.approx([step.seconds for step in planned], rel=1e-6 if exact else 0.01)


def test_ours_trains_every_useful_prompt_in_order_and_first_completed_prefers_the_short(tmp_path):
    """Law 3, both on the same servers and prompts."""
    known = reference(Prompts(WORKLOAD, CONDITIONS.seed))
    first = measure(lambda fleet, _: FirstCompleted(fleet, 32, 3.0), CONDITIONS)
    everything = measure(lambda fleet, _: BatchSynchronous(fleet, 32, 3.0), CONDITIONS)
    assert first.length < 0.8 * known.useful_length
    assert first.aborted_tokens > 0.1 * first.generated_tokens
    assert everything.length == pytest.approx(known.useful_length, rel=0.1)

    async def run():
        fleet = ModelledFleet(Prompts(WORKLOAD, 1), engines=4, slots=16, speed=Speed())
        policy = Ours(fleet, algorithm(max_staleness=2, surplus=0.0), tmp_path, ahead=32)  # so that nothing expires
        kept = []
        for step in range(1, 7):
            kept += await policy.fill(step, fleet.version)
            await asyncio.sleep(20.0)
            await fleet.publish(5.0)
        await policy.close()
        return kept

    kept = run_virtually(run())
    prompts = Prompts(WORKLOAD, 1)
    all_useful = (position for position in itertools.count() if prompts.group(position).kept)
    assert [group.position for group in kept] == list(itertools.islice(all_useful, len(kept)))
    assert all(useful(group) for group in kept)
    fates = check_ledger(read_ledger(tmp_path / "ledger.jsonl"))
    assert sum(fate == "trained" for fate in fates.values()) == 6 * 32


@pytest.mark.slow
def test_the_table_and_the_file_hold_the_same_figures(tmp_path, capsys):
    common = ["--prompts", "16", "--engines", "2", "--slots", "16", "--steps", "2", "--warm-steps", "1"]
    assert main([*common, "--only", "async", "--json", str(tmp_path / "f.json")]) == 0
    once = capsys.readouterr().out
    tree = json.loads((tmp_path / "f.json").read_text())
    for name, figures in tree["policies"].items():
        assert f"| {name} | {figures['step_s']:.0f} |" in once
        assert figures["generated_tokens"] > figures["length"] * 16 * 16
    assert len(tree["policies"]) == 5
    main([*common, "--only", "async"])
    assert capsys.readouterr().out == once, "the same seed, the same figures"
