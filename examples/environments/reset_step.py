"""Environments with `reset` and `step` that others wrote, unmodified: gymnasium's here, OpenEnv's in from_openenv.py.

    data.environment: examples.environments.reset_step:gymnasium     (pip install gymnasium)

A row's ground truth is the JSON of a `World`. Each step resets the environment with the row's seed and replays the
conversation's actions, so any process can go on with it. One that does not repeat itself stops the run. The rows:

    python -m examples.environments.reset_step FrozenLake-v1 --count 100 --names left,down,right,up > rows.jsonl
"""

import dataclasses
import hashlib
import json
import re
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from typing import Annotated, Any, Protocol

import numpy as np
import typer

from reward.environment import End, Episode, Observation
from reward.verdict import VerifierError

_COLOURED = re.compile(r"\x1b\[[1-9][0-9;]*m(.*?)\x1b\[0m", re.DOTALL)


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """Which environment a row is about."""

    environment: str
    """gymnasium's id, or the address of OpenEnv's server."""
    seed: int
    arguments: dict[str, Any] = field(default_factory=dict)
    """For `gymnasium.make`, or for OpenEnv's reset. With render_mode "ansi" the model sees what render() gives,
    brackets in place of colours."""
    names: tuple[str, ...] = ()
    """Words for the actions 0, 1, 2, ... of gymnasium; none: an action is written in JSON."""
    key: str = "message"
    """Field of OpenEnv's action that the response becomes; empty: the response is the action, in JSON."""
    success: float = 1.0
    """Sum of the rewards from which on an episode is right."""
    first: str | None = None
    """Digest of what `reset` showed when the row was made."""


class Running(Protocol):
    """An environment that was made and not yet reset."""

    def reset(self) -> str: ...

    def step(self, response: str) -> tuple[str, float, bool] | None:
        """(observation, reward, done), or None: the response is no action, and nothing was done."""

    def close(self) -> None: ...


class Gymnasium:
    def __init__(self, world: World) -> None:
        import gymnasium

        if ":" in world.environment:
            raise VerifierError(f"environment {world.environment!r}: a row does not say what is imported")
        self.world, self.made = world, gymnasium.make(world.environment, **world.arguments)

    def reset(self) -> str:
        return self._shown(self.made.reset(seed=self.world.seed)[0])

    def step(self, response: str) -> tuple[str, float, bool] | None:
        action = self._action(response)
        if action is None:
            return None
        seen, reward, terminated, truncated, _ = self.made.step(action)
        return self._shown(seen), float(reward), bool(terminated or truncated)

    def close(self) -> None:
        self.made.close()

    def _action(self, response: str) -> Any:
        written, space = response.strip().rpartition("\n")[2].strip(), self.made.action_space
        if self.world.names:
            return self.world.names.index(written) if written in self.world.names else None
        try:
            given = json.loads(written)
            action = given if space.dtype is None else np.asarray(given, dtype=space.dtype)
            if space.dtype is not None and not np.allclose(action, given):
                return None  # such as 1.5 for the second action
        except (ValueError, TypeError, OverflowError, RecursionError):
            return None
        action = action.item() if isinstance(action, np.ndarray) and action.ndim == 0 else action
        return action if space.contains(action) else None

    def _shown(self, seen: Any) -> str:
        return _COLOURED.sub(r"[\1]", self.made.render()) if self.made.render_mode == "ansi" else written(seen)


def gymnasium(episode: Episode) -> Observation | End:
    """The newest response in an environment of gymnasium."""
    return replayed(episode, Gymnasium)


def replayed(episode: Episode, kind: Callable[[World], Running]) -> Observation | End:
    """The newest response, in an environment that is made anew."""
    try:
        world = World(**json.loads(episode.ground_truth))
    except (ValueError, TypeError) as error:
        raise VerifierError(f"ground truth is not the JSON of a World: {error}") from None
    with closing(kind(world)) as running:
        shown = running.reset()
        if world.first not in (None, _digest(shown)):
            raise VerifierError(f"{world.environment} with seed {world.seed} no longer begins as in the row")
        trace, total, reward, done = "", 0.0, 0.0, False
        for turn in (turn for turn in episode.turns if not turn.failed):
            if done or (turn is episode.turns[-1] and episode.state not in (None, trace)):
                raise VerifierError(f"{world.environment} with seed {world.seed} does not repeat itself")
            moved = running.step(turn.response)
            shown, reward, done = moved or ("no such action", 0.0, False)
            trace, total = _digest(f"{trace} {shown} {reward}"), total + reward
    if done or episode.last:
        return End(accuracy=total >= world.success, extracted=f"{total:g}", rule="done" if done else "not-done")
    return Observation(shown, state=trace, reward=reward)


def written(seen: Any) -> str:
    """An observation as text."""
    return seen if isinstance(seen, str) else json.dumps(seen, default=lambda value: np.asarray(value).tolist())


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def row(world: World, instruction: str, kind: Callable[[World], Running]) -> dict[str, str]:
    """A line of a prompt file: the instruction, and what the environment shows at the start."""
    with closing(kind(world)) as running:
        shown = running.reset()
    world = dataclasses.replace(world, first=_digest(shown))
    return {"prompt": f"{instruction}\n{shown}".strip(), "answer": json.dumps(dataclasses.asdict(world))}


def main(
    environment: Annotated[str, typer.Argument(help="gymnasium's id.")],
    instruction: Annotated[str, typer.Option(help="Stands before what the environment shows.")] = "",
    count: Annotated[int, typer.Option(min=1, help="Rows, with the seeds from 0 on.")] = 100,
    names: Annotated[str, typer.Option(help="Words for the actions, in order, with commas.")] = "",
    arguments: Annotated[str, typer.Option(help="JSON for gymnasium.make.")] = "{}",
    success: Annotated[float, typer.Option(help="Sum of rewards from which on an episode is right.")] = 1.0,
) -> None:
    """Print the rows of a prompt file."""
    words = tuple(name for name in names.split(",") if name)
    for seed in range(count):
        world = World(environment=environment, seed=seed, arguments=json.loads(arguments), names=words, success=success)
        sys.stdout.write(json.dumps(row(world, instruction, Gymnasium)) + "\n")


if __name__ == "__main__":
    typer.run(main)
