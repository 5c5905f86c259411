"""A run that is killed and resumed goes on from the tokens in its checkpoint: fleet, generator, sampler and files are
the product's, the servers play a script in which every token can be checked."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import count
from types import SimpleNamespace

import numpy as np
import pytest

from megatron_dapo.algorithm.dynamic_sampling import PassRate
from megatron_dapo.config.algorithm_config import AlgorithmConfig, DynamicSamplingConfig, OverlongConfig
from megatron_dapo.coordinator.checkpoints import Progress, load_progress, save_progress, with_rollout
from megatron_dapo.coordinator.sampler import DynamicSampler
from megatron_dapo.experience.generator import GroupGenerator, Responder
from megatron_dapo.experience.groups import SamplerState
from megatron_dapo.storage.ledger import Event, Ledger, effective_events, read_ledger
from rollout.config import RolloutConfig
from rollout.errors import RolloutError
from rollout.fleet.fleet import RolloutFleet
from rollout.generation import SamplingParams
from tests.coordinator.scripted import scripted_prompts
from tests.coordinator.test_faults import PATIENT, LastToken
from tests.ledger_check import check_ledger
from tests.rollout.script import FIRST_TAG, VOCABULARY, Script, check_generation
from tests.rollout.scripted_server import ScriptedServer, Speed

LONGEST, PROMPTS, GROUP, INTERVAL = 2000, 8, 4, 16
SCRIPT = Script(max_new_tokens=LONGEST, median_tokens=300)


@asynccontextmanager
async def life(folder, state, seed, *, servers=None):
    """A run's fleet, sampler and ledger until it is killed. `servers`: gets the servers, which may then be lost."""
    engines = [ScriptedServer(SCRIPT, Speed(compress=8), seed + number) for number in range(2)]
    for engine in engines:
        engine.stream_interval = INTERVAL
    parts, patience_s = [], 300.0 if servers is None else 0.3
    if servers is not None:
        servers += engines
    rollout = RolloutConfig(max_running_requests=16, stream_every=INTERVAL, fleet_deadline_s=patience_s)
    fleet = RolloutFleet(
        rollout, engines, vocab_size=VOCABULARY, report=lambda line: None, timing=PATIENT, observe=parts.append
    )
    algorithm = AlgorithmConfig(
        prompts_per_step=PROMPTS,
        group_size=GROUP,
        mini_batch_responses=PROMPTS * GROUP,
        overlong=OverlongConfig(buffer=400),
        dynamic_sampling=DynamicSamplingConfig(max_staleness=3, surplus=3.0),
    )
    responder = Responder(fleet=fleet, pool=LastToken(), decoder=LastToken())
    prompts = scripted_prompts(500, answer="", verifier="last-token")
    generator = GroupGenerator(
        responder, prompts, lambda version: SamplingParams(max_new_tokens=LONGEST), algorithm, seed=0
    )
    generator.restore(state.unfinished)
    ledger = Ledger(folder / "ledger.jsonl")
    sampler = DynamicSampler(
        algorithm, generator.group, ledger, state, generator.prompt_at, (), fleet, generator.unfinished
    )
    await fleet.start(30.0)
    try:
        yield sampler, ledger, parts
    finally:
        await sampler.close()
        await fleet.close()
        ledger.close()


async def step_of(sampler, ledger, step, folder, mode):
    """One step: its batch, and the state that a checkpoint has."""
    admission = await sampler.fill(step, 0, ahead=PROMPTS if mode == "async" else 0, hold=mode == "colocated")
    sampler.record_trained(admission.kept, step, 0)
    state = sampler.snapshot(step)
    folder = folder / f"step_{step}"
    folder.mkdir(exist_ok=True)
    save_progress(Progress(rollout_step=step, optimizer_step=step, weight_version=0, sampler=state), folder)
    ledger.record(Event.CHECKPOINT, rollout_step=step, weight_version=0)
    return admission, load_progress(folder).sampler


@pytest.mark.parametrize(
    ("mode", "mid_step"),
    [
        ("sync", False),
        ("async", True),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("sync", True), ("colocated", False), ("colocated", True), ("async", False))
        ),
    ],
)
def test_a_kill_loses_no_token_of_the_checkpoint(tmp_path, mode, mid_step):
    start = SamplerState(cursor=0, pass_rate=PassRate.start(0.5), carried=())

    async def run():
        state, made, parts, begun, some, step = start, {}, [], {}, [], 0
        for seed in range(2):
            async with life(tmp_path, state, 10 * seed) as (sampler, ledger, served):
                if step:
                    continued = [group.position for group in state.unfinished]
                    ledger.record(Event.RESUMED, rollout_step=step, weight_version=0, continued=continued)
                enough, owed = step + 2, {group.position for group in state.unfinished}
                while step < enough or owed - made.keys() or (not seed and len(some) <= 5 and step < 8):
                    step += 1
                    admission, state = await step_of(sampler, ledger, step, tmp_path, mode)
                    made |= {group.position: group for group in (*admission.kept, *admission.filtered)}
                    drawn = [one.generation for each in state.unfinished for one in each.responses]
                    some = [one for one in drawn if one.token_ids.size]
                if mid_step:
                    filling = asyncio.ensure_future(sampler.fill(step + 1, 0))
                    await asyncio.sleep(0.2)
                    filling.cancel()
                    await asyncio.wait([filling])
                begun = begun or {one.request_id: one for one in drawn}
                parts.append(served)
        return made, parts, begun, step

    made, (_, after), begun, steps = asyncio.run(asyncio.wait_for(run(), 60))
    some = [one for one in begun.values() if one.token_ids.size]
    assert len(some) > 5, "nothing was in flight at the checkpoint: the test shows nothing"
    assert sorted(made) == list(range(len(made))), "every position decided, none twice"
    answers = {one.generation.request_id: one.generation for group in made.values() for one in group.responses}
    for group in made.values():
        for one in group.responses:
            check_generation(SCRIPT, group.prompt_index, one.generation)
    checked = 0
    for name, drawn in begun.items():
        if name in answers:  # decided by then
            size = drawn.token_ids.size
            np.testing.assert_array_equal(answers[name].token_ids[:size], drawn.token_ids)
            first = [part for part in after if part.request_id == name][:1]
            assert all(part.prompt_tokens == 128 + size for part in first), (
                "it goes on from the last token that was told"
            )
            assert first or drawn.finish_reason != "abort", "what was complete is not asked for again"
            checked += size > 0
    assert checked > 5
    events = read_ledger(tmp_path / "ledger.jsonl")
    fates = check_ledger(events)
    standing = effective_events(events)
    trained = [event["prompt"] for event in standing if event["event"] == "trained"]
    assert len(trained) == len(set(trained)) == steps * PROMPTS
    assert set(fates) == set(range(max(fates) + 1)), "no prompt is lost"
    continued = next(event["continued"] for event in events if event["event"] == "resumed")
    assert continued
    sent = [event["prompt"] for event in standing if event["event"] == "dispatched"]
    assert not {prompt for prompt in continued if sent.count(prompt) != 1}, "it was sent once"
    assert not [event for event in standing if event["event"] == "interrupted" and event["prompt"] in continued]


def check_went_on(state, admission, after, left):
    """A resume from `state`: `admission` is what its first step decided, and `left` the state after it."""
    done = {group.position: group for group, _ in state.drawn}
    assert len(done) >= 4
    asked = {int(part.request_id[1:].split("-")[0]) for part in after}
    assert not asked & set(done), "a finished group was asked for again"
    made = {group.position: group for group in (*admission.kept, *admission.filtered)}
    for group in made.values():
        for one in group.responses:
            check_generation(SCRIPT, group.prompt_index, one.generation)
    counted = [group for group in admission.generated if group.position in done]
    assert {group.position for group in (*counted, *state.carried)} >= set(done), (
        "they count in the step that drew them"
    )
    assert sum(group.tokens for group in counted) <= admission.resumed_tokens
    assert admission.resumed_tokens <= sum(group.tokens for group in admission.generated)
    begun, went_on = answers_of(state.unfinished), 0
    stand = answers_of((*made.values(), *left.carried, *left.unfinished))
    for name, one in begun.items():
        np.testing.assert_array_equal(stand[name].token_ids[: one.token_ids.size], one.token_ids)
        first = [part for part in after if part.request_id == name][:1]
        assert all(part.prompt_tokens == 128 + one.token_ids.size for part in first)
        went_on += bool(first) and one.token_ids.size > 0
    assert went_on > 0, "nothing was begun: the test shows nothing"


def answers_of(groups):
    return {one.generation.request_id: one.generation for group in groups for one in group.responses}


def in_its_middle(state, before):
    """Whether the rollout after `before` has finished some groups, and its batch waits for a response that was begun or
    went on since then and is far from its end: what a server has sent by now does not complete it, and no resume fills
    the batch without it."""
    done = {group.position: group for group in state.carried}
    head = next(position for position in count(state.cursor) if position not in done)
    useful = sum(0 < group.correct < GROUP for position, group in done.items() if position < head)
    finished = done.keys() - {group.position for group in before.carried}
    had = {name: one.token_ids.size for name, one in answers_of(before.unfinished).items()}

    def is_far(index, one):
        has = one.token_ids.size
        if has <= had.get(one.request_id, 0):
            return False
        length, _ = SCRIPT.response(index, int(one.token_ids[0]) - FIRST_TAG)
        return length - has > 10 * INTERVAL

    waiting = [group for group in state.unfinished if group.position == head]
    far = any(is_far(group.prompt_index, one.generation) for group in waiting for one in group.responses)
    return len(finished) >= 4 and useful < PROMPTS and far


@pytest.mark.parametrize(
    ("mode", "lost"),
    [
        pytest.param("colocated", False, id="colocated, stopped", marks=pytest.mark.slow),
        pytest.param("async", False, id="async, stopped"),
        pytest.param("sync", True, id="sync, fleet lost"),
        pytest.param("sync", False, id="sync, stopped", marks=pytest.mark.slow),
        pytest.param("colocated", True, id="colocated, fleet lost", marks=pytest.mark.slow),
        pytest.param("async", True, id="async, fleet lost", marks=pytest.mark.slow),
    ],
)
def test_a_rollout_that_ends_in_its_middle_goes_on_there(tmp_path, mode, lost):
    """What was finished is not asked for again, what was begun goes on from its tokens: over a stop in the first step
    and a later one, or the loss of all servers."""
    file, lives = tmp_path / "rollout", 1 if lost else 2
    file.mkdir()

    async def end(sampler, ledger, servers, step, before):
        """(the step in whose middle the life ends, the checkpoint before it)"""
        while True:  # what is carried may fill a batch at once: a step without a middle
            filling = asyncio.ensure_future(step_of(sampler, ledger, step, tmp_path, mode))
            while not filling.done() and not in_its_middle(sampler.under_way(), before):
                await asyncio.sleep(0.01)
            if not filling.done():
                break
            before, step = filling.result()[1], step + 1
        if not lost:
            filling.cancel()
        for server in servers:
            server.start_fails = True
        await asyncio.gather(*(server.die() for server in servers))
        (failure,) = await asyncio.gather(filling, return_exceptions=True)
        assert isinstance(failure, RolloutError if lost else asyncio.CancelledError), failure
        state = sampler.under_way()
        save_progress(Progress(rollout_step=step - 1, optimizer_step=0, weight_version=0, sampler=state), file)
        return step, before

    async def run():
        step, before, told = 1, SamplerState(cursor=0, pass_rate=PassRate.start(0.5), carried=()), []
        run_dir, console = SimpleNamespace(rollout=file), SimpleNamespace(note=told.append)
        for number in range(lives):
            servers = [] if lost else None
            async with life(tmp_path, before, 20 * number, servers=servers) as (sampler, ledger, _):
                step, before = await end(sampler, ledger, servers or (), step, before)
            progress = Progress(rollout_step=step - 1, optimizer_step=0, weight_version=0, sampler=before)
            state = with_rollout(progress, run_dir, [], console)
            async with life(tmp_path, state, 20 * number + 10) as (sampler, ledger, after):
                continued = [one.position for one in (*state.unfinished, *(group for group, _ in state.drawn))]
                ledger.record(Event.RESUMED, rollout_step=step - 1, weight_version=0, continued=continued)
                assert sampler.under_way().unfinished == state.unfinished, "also where a life ends before it sends"
                admission, before = await step_of(sampler, ledger, step, tmp_path, mode)
            check_went_on(state, admission, after, before)
            step += 1
        assert len(told) == lives
        return step - 1

    steps = asyncio.run(asyncio.wait_for(run(), 200))
    events = read_ledger(tmp_path / "ledger.jsonl")
    fates = check_ledger(events)
    trained = [event["prompt"] for event in effective_events(events) if event["event"] == "trained"]
    assert len(trained) == len(set(trained)) == steps * PROMPTS
    assert set(fates) == set(range(max(fates) + 1)), "no prompt is lost"


def test_what_is_too_old_by_then_and_what_the_checkpoint_lacks_is_sent_again(tmp_path):
    start = SamplerState(cursor=0, pass_rate=PassRate.start(0.5), carried=())

    async def first():
        async with life(tmp_path, start, 0) as (sampler, ledger, _):
            _, state = await step_of(sampler, ledger, 1, tmp_path, "async")
        return state

    state = asyncio.run(asyncio.wait_for(first(), 60))
    less = replace(state, unfinished=state.unfinished[:-1])
    positions = [group.position for group in less.unfinished]
    assert positions

    async def second():
        ledger = Ledger(tmp_path / "ledger.jsonl")
        ledger.record(Event.RESUMED, rollout_step=1, weight_version=9, continued=[g.position for g in less.unfinished])
        ledger.close()
        async with life(tmp_path, less, 10) as (sampler, _, parts):
            await sampler.fill(2, 9)
        return parts

    parts = asyncio.run(asyncio.wait_for(second(), 60))
    assert {part.request_id.split("-")[1] for part in parts} == {"v9"}, "sent again with these weights"
    assert all(part.prompt_tokens == 128 for part in parts if part.request_id.startswith(f"p{positions[0]}-"))
    assert check_ledger(read_ledger(tmp_path / "ledger.jsonl"))


def test_a_group_that_goes_on_was_not_interrupted_and_is_finished_once():
    def event(kind, prompt=None, **more):
        return {"event": kind, "prompt": prompt, "rollout_step": 1, "weight_version": 1} | more

    before = [event("dispatched", 0), event("dispatched", 1), event("dispatched", 2)]
    before += [event("finished", 1), event("finished", 2), event("checkpoint")]  # both after its content was fixed
    resumed = event("resumed", continued=[0, 1])
    standing = effective_events([*before, resumed])
    left = [(each["event"], each["prompt"]) for each in standing if each["event"] in ("finished", "interrupted")]
    assert left == [("finished", 2), ("interrupted", 2)]
    again = [event("dispatched", 2), *(event("finished", at) for at in (0, 1, 2))]
    assert set(check_ledger([*before, resumed, *again]).values()) == {"finished"}
    # A second kill, before the first checkpoint after the resume; and a ledger that names none.
    assert check_ledger([*before, resumed, event("finished", 0), resumed, *again])
    older = effective_events([*before, event("resumed")])
    assert [each["prompt"] for each in older if each["event"] == "interrupted"] == [0, 1, 2]
