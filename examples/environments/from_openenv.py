"""Environments that a running OpenEnv server offers, over its client (pip install openenv-core).

    data.environment: examples.environments.from_openenv:play

The server's `max_concurrent_envs` must be at least `reward.environment_workers`: one session more is an error, which
costs an episode its turn.
"""

import json

# Here, not where it is used: it takes seconds, which would count against reward.timeout_s.
from openenv.core import GenericEnvClient

from examples.environments.reset_step import World, replayed, written
from examples.environments.reset_step import row as world_row
from reward.environment import End, Episode, Observation


class OpenEnv:
    def __init__(self, world: World) -> None:
        self.world, self.client = world, GenericEnvClient(base_url=world.environment).sync()

    def reset(self) -> str:
        return written(self.client.reset(seed=self.world.seed, **self.world.arguments).observation)

    def step(self, response: str) -> tuple[str, float, bool] | None:
        try:
            action = {self.world.key: response} if self.world.key else json.loads(response)
        except ValueError:
            return None
        result = self.client.step(action)
        return written(result.observation), float(result.reward or 0.0), bool(result.done)

    def close(self) -> None:
        self.client.close()


def play(episode: Episode) -> Observation | End:
    """The newest response in the environment of the row's server."""
    return replayed(episode, OpenEnv)


def row(world: World, instruction: str) -> dict[str, str]:
    """A line of a prompt file."""
    return world_row(world, instruction, OpenEnv)
