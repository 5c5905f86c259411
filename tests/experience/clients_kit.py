"""Fleet, client processes and a generator of episodes, with stand-in servers and an environment of a test's own."""

from collections import Counter
from contextlib import asynccontextmanager
from types import SimpleNamespace

import numpy as np

from megatron_dapo.cluster.clients import Clients
from megatron_dapo.config.algorithm_config import AlgorithmConfig, OverlongConfig
from megatron_dapo.data.order import Span
from megatron_dapo.data.prompts import PromptSet
from megatron_dapo.experience.episodes import drawn_turns, turn_rules
from megatron_dapo.experience.generator import GroupGenerator, Responder
from reward.config import RewardConfig
from reward.pool.pool import RewardPool
from rollout.config import RolloutConfig
from rollout.fleet.fleet import RolloutFleet
from rollout.generation import SamplingParams
from tests.experience.chat_models import prompt_of
from tests.experience.test_observations import config
from tests.rollout.fleet_kit import FAST
from tests.rollout.standin import StandIn

GROUP, TURNS, VOCABULARY = 4, 3, 400
STOPS = tuple(range(9, 100, 10))
"""A stand-in's tokens at every tenth place, where a turn ends."""
ENVIRONMENT = '''
import json, os, time
from reward.environment import End, Observation
from reward.verdict import VerifierError

def talks(episode):
    """Ends with the third turn; waits as long as the folder that the prompt names is closed."""
    folder, turn = episode.ground_truth, len(episode.turns)
    with open(folder + "/asked", "a") as file:
        file.write(json.dumps([turn, episode.state, list(episode.turns[-1].token_ids)]) + "\\n")
    while os.path.exists(folder + "/closed"):
        time.sleep(0.01)
    if turn == 3:
        return End(accuracy=True, extracted=json.dumps([len(turn.token_ids) for turn in episode.turns]))
    return Observation("go on" * turn, state=[turn], reward=0.25)

def fails(episode): raise VerifierError("no such table")
'''


@asynccontextmanager
async def place(text, folder, *, processes, environment="talks", servers=2, seconds=0.0, **settings):
    """Fleet, processes and a generator of groups, whose prompts are all one."""
    engines = [StandIn(seconds_a_token=seconds) for _ in range(servers)]
    for engine in engines:
        engine.ends, engine.stream_interval = lambda position: position % 10 == 9, 2
    keys = {"stream_every": 2, "fleet_deadline_s": 20.0, "request_deadline_s": 20.0} | settings
    rollout = RolloutConfig(client_processes=processes, **keys)
    parts, reports = [], []
    fleet = RolloutFleet(
        rollout, engines, vocab_size=VOCABULARY, report=reports.append, timing=FAST, observe=parts.append
    )
    reward = RewardConfig(workers=1, environment_workers=16, timeout_s=30.0)
    pool = RewardPool(reward)
    prompt = prompt_of(text, "Talk.", environment=f"own_talk:{environment}", answer=str(folder))
    rules = turn_rules(config(f"rollout.max_turns={TURNS}"), text, [prompt])
    await fleet.start(10.0)
    clients = None
    if processes:
        clients = Clients(fleet, reports.append, reward, text.decoder, rules, thinking=None)
        await clients.start()
    elsewhere = clients.play if clients else None
    generator = GroupGenerator(
        Responder(fleet=fleet, pool=pool, decoder=text.decoder, rules=rules, elsewhere=elsewhere),
        PromptSet(
            prompts=(prompt,),
            spans=(Span(start=0, count=1, weight=1.0),),
            counts=Counter(),
            content_hash="",
        ),
        lambda version: SamplingParams(max_new_tokens=200, stop_token_ids=STOPS),
        AlgorithmConfig(group_size=GROUP, overlong=OverlongConfig(shape="none")),
        seed=0,
    )
    try:
        yield SimpleNamespace(
            engines=engines, fleet=fleet, clients=clients, generator=generator, parts=parts, reports=reports
        )
    finally:
        if clients:
            await clients.close()
        await fleet.close()
        pool.close()


def check_tokens(group):
    """Each token was drawn at its place, by the weights that it says, and each turn ends at the first stop."""
    for response in group.responses:
        generation, prompt = response.generation, group.prompt_ids.size
        assert len(response.earlier) == len(generation.given) == TURNS - 1
        places = np.delete(np.arange(generation.token_ids.size), given_places(generation)) + prompt
        np.testing.assert_array_equal(generation.drawn_ids, 10 * generation.weight_versions + places % 10)
        np.testing.assert_array_equal(generation.log_probs, -generation.weight_versions.astype(np.float32))
        for turn in drawn_turns(generation):
            assert (turn % 10 == 9).tolist() == [False] * (turn.size - 1) + [True]


def given_places(generation):
    return np.concatenate([np.arange(first, first + tokens) for first, tokens in generation.given])
