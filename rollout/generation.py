"""The messages of the fleet: what a caller sends and what it gets back.

Legend of shapes: P prompt tokens, T response tokens: those that the model drew; C >= T tokens behind the prompt, with
those that were given to it in between.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import numpy as np


class FinishReason(StrEnum):
    """Why a response ended."""

    STOP = "stop"
    """A stop token or the model's end of text; it is the response's last token."""
    LENGTH = "length"
    """`max_new_tokens` were drawn: truncated."""
    ABORT = "abort"
    """The server stopped early. The fleet continues such a response; callers never see one."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ThinkingLimit:
    """Forced interruption of thinking (ScaleRL, arXiv 2510.13786): a response that has drawn `budget` tokens and still
    thinks is given `end_ids`, and goes on behind them up to `max_new_tokens` drawn ones."""

    budget: int
    """Drawn tokens, fewer than `max_new_tokens`."""
    end_ids: tuple[int, ...]
    ended: Callable[[np.ndarray], bool]
    """Whether int32 [budget] drawn tokens have ended their thinking by themselves."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How to draw a response.

    DAPO's training responses: SamplingParams(max_new_tokens=20480, temperature=1.0, stop_token_ids=(151643,))
    """

    max_new_tokens: int
    temperature: float = 1.0
    """Log-probs are those of log_softmax(logits / temperature). 0 is greedy, with the log-probs of temperature 1."""
    top_p: float = 1.0
    """Below 1 the log-probs are still those of the full distribution."""
    stop_token_ids: tuple[int, ...] = ()
    """Besides the end-of-text tokens of the model's own config, which always stop."""
    logit_bias: Mapping[int, float] | None = None
    """Added to the logits of these tokens; the log-probs include it. -inf is not possible, -1e9 forbids a token."""
    thinking: ThinkingLimit | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutingShape:
    """Of a mixture of experts; each token is sent to `top_k` of its `experts` in each layer.

    Qwen3-30B-A3B: RoutingShape(layers=48, top_k=8, experts=128)
    """

    layers: int
    top_k: int
    experts: int
    """At most 256: an expert's number is one byte."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class GenerationRequest:
    """One response to draw.

    The third of 16 responses to the prompt 5-17-9: GenerationRequest(request_id="p41-v7-s2",
    group_id="p41", prompt_ids=np.array([5, 17, 9], np.int32), sampling=SamplingParams(max_new_tokens=64),
    seed=8675309)
    """

    request_id: str
    group_id: str
    """Requests of one group share a prompt and go to one server, whose prefix cache then holds it once."""
    prompt_ids: np.ndarray
    """int32 [P]; the fleet checks them against the vocabulary, since one id too large ends a server."""
    sampling: SamplingParams
    seed: int
    """Decides the response in deterministic mode (0 .. 2**63 - 1); without it the server draws as it likes."""
    priority: int = 0
    """The smallest goes first where requests wait for a server. An interrupted request keeps its priority."""
    holdable: bool = False
    """Whether `RolloutFleet.hold` keeps it back."""
    begun: "Generation | None" = None
    """What was drawn of the response before, by a run that was ended: it goes on from there."""
    routing: RoutingShape | None = None
    """Of the model, where the answer is to say which experts each token was sent to; None: it need not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedPart:
    """One server's answer to one request, or to the rest of it after an interruption, for logs and timelines.

    ServedPart(request_id="p41-v7-s2", url="http://127.0.0.1:30000", start=1763740000.2, end=1763740041.9,
    prompt_tokens=212, tokens=4096, weight_version=6, finish_reason=FinishReason.STOP)
    """

    request_id: str
    url: str
    start: float
    """Seconds since 1970; waiting for a free place is not counted."""
    end: float
    prompt_tokens: int
    """With the tokens that were there before an interruption."""
    tokens: int
    weight_version: int
    finish_reason: FinishReason
    cached_tokens: int | None = None
    """Of the prompt, found in the server's prefix cache; None: it does not say."""
    retractions: int | None = None
    """How often the response lost its place because the KV cache was full; None: it does not say."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Generation:
    """One response with the engine's log-probs.

    Two tokens of version 6, then, after a publish, the end of text of version 7: Generation(
    request_id="p41-v7-s2", token_ids=np.array([31, 8, 2], np.int32),
    log_probs=np.array([-0.7, -0.1, -1.2], np.float32), weight_versions=np.array([6, 6, 7], np.int32),
    finish_reason=FinishReason.STOP)
    """

    request_id: str
    token_ids: np.ndarray
    """int32 [C], a matched stop token included."""
    log_probs: np.ndarray
    """float32 [T], of the sampled tokens at the request's temperature."""
    weight_versions: np.ndarray
    """int32 [T], the version of the weights that drew each token."""
    finish_reason: FinishReason
    given: tuple[tuple[int, int], ...] = ()
    """Runs of `token_ids` that were given and not drawn, ascending: (first, tokens) each. C = T + their tokens."""
    routing: np.ndarray | None = None
    """uint8 [P + C - 1, layers, k]: the experts of each token of prompt and response but the last, of which nothing was
    predicted; fewer rows of a response that goes on. They are those of the weights that drew the token, unless its
    server was lost or had put it back into its queue when it was interrupted: then of those that read it next. None:
    not asked for, or none yet."""

    @property
    def drawn(self) -> int:
        """T: the response's length."""
        return len(self.log_probs)

    @property
    def drawn_ids(self) -> np.ndarray:
        """int32 [T]: `token_ids` without those that were given."""
        given = [np.arange(first, first + tokens) for first, tokens in self.given]
        return np.delete(self.token_ids, np.concatenate(given)) if given else self.token_ids

    def followed_by(self, rest: "Generation", given: Sequence[int] = ()) -> "Generation":
        """This, then `given` (K ids, not drawn), then the rest, which decides how it ends. Its prompt is what stands
        before it, and so its routing has all rows."""
        at = self.token_ids.size
        runs = [(at, len(given))] if given else []
        runs += [(at + len(given) + first, tokens) for first, tokens in rest.given]
        columns = ("log_probs", "weight_versions")
        joined: dict[str, Any] = {name: np.concatenate([getattr(self, name), getattr(rest, name)]) for name in columns}
        joined["routing"] = self.routing if rest.routing is None else rest.routing
        joined["token_ids"] = np.concatenate([self.token_ids, np.array(given, np.int32), rest.token_ids])
        return replace(self, **joined, given=(*self.given, *runs), finish_reason=rest.finish_reason)

    def cut(self, at: int) -> tuple["Generation", "Generation"]:
        """The tokens before place `at`, the end of the last run that was given, and those behind it; both with all rows
        of routing."""
        drawn = self.drawn - (self.token_ids.size - at)
        places = {"token_ids": at, "log_probs": drawn, "weight_versions": drawn}
        before = {name: getattr(self, name)[:place] for name, place in places.items()}
        behind = {name: getattr(self, name)[place:] for name, place in places.items()}
        return replace(self, **before), replace(self, **behind, given=())


def nothing_drawn(request_id: str) -> Generation:
    """A response before its first token."""
    nothing = np.zeros(0, np.int32)
    drawn: dict[str, Any] = {"token_ids": nothing, "log_probs": np.zeros(0, np.float32), "weight_versions": nothing}
    return Generation(request_id=request_id, finish_reason=FinishReason.ABORT, **drawn)
