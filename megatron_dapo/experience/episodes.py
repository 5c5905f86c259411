"""One response under way: a single answer, or the turns of an episode; and what is given to it between the tokens that
the model draws: what ends its thinking (`rollout.thinking_end`), and between two turns the observation in the text that
the chat template puts around it.

The model's own tokens are never made anew from text. So the template must be one that only appends: that keeps every
earlier turn as it was, its thinking too. It is tried on small conversations before anything is started.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self

import numpy as np

from megatron_dapo.config import Config, ConfigError
from megatron_dapo.data.prompts import Prompt
from megatron_dapo.data.tokenizer import TextTools
from megatron_dapo.experience.groups import EarlierTurn, ScoredResponse
from reward.environment import MESSAGE_LIMIT, ROLES, End, Episode, Observation, Stepped, Turn, shortened
from reward.verdict import EXTRACTED_LIMIT, Verdict
from rollout.config import CONTEXT_RESERVE, RolloutConfig
from rollout.generation import FinishReason, Generation, GenerationRequest, ThinkingLimit, nothing_drawn

SMALLEST_ROOM = 16
"""Tokens that must be left for an observation."""
ELLIPSIS = "..."
"""In place of an observation that has no tokens, or no room."""

QUESTION, RESULTS = "Which number?", ('A "1"\nand 2', 'B "3"\nand 4')
ANSWERS = ("I say 5.", "<think>\nIt was too low.\n</think>\n\nI say 8.")


@dataclass(frozen=True, eq=False)
class TurnRules:
    """How episodes go on."""

    max_turns: int
    max_tokens: int
    """Of an observation with the text around it."""
    end_ids: tuple[int, ...]
    """Tokens that end a turn besides those that end a response."""
    between: Mapping[tuple[bool, str], tuple[str, str]]
    """(whether the prompt went through the chat template, role) -> the text before an observation, from the end of the
    model's turn on, and the text behind it."""
    text: TextTools
    room: int
    """Tokens of an episode, its prompt included, behind which a server still holds an observation and a turn."""

    def fit(self, seen: Observation, chat: bool, last: int) -> tuple[str, list[int]]:
        """The observation's text, shortened if it must be, and the ids that are given between the turns, at least one.

        Args:
            chat: whether the prompt went through the chat template.
            last: token that the model drew last; an end of turn is not given again.
        """
        (before, after), text = self.between[chat, seen.role], seen.text
        # Above eight characters a token it is too long; the tokenizer, which is slow, is then given half of that.
        room = (4 if len(text) > 8 * self.max_tokens else 8) * self.max_tokens
        while True:
            said = shortened(text, room)
            ids = self.text.ids_behind(before + said + after)
            if len(ids) > 1 and ids[0] == last and last in (*self.text.stop_token_ids, *self.end_ids):
                ids = ids[1:]
            if 0 < len(ids) <= self.max_tokens:
                return said, ids
            room = int(0.95 * min(room, len(text)) * self.max_tokens / max(len(ids), 1))
            if not ids or room < SMALLEST_ROOM:
                text, room = ELLIPSIS, SMALLEST_ROOM


Rules = TurnRules | None


def turn_rules(config: Config, text: TextTools, prompts: Sequence[Prompt]) -> Rules:
    """None: none of the prompts has an environment. Raises ConfigError: what stands between turns cannot be made."""
    chats, rollout = {prompt.chat for prompt in prompts if prompt.environment is not None}, config.rollout
    if not chats:
        return None
    end_ids = [text.ids_behind(mark) for mark in rollout.turn_end]
    for mark, ids in zip(rollout.turn_end, end_ids, strict=True):
        if len(ids) != 1:
            raise ConfigError(f"rollout.turn_end = {mark!r}: it must be one token of the model's, and is {len(ids)}")
    own = config.data.observation_template
    between = {(chat, role): appended(text.tokenizer, own, chat, role) for chat in chats for role in ROLES}
    for before, after in between.values():
        least = len(text.ids_behind(before + after)) + SMALLEST_ROOM
        if rollout.max_observation_tokens < least or not text.ids_behind(before + ELLIPSIS + after):
            shown = f"an observation in {before + '{observation}' + after!r}, of which the tokenizer must make tokens"
            key = f"rollout.max_observation_tokens = {rollout.max_observation_tokens}"
            raise ConfigError(f"{key}: set at least {least}, for {shown}")
    ends, longest = tuple(ids[0] for ids in end_ids), rollout.max_observation_tokens
    room = config.model.context_length - CONTEXT_RESERVE - longest
    return TurnRules(rollout.max_turns, longest, ends, between, text, room)


def appended(tokenizer: Any, own: str | None, chat: bool, role: str) -> tuple[str, str]:
    """The text before and behind a message of this role which follows an answer. A role that the chat template does not
    know is the user's.

    Args:
        own: `data.observation_template`.
        chat: whether the prompt went through the chat template.

    Raises:
        ConfigError: that fails, or changes what stands before.
    """
    if own is not None or not chat:
        before, _, after = (own or "{observation}").partition("{observation}")
        return before, after

    def render(*said: str) -> str:
        roles = ["user", *["assistant", role] * (len(said) // 2)]
        messages = [{"role": who, "content": text} for who, text in zip(roles, said, strict=True)]
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))

    (first, second), (one, two), before, after, problem = ANSWERS, RESULTS, "", "", ""
    try:
        asked, seen = render(QUESTION), render(QUESTION, first, one)
        before, _, after = seen.removeprefix(asked + first).partition(one)
        for a, b in ((first, second), (second, first)):
            if render(QUESTION, a, one, b, two) != asked + a + before + one + after + b + before + two + after:
                problem = f"it changes earlier turns, as {second!r}"
                if seen.startswith(asked + first):  # else what was found holds the probe itself
                    problem += f", where it should put {before + '{observation}' + after!r} behind them"
    except Exception as error:  # a chat template is a program of the model's author and may raise anything
        problem = f"it fails for role {role} ({type(error).__name__}: {error})"
    if problem and role == "user":
        why = f"the model would not read what it wrote: of a conversation, {problem}"
        raise ConfigError(f"data.template = chat: {why}; set data.observation_template to the text between two turns")
    return appended(tokenizer, own, chat, "user") if problem else (before, after)


def thinking_limit(rollout: RolloutConfig, text: TextTools) -> ThinkingLimit | None:
    """Of `rollout.thinking_budget`; None: no thinking is interrupted.

    Raises:
        ConfigError: `thinking_end` has no tokens, or one that ends a response.
    """
    budget, phrase = rollout.thinking_budget, rollout.thinking_end
    if budget is None or phrase is None:
        return None
    mark = rollout.thinking_mark or phrase.strip()
    ids = tuple(text.tokenizer.encode(phrase, add_special_tokens=False))
    if not ids:
        raise ConfigError(f"rollout.thinking_end = {phrase!r}: the model's tokenizer makes no token of it")
    if ending := set(ids).intersection(text.stop_token_ids):
        raise ConfigError(f"rollout.thinking_end = {phrase!r}: its token {min(ending)} ends a response")

    def ended(drawn: np.ndarray) -> bool:
        return mark in text.decoder.decode(drawn, skip_special_tokens=False)

    return ThinkingLimit(budget=budget, end_ids=ids, ended=ended)


CARRIED = ("newest", "before", "earlier", "state", "turn_rewards", "verdict")
"""Fields of a `Play` that change while it is played, and that others do not follow from."""
UNENDED = "no end"
"""Rule of the verdict on an episode whose turns or tokens were used up before its environment ended it."""


@dataclass(eq=False, slots=True)
class Play:
    """Turn after turn: `request` is drawn, the environment is asked about `episode`, `settle` takes in what it says."""

    prompt: Prompt
    whole: GenerationRequest
    """For the prompt alone; its limit holds for all turns together."""
    rules: Rules = None
    """None: there is one turn."""
    request: GenerationRequest = field(init=False)
    """For the newest turn."""
    newest: Generation | None = None
    """The newest turn, once it is complete."""
    before: Generation | None = None
    """The turns before it, up to the last token that was given."""
    earlier: list[EarlierTurn] = field(default_factory=list)
    state: Any = None
    turn_rewards: float = 0.0
    """Sum over all turns."""
    verdict: Verdict | None = None
    """The environment's; None: the verifier judges."""

    @classmethod
    def of(cls, prompt: Prompt, request: GenerationRequest, rules: Rules, begun: ScoredResponse | None = None) -> Self:
        """`begun`: what an ended run had drawn of it."""
        play, newest = cls(prompt, request), begun.generation if begun else None
        if prompt.environment is not None and rules is not None:
            stops = (*request.sampling.stop_token_ids, *rules.end_ids)
            play.rules, play.whole = rules, replace(request, sampling=replace(request.sampling, stop_token_ids=stops))
            if begun and begun.earlier:
                play.before, newest = begun.generation.cut(sum(begun.generation.given[-1]))
                play.earlier, play.state = list(begun.earlier), begun.state
                for turn in begun.earlier:
                    play.turn_rewards += turn.reward  # as `settle` does: `sum` rounds otherwise from Python 3.12 on
        if play.left <= 0:  # the limit is a lower one now
            return cls.of(prompt, request, rules)
        play._draw(newest)
        return play

    @property
    def left(self) -> int:
        """Tokens that the newest turn may have."""
        return self.whole.sampling.max_new_tokens - (self.before.drawn if self.before else 0)

    @property
    def done(self) -> Generation:
        """The newest turn, which is complete."""
        assert self.newest is not None
        return self.newest

    @property
    def last(self) -> bool:
        """Whether no turn can follow the newest one."""
        cut = self.done.finish_reason is FinishReason.LENGTH or self.done.drawn >= self.left
        if cut or self.rules is None or len(self.earlier) + 1 >= self.rules.max_turns:
            return True
        return self.request.prompt_ids.size + self.done.token_ids.size > self.rules.room

    def generation(self, newest: Generation) -> Generation:
        """All turns, with what is known of the newest one."""
        whole = self.before.followed_by(newest) if self.before else newest
        return whole if self.rules is None else replace(whole, request_id=self.whole.request_id)

    def episode(self, text: str) -> Episode:
        """For the environment. `text`: of the newest turn."""
        past = zip(self.earlier, drawn_turns(self.before), strict=False) if self.before else ()
        old = [Turn(one.response, one.observation, tuple(ids.tolist()), one.role, bool(one.error)) for one, ids in past]
        newest = Turn(text, token_ids=tuple(self.done.token_ids.tolist()))
        return Episode(self.prompt.text, self.prompt.answer, (*old, newest), self.state, self.last)

    def settle(self, stepped: Stepped, text: str) -> bool:
        """Take in what the environment said to the newest turn; whether the episode is over."""
        assert self.rules is not None
        said, error = stepped.outcome, stepped.error
        if error is not None:
            said = Observation(f"error: {error}"[:MESSAGE_LIMIT], state=self.state)
        if isinstance(said, Observation):
            self.turn_rewards += said.reward
            if not self.last:
                read, given = self.rules.fit(said, self.prompt.chat, int(self.done.token_ids[-1]))
                self.before = self.generation(self.done).followed_by(nothing_drawn(""), given)
                self.earlier.append(EarlierTurn(text, read, said.role, said.reward, error))
                self.newest, self.state = None, said.state
                self._draw(None)
                return False
            said = End(accuracy=False, rule="" if error else UNENDED)
        if said is not None:
            if said.extracted is None:  # what cons@n counts
                said = replace(said, extracted=text[:EXTRACTED_LIMIT])
            self.verdict = Verdict(**asdict(said), seconds=stepped.seconds, error=error)
        return True

    def carried(self) -> tuple[Any, ...]:
        """How far it is, for `take` in another process."""
        return tuple(getattr(self, name) for name in CARRIED)

    def take(self, carried: Sequence[Any], begun: Generation | None) -> None:
        """Go on from there, and from what was drawn of the newest turn."""
        for name, value in zip(CARRIED, carried, strict=True):
            setattr(self, name, value)
        self._draw(begun)

    def _draw(self, begun: Generation | None) -> None:
        """The request for a turn behind what is there."""
        if self.rules is None:
            self.request = replace(self.whole, begun=begun)
            return
        turn, whole = len(self.earlier), self.whole
        if begun is None and self.before is not None and self.before.routing is not None:
            begun = replace(nothing_drawn(""), routing=self.before.routing)  # rows of what is the turn's prompt
        self.request = replace(
            whole,
            request_id=f"{whole.request_id.removesuffix('.')}-t{turn}.",
            prompt_ids=np.concatenate([whole.prompt_ids, *([self.before.token_ids] if self.before else ())]),
            sampling=replace(whole.sampling, max_new_tokens=self.left),
            seed=(whole.seed + turn * 0x9E3779B1) & 0x7FFFFFFF,
            begun=begun,
        )


def drawn_turns(generation: Generation) -> list[np.ndarray]:
    """int32 ids of what was drawn before each run of given tokens, and behind the last one."""
    edges = [edge for first, tokens in generation.given for edge in (first, first + tokens)]
    return np.split(generation.token_ids, edges)[::2]
