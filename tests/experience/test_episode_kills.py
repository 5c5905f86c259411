"""Episodes of a run that is killed and resumed: they go on in the same turn, whatever was under way."""

import asyncio

import numpy as np
import pytest

from megatron_dapo.algorithm.dynamic_sampling import PassRate
from megatron_dapo.coordinator.checkpoints import Progress, load_progress, save_progress
from megatron_dapo.experience.episodes import Play, drawn_turns
from megatron_dapo.experience.groups import SamplerState, unjudged
from reward.environment import Observation, Stepped
from rollout.generation import FinishReason, RoutingShape
from tests.experience.chat_models import ENVIRONMENTS, Talker, prompt_of
from tests.experience.test_episodes import GUESSES, check_sequence, generator_of, group_of, pool_of, speak

ROUTING = RoutingShape(layers=1, top_k=2, experts=256)


def checkpoint(folder, *groups):
    """What a resumed run reads of unfinished groups."""
    state = SamplerState(cursor=0, pass_rate=PassRate.start(0.5), carried=(), unfinished=groups)
    save_progress(Progress(rollout_step=1, optimizer_step=1, weight_version=3, sampler=state), folder)
    return load_progress(folder).sampler.unfinished


@pytest.mark.parametrize("chunk", [1, 2, 3])
def test_an_episode_goes_on_from_any_token_after_a_kill(text, own, tmp_path, chunk):
    prompt = prompt_of(text, "Guess.", environment=own("guess"))

    def slow(before, sample):
        said = before.count("<|im_start|>assistant")
        return f"{' n' * (3 + sample)} high high{GUESSES[(sample + said - 1) % 3]}<|im_end|>"

    (tmp_path / "own_episodes.py").write_text(
        ENVIRONMENTS.replace("int(episode.response), int(", 'int(episode.response.split("high")[-1]), int(')
    )
    whole, _ = group_of(text, prompt, slow, limit=200)
    assert [len(each.earlier) for each in whole.responses] == [2, 1, 0, 2]

    async def lives():
        """Killed after every token or so: each life goes on from what the one before has left in its checkpoint."""
        pool, begun, count, kept = pool_of(), None, 0, {}
        try:
            while True:
                count += 1
                fleet = Talker(text, slow, version=3 + count, chunk=chunk)
                generator = generator_of(text, prompt, fleet, pool, limit=200, routing=ROUTING)
                generator.restore(begun or ())
                fleet.going.clear()
                task = asyncio.ensure_future(generator.group(0, 3))
                await asyncio.sleep(0.02)
                fleet.going.set()
                for _ in range(3):
                    await asyncio.sleep(0)
                fleet.going.clear()
                await asyncio.sleep(0.05)  # the environment answers what is complete
                if task.done() or count > 150:
                    return await task, count, kept
                left = generator.unfinished(0, 3)
                task.cancel()
                await asyncio.wait([task])
                if left is not None:
                    (tmp_path / str(count)).mkdir()
                    (loaded,) = begun = checkpoint(tmp_path / str(count), left)
                    for sample, each in enumerate(loaded.responses):
                        before = kept.get(sample, (0, 0))
                        kept[sample] = (each.generation.drawn, len(each.earlier))
                        assert kept[sample] >= before, "nothing that was drawn is lost"
        finally:
            pool.close()

    group, count, kept = asyncio.run(asyncio.wait_for(lives(), 100))
    assert count > 5
    assert kept[0][1] == 2, "no checkpoint fell into a later turn: the test shows nothing"
    for one, other in zip(group.responses, whole.responses, strict=True):
        np.testing.assert_array_equal(one.generation.token_ids, other.generation.token_ids)
        np.testing.assert_array_equal(one.generation.log_probs, other.generation.log_probs)
        assert (one.generation.given, one.earlier) == (other.generation.given, other.earlier)
        assert np.all(np.diff(one.generation.weight_versions) >= 0)
        assert np.ptp(one.generation.weight_versions) > 0
        assert (one.reward_raw, one.text) == (other.reward_raw, other.text)
        routing = one.generation.routing
        assert len(routing) == prompt.ids.size + one.generation.token_ids.size - 1
        np.testing.assert_array_equal(routing[:, 0, 0], np.arange(len(routing)))  # each token's row once
        assert np.all(np.diff(routing[:, 0, 1].astype(int)) >= 0)
        assert len(np.unique(routing[:, 0, 1])) > len(one.earlier), "rows of earlier turns were asked for again"
        check_sequence(text, prompt, one)


def test_a_kill_while_the_environment_is_asked_loses_no_turn_and_no_state(text, own, tmp_path):
    gate = tmp_path / "gate"
    prompt = prompt_of(text, "?", environment=own("waits"), answer=str(gate))

    async def first(begun):
        pool = pool_of(timeout_s=60.0)
        generator = generator_of(text, prompt, fleet := Talker(text, speak), pool, "rollout.max_turns=2")
        generator.restore(begun)
        task = asyncio.ensure_future(generator.group(0, 3))
        try:
            while len(fleet.asked) < 4:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
            if begun:
                gate.write_text("")
                return await task, fleet
            left = generator.unfinished(0, 3)
            task.cancel()
            await asyncio.wait([task])
            return left, fleet
        finally:
            pool.close()

    left, _ = asyncio.run(asyncio.wait_for(first(()), 60))
    assert {each.generation.finish_reason for each in left.responses} == {FinishReason.STOP}
    begun = checkpoint(tmp_path, left)
    group, fleet = asyncio.run(asyncio.wait_for(first(begun), 60))
    again = [request for request in fleet.asked if "-t0." in request.request_id]
    assert all(request.begun.finish_reason is FinishReason.STOP for request in again), "no token of it is drawn again"
    assert [each.accuracy for each in group.responses] == [True] * 4
    assert {len(each.earlier) for each in group.responses} == {1}


def test_earlier_turns_are_the_same_after_a_kill(text, own):
    prompt = prompt_of(text, "Guess.", environment=own("guess"))
    generator = generator_of(text, prompt, Talker(text, speak), None)
    request, rules = generator._request(prompt, 0, 3, 0), generator.responder.rules
    play, asked = Play.of(prompt, request, rules), []
    for turn in range(3):
        play.newest = asyncio.run(Talker(text, speak).generate(play.request))
        asked.append(play.episode(f"said {turn}"))
        if turn < 2:
            play.settle(Stepped(outcome=Observation("higher", state=turn, role="tool"), seconds=0.0), f"said {turn}")
    assert [turn.response for turn in asked[2].turns] == ["said 0", "said 1", "said 2"]
    assert asked[2].turns[:1] == asked[1].turns[:1]
    ids = [list(turn.token_ids) for turn in asked[2].turns]
    assert ids == [each.tolist() for each in drawn_turns(play.generation(play.done))]
    begun = unjudged(play.generation(play.done), play.earlier, play.state)
    resumed = Play.of(prompt, request, rules, begun)
    resumed.newest = play.newest
    assert resumed.episode("said 2") == asked[2]
