"""One response under way: a single answer, or the turns of an episode with what its environment gave between them."""

from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self

import numpy as np

from megatron_dapo.data.prompts import Prompt
from megatron_dapo.experience.groups import EarlierTurn, ScoredResponse
from megatron_dapo.experience.observations import Rules
from reward.environment import MESSAGE_LIMIT, End, Episode, Observation, Stepped, Turn
from reward.verdict import EXTRACTED_LIMIT, Verdict
from rollout.generation import FinishReason, Generation, GenerationRequest, nothing_drawn

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
        play = cls(prompt, request)
        play.request = replace(request, begun=begun.generation if begun else None)
        if prompt.environment is None or rules is None:
            return play
        stops = (*request.sampling.stop_token_ids, *rules.end_ids)
        play.rules, play.whole = rules, replace(request, sampling=replace(request.sampling, stop_token_ids=stops))
        newest = begun.generation if begun else None
        if begun and begun.earlier:
            play.before, newest = begun.generation.cut(sum(begun.generation.given[-1]))
            play.earlier, play.state = list(begun.earlier), begun.state
            for turn in begun.earlier:  # as `settle` adds them: `sum` rounds in another way from Python 3.12 on
                play.turn_rewards += turn.reward
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
        drawn = drawn_turns(self.generation(self.done))
        said = [(turn.response, turn.observation, turn.role) for turn in self.earlier]
        turns = [
            Turn(response, observation, tuple(ids.tolist()), role)
            for (response, observation, role), ids in zip([*said, (text, "", "user")], drawn, strict=True)
        ]
        return Episode(self.prompt.text, self.prompt.answer, tuple(turns), self.state, self.last)

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

    def _draw(self, begun: Generation | None) -> None:
        """The request for a turn behind what is there."""
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
