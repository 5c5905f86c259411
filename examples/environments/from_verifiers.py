"""Environments of the `verifiers` package (PyPI, 0.4), unmodified. A module of your own names one:

    from examples.environments.from_verifiers import adapter
    play = adapter({"taskset": {"id": "textarena", "game": "Hangman-v0"}})      # data.environment: my_module:play

A row's ground truth is the JSON of a task's data (`row`). Each step runs the environment's own `run()` from its start
with an agent that says again what the model said, up to the place where it waits for more: the next observation.

Refused in words: several agents, and tasks with tools over MCP, a container, setup, finalize, stop or intercept
hooks, or scores that read a runtime: those need verifiers' own rollouts. verifiers wants a newer openai than SGLang
pins, so it is in no extra: installed beside it, pip says that they clash.
"""

import asyncio
import hashlib
import inspect
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.dialects import parse_message
from verifiers.v1.graph import MessageNode
from verifiers.v1.trace import AgentInfo, TraceTask
from verifiers.v1.types import content_text
from verifiers.v1.utils.decorators import discover_decorated
from verifiers.v1.utils.loaders import load_environment, resolve_env_config

from reward.environment import End, Episode, Observation
from reward.verdict import VerifierError


class Agent:
    """An agent that says what the model said; it serves verifiers as agent and as open interaction."""

    trainable = True

    def __init__(self, name: str, config: vf.AgentConfig, responses: list[str], *, last: bool) -> None:
        self.info, self.responses, self.last = AgentInfo(config=config, name=name), responses, last
        self.heard: list[str] = []
        """What the environment said before each turn; nothing before the first."""
        self.waits, self.never = asyncio.Event(), asyncio.Event()

    async def run(self, task: vf.Task) -> vf.Trace:
        async with self.interaction(task):
            await self.turn()
        return self.trace

    @asynccontextmanager
    async def interaction(self, task: vf.Task) -> AsyncIterator["Agent"]:
        if self.heard:
            raise VerifierError("the environment opens a second conversation; this adapter plays one")
        self.trace = vf.Trace(task=_recorded(task), agent=self.info)
        for message in _opening(task):
            self._add(message)
        yield self
        self.trace.stop("user_closed")
        await task.score(self.trace)
        self.trace.ok = True

    async def turn(self, message: Any = None) -> vf.Segment:
        """The next response to a message; does not return where the model has to speak first."""
        said = [{"role": "user", "content": message}] if isinstance(message, str) else message or []
        new = [parse_message(each) if isinstance(each, dict) else each for each in said]
        self.heard.append("\n".join(content_text(each.content) for each in new))
        if not self.responses:
            if not self.last:
                self.waits.set()
                await self.never.wait()
            self.trace.stop("max_turns")
            return vf.Segment(messages=[], terminated=True)
        answer = vf.AssistantMessage(content=self.responses.pop(0))
        for each in (*new, answer):
            self._add(each, sampled=each is answer)
        return vf.Segment(messages=[answer], root_reply=answer.content)

    def _add(self, message: Any, *, sampled: bool = False) -> None:
        nodes = self.trace.nodes
        nodes.append(MessageNode(parent=len(nodes) - 1 if nodes else None, message=message, sampled=sampled))


def adapter(config: dict[str, Any], *, success: float = 1.0) -> Callable[[Episode], Awaitable[Observation | End]]:
    """The environment that `config` describes, as verifiers' `[env]` block does.

    Args:
        success: sum of the weighted rewards of task, judges and environment from which on an episode is right.
    """
    env = load_environment(resolve_env_config(config))
    kind, name = type(env.taskset).task_type(), type(env).__name__
    ((seat, spec), *others) = agent_config_fields(env.config).items()
    if others:
        raise VerifierError(f"{name} has agents {seat}, {', '.join(other for other, _ in others)}: only one is played")

    async def play(episode: Episode) -> Observation | End:
        try:
            task = kind(kind.data_type().model_validate_json(episode.ground_truth), env.taskset.config.task)
        except ValueError as error:
            raise VerifierError(f"ground truth is not the data of a {kind.__name__}: {error}") from None
        if needed := _needed(task, env.taskset):
            raise VerifierError(f"{kind.__name__} needs {needed}, which this adapter does not have")
        responses = [turn.response for turn in episode.turns if not turn.failed]
        before = len(responses)
        agent = Agent(seat, spec, responses, last=episode.last)
        agents = vf.Agents(env.config, lambda *_: agent)

        async def whole() -> None:
            await env.setup(agents)
            await env.run(task, agents)
            await env.finalize(task, vf.Episode(task=_recorded(task), traces=[agent.trace], ok=True))

        tasks = asyncio.create_task(whole()), asyncio.create_task(agent.waits.wait())
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for pending in tasks:
            pending.cancel()
        ran, _ = await asyncio.gather(*tasks, return_exceptions=True)
        if agent.waits.is_set():
            outcome = Observation(agent.heard[-1], state=_digest(agent.heard))
        elif isinstance(ran, BaseException):
            raise ran
        else:
            reward, ended = agent.trace.reward, agent.trace.stop_condition
            outcome = End(accuracy=reward >= success, extracted=f"{reward:g}", rule=ended or "done")
        if agent.responses or episode.state not in (None, _digest(agent.heard[:before])):
            raise VerifierError(f"{name} does not repeat itself: the same responses led elsewhere")
        return outcome

    return play


def row(task: vf.Task) -> dict[str, Any]:
    """A line of a prompt file for a task, such as one of `taskset.load()`."""
    prompt = [{"role": message.role, "content": content_text(message.content)} for message in _opening(task)]
    return {"prompt": prompt, "answer": task.data.model_dump_json(exclude_defaults=True)}


def _needed(task: vf.Task, taskset: vf.Taskset) -> str:
    """What of verifiers' rollouts the task relies on; empty: nothing."""
    kind, scores = type(task), [*task.hooks("reward"), *task.hooks("metric")]
    needs = {
        "tools": kind.toolsets(task.config) or taskset.toolsets(taskset.config),
        "a container": task.NEEDS_CONTAINER or task.data.image,
        "setup or finalize": kind.setup is not vf.Task.setup or kind.finalize is not vf.Task.finalize,
        "stop or intercept hooks": task.hooks("stop") or discover_decorated(task, "intercept"),
        "a runtime for its scores": any("runtime" in inspect.signature(score).parameters for score in scores),
    }
    return ", ".join(what for what, needed in needs.items() if needed)


def _opening(task: vf.Task) -> list[Any]:
    prompt, system = task.data.prompt, task.data.system_prompt
    said = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt or []
    whole = [{"role": "system", "content": system}, *said] if system else said
    return [parse_message(each) if isinstance(each, dict) else each for each in whole]


def _recorded(task: vf.Task) -> TraceTask:
    return TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)


def _digest(heard: list[str]) -> str:
    return hashlib.sha256(json.dumps(heard).encode()).hexdigest()[:16]
