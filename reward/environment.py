"""What an environment is asked and what it answers: a function of the conversation, run in a process of the pool.

    def guess(episode):
        number, goal = int(episode.response), int(episode.ground_truth)
        return End(accuracy=True) if number == goal else Observation("higher" if number < goal else "lower")

It is called after each turn of the model, by any process, and again for the same turn where a run goes on: what it must
remember is in the conversation, or in `state`. Nothing here is imported from outside the standard library.
"""

import inspect
import json
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from reward.registry import check_name, load_named
from reward.verdict import EXTRACTED_LIMIT, VerifierError

LARGEST_REWARD = 1e6
STATE_LIMIT = 1 << 16
"""Longest `state`, in characters of its JSON."""
TEXT_LIMIT = 1 << 17
"""Characters of an observation that leave the process; of a longer one the middle is left out. The limit in tokens is
`rollout.max_observation_tokens`."""
MESSAGE_LIMIT = 200
"""Characters of an error that the model reads as `error: ...`."""
ROLES = ("user", "tool")


@dataclass(frozen=True, slots=True)
class Turn:
    """One response of the model and what came back."""

    response: str
    observation: str = ""
    """Empty for the newest turn."""
    token_ids: tuple[int, ...] = ()
    """What the model drew, its end of turn included."""
    role: str = "user"
    """Of the observation."""
    failed: bool = False
    """The environment raised, hung or died on it, and `state` is the one before it."""


@dataclass(frozen=True, slots=True)
class Episode:
    """A conversation so far: Episode(prompt="Guess a number.", ground_truth="7", turns=(Turn("5", "higher"),
    Turn("8")))."""

    prompt: str
    """As the template made it."""
    ground_truth: str
    turns: tuple[Turn, ...]
    """At least one; the last one has no observation yet."""
    state: Any = None
    """What the step before returned, as JSON holds it."""
    last: bool = False
    """Whether no further turn is possible: an observation then ends the episode as wrong."""

    @property
    def response(self) -> str:
        """Text of the newest turn."""
        return self.turns[-1].response

    @property
    def messages(self) -> list[dict[str, str]]:
        """The conversation as a chat list of {role, content}."""
        said = [{"role": "user", "content": self.prompt}]
        for turn in self.turns:
            said += [{"role": "assistant", "content": turn.response}, {"role": turn.role, "content": turn.observation}]
        return said[:-1]


@dataclass(frozen=True, slots=True)
class Observation:
    """The episode goes on: what the model reads next."""

    text: str
    state: Any = None
    """JSON, at most `STATE_LIMIT` characters; the next step gets it back."""
    reward: float = 0.0
    """Of this turn; counts with `algorithm.turn_rewards`."""
    role: str = "user"
    """`tool` for the result of a tool."""


@dataclass(frozen=True, slots=True)
class End:
    """The episode is over."""

    accuracy: bool
    """The only thing that dynamic sampling reads."""
    reward: float | None = None
    """None: eq. 7 of the accuracy."""
    extracted: str | None = None
    rule: str = "environment"


Outcome = Observation | End | None
"""None: the episode is over, and the prompt's verifier judges the newest turn."""

Environment = Callable[[Episode], Outcome | Coroutine[Any, Any, Outcome]]
"""`def` or `async def`. What it raises becomes an observation; VerifierError, and what is no outcome, stops the run."""


@dataclass(frozen=True, slots=True)
class Step:
    """A question to an environment, by its name."""

    environment: str
    episode: Episode


@dataclass(frozen=True, kw_only=True, slots=True)
class Stepped:
    """The answer. Stepped(outcome=Observation("higher"), seconds=1e-4)"""

    outcome: Outcome = None
    seconds: float
    """Waiting in queues not counted."""
    error: str | None = None
    """Why there is no outcome: "timeout", "memory", "worker died (signal 9)", "ValueError: ..."."""
    unjudged: bool = False
    """Whether the fault is not the response's: the run must stop."""


REMOTE = "remote"
ENVIRONMENTS: dict[str, str] = {"python": "reward.verifiers.code:run", REMOTE: ""}
"""Registered environments: name -> `module:function`; `remote` is a service (`reward/pool/remote.py`)."""


def check_environment(name: str) -> str:
    """The name, registered or a path `module:function`. Raises VerifierError: it is neither."""
    try:
        return check_name(name, ENVIRONMENTS)
    except ValueError as error:
        raise VerifierError(f"environment {name[:80]!r} is not known; {error}") from None


def load_environment(name: str) -> Environment:
    """Imports it. Raises VerifierError: unknown name, a module that cannot be imported, no such function in it."""
    return load_named(ENVIRONMENTS.get(name, check_environment(name)))


def ask(environment: Environment, episode: Episode) -> Outcome:
    """One step, an `async def` run to its end. Raises what the environment raises, and as `checked`."""
    outcome = environment(episode)
    return checked(_runner().run(outcome) if inspect.iscoroutine(outcome) else outcome)


@cache
def _runner() -> Any:
    """Of all steps of this process: a client or a lock that an environment keeps belongs to one event loop."""
    import asyncio  # a tenth of a second, which few environments need

    return asyncio.Runner()


def checked(outcome: object) -> Outcome:
    """The outcome in a form that can be sent: no text too long or with half characters. Raises VerifierError,
    a fault of its program, which stops the run; and ValueError for a state that is too long: a response may have filled
    it."""
    reward = getattr(outcome, "reward", None)
    if reward is None or (type(reward) in (int, float) and abs(reward) <= LARGEST_REWARD):
        match outcome:
            case None:
                return None
            case End(accuracy=bool(), extracted=None | str() as text, rule=str() as rule):
                text = None if text is None else sendable(text[:EXTRACTED_LIMIT])
                return replace(outcome, extracted=text, rule=sendable(rule[:EXTRACTED_LIMIT]))
            case Observation(text=str(text), state=state, role="user" | "tool") if reward is not None:
                try:
                    held = json.dumps(state, allow_nan=False)
                except (TypeError, ValueError, RecursionError) as error:
                    raise VerifierError(f"JSON cannot hold the state: {error}") from None
                if len(held) > STATE_LIMIT:
                    raise ValueError(f"the state has {len(held)} characters of JSON, more than {STATE_LIMIT}")
                return replace(outcome, text=sendable(shortened(text, TEXT_LIMIT)), state=json.loads(held))
    forms = "no Observation with text and role user or tool, no End with accuracy True or False, not None"
    raise VerifierError(f"it returned {str(outcome)[:80]!r}, which is {forms}; or its reward is beyond a million")


def outcome_of(fields: Any) -> Outcome:
    """An outcome from the fields that JSON held. Raises TypeError, VerifierError, ValueError: it is none."""
    return checked(None if fields is None else Observation(**fields) if "text" in fields else End(**fields))


def shortened(text: str, characters: int) -> str:
    """The text, or its beginning and end with a mark between that says how much was left out."""
    if len(text) <= characters:
        return text
    mark = f"\n[... {len(text) - characters} characters left out ...]\n"
    kept = max(characters - len(mark), 0)
    return text[: kept - kept // 2] + mark + text[len(text) - kept // 2 :]


def sendable(text: str) -> str:
    """The text without half characters (lone surrogates)."""
    return text.encode("utf-8", "replace").decode()
