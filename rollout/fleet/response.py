"""A response under way: the parts that servers have drawn of it, and what is to be asked for next."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from rollout.fleet.member import Member
from rollout.generation import FinishReason, Generation, GenerationRequest
from rollout.wire.reply import Reply


@dataclass(slots=True)
class Response:
    """A response under way: what all attempts so far have drawn."""

    request: GenerationRequest
    parts: list[tuple[Reply, int]] = field(default_factory=list)
    """(tokens, weight version that drew them), in order."""
    streaming: tuple[Member, Sequence[Reply], int, float] | None = None
    """The server that draws the next part, what it has sent of it, its weight version, and since when (monotonic)."""
    routing: np.ndarray | None = None
    """uint8 [R, layers, k]: the experts of the first R tokens of prompt and response, as in `Generation`."""
    home: tuple[Member, int] | None = None
    """The server that drew last, and its weight version when the response came there: no keys and values that it left
    there are older."""
    _given: tuple[tuple[int, int], ...] | None = field(default=None, init=False)

    @classmethod
    def of(cls, request: GenerationRequest) -> "Response":
        """With what was drawn before."""
        begun = request.begun
        routing = begun.routing if begun is not None and request.routing is not None else None
        if begun is None or not begun.drawn:
            return cls(request, routing=routing)
        edges = np.flatnonzero(np.diff(begun.weight_versions)) + 1
        split = (np.split(array, edges) for array in (begun.drawn_ids, begun.log_probs, begun.weight_versions))
        parts = [
            (Reply(token_ids=ids, log_probs=log_probs, finish_reason=FinishReason.ABORT, weight_label=None), int(by[0]))
            for ids, log_probs, by in zip(*split, strict=True)
        ]
        parts[-1] = replace(parts[-1][0], finish_reason=begun.finish_reason), parts[-1][1]
        return cls(request, parts, routing=routing)

    def add(self, reply: Reply, version: int, routing: np.ndarray | None) -> None:
        """One more part, and the rows of routing that came with it: each token gets its row once. Where only these were
        asked for, the reply says nothing of how the response ended."""
        if self._end is None:
            self.parts.append((reply, version))
        if routing is not None:
            self.routing = routing if self.routing is None else np.concatenate([self.routing, routing])

    @property
    def routed(self) -> int:
        """R: tokens that have a row of routing."""
        return 0 if self.routing is None else len(self.routing)

    @property
    def drawn(self) -> np.ndarray:
        """int32 [T]: the tokens drawn so far."""
        return np.concatenate([np.zeros(0, np.int32), *(reply.token_ids for reply, _ in self.parts)])

    @property
    def tokens(self) -> int:
        """T."""
        return sum(reply.token_ids.size for reply, _ in self.parts)

    @property
    def given(self) -> tuple[tuple[int, int], ...]:
        """`Generation.given`, so far: the phrase that ends the thinking, behind `budget` drawn tokens. It follows from
        the drawn tokens alone, and is found out once."""
        thinking = self.request.sampling.thinking
        if thinking is None or self.tokens < thinking.budget:
            return ()
        if self._given is None:
            thought = self.drawn[: thinking.budget]
            stopped = thought.size > 0 and int(thought[-1]) in self.request.sampling.stop_token_ids
            self._given = () if stopped or thinking.ended(thought) else ((thinking.budget, len(thinking.end_ids)),)
        return self._given

    @property
    def token_ids(self) -> np.ndarray:
        """int32 [C]: what stands behind the prompt so far."""
        ids, thinking = self.drawn, self.request.sampling.thinking
        return np.insert(ids, thinking.budget, thinking.end_ids) if thinking is not None and self.given else ids

    @property
    def prompt_ids(self) -> np.ndarray:
        """int32 [P + C]: the prompt, and that."""
        return np.concatenate([self.request.prompt_ids, self.token_ids])

    @property
    def tokens_left(self) -> int:
        return self.request.sampling.max_new_tokens - self.tokens

    @property
    def stretch(self) -> int:
        """Tokens to ask for: all that are left, or those up to the budget of thinking; 0 where only rows of routing are
        missing."""
        if self._end is not None:
            return 0
        thinking, drawn = self.request.sampling.thinking, self.tokens
        return thinking.budget - drawn if thinking is not None and drawn < thinking.budget else self.tokens_left

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why it ended; None: it goes on, be it for rows of routing alone."""
        return self._end if self.request.routing is None or self.routed >= self.prompt_ids.size - 1 else None

    @property
    def _end(self) -> FinishReason | None:
        """Why no token is left to draw. An aborted part ends it too if it reached the limit, or drew a stop token
        last: a server that is told to abort between two tokens does not look for one. Nor does one whose limit was the
        budget of thinking, at its last token."""
        if not self.parts:
            return None
        reply, thinking = self.parts[-1][0], self.request.sampling.thinking
        at_budget = thinking is not None and self.tokens == thinking.budget and reply.token_ids.size > 0
        if reply.finish_reason is FinishReason.STOP or (reply.finish_reason is FinishReason.LENGTH and not at_budget):
            return reply.finish_reason
        if self.tokens_left <= 0:  # the limit counts before the stop token, as in a server
            return FinishReason.LENGTH
        stopped = reply.token_ids.size > 0 and int(reply.token_ids[-1]) in self.request.sampling.stop_token_ids
        return FinishReason.STOP if stopped else None

    def generation(self, finish_reason: FinishReason) -> Generation:
        """The complete response."""
        return Generation(
            request_id=self.request.request_id,
            token_ids=self.token_ids,
            log_probs=np.concatenate([reply.log_probs for reply, _ in self.parts]),
            weight_versions=np.concatenate([np.full(part.token_ids.size, by, np.int32) for part, by in self.parts]),
            finish_reason=finish_reason,
            given=self.given,
            routing=self.routing,
        )
