"""A response put together from what one server after the other has drawn of it."""

import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from rollout.errors import ServerRefused, ServerUnavailable
from rollout.fleet.balancer import Member
from rollout.generation import FinishReason, Generation, GenerationRequest, SamplingParams, ServedPart
from rollout.wire.reply import Reply, check_reply

KEPT_BACK = 8
"""SGLang leaves a few tokens of its context empty (2 in 0.5.17): by so much may a longest prompt's response be cut."""


class Drawn(NamedTuple):
    """What became of one call to a server."""

    reply: Reply | None
    """None if the server failed."""
    version: int
    """Of the weights."""
    interrupted: bool
    """Whether an abort was a publish's."""
    member: Member
    problem: str
    """Why it is not the whole rest."""


def check_usable(reply: Reply, asked: int, vocab_size: int, url: str) -> None:
    """
    Args:
        asked: tokens that the server was asked for at most.

    Raises:
        ServerUnavailable: as `rollout.wire.reply.check_reply`.
        ServerRefused: the server has no room for as many tokens as it was asked for.
    """
    try:
        check_reply(reply, asked=asked, vocab_size=vocab_size)
    except ValueError as error:
        raise ServerUnavailable(f"{url}/generate: cannot use the answer: {error}") from None
    if reply.finish_reason is FinishReason.LENGTH and reply.token_ids.size < asked - KEPT_BACK:
        raise ServerRefused(
            f"{url}: cut a response off at {reply.token_ids.size} tokens of {asked}: its context or KV cache holds no "
            "more, and all longer responses would count as truncated; raise model.context_length, "
            "rollout.memory_fraction or rollout.kv_cache_tokens, or lower rollout.max_new_tokens"
        )


def served(
    request: GenerationRequest, url: str, prompt: np.ndarray, reply: Reply, version: int, start: float
) -> ServedPart:
    """What is told to whoever watches; it ended now."""
    return ServedPart(
        request_id=request.request_id,
        url=url,
        start=start,
        end=time.time(),
        prompt_tokens=prompt.size,
        tokens=reply.token_ids.size,
        weight_version=version,
        finish_reason=reply.finish_reason,
    )


def ended(sampling: SamplingParams, reply: Reply) -> bool:
    """Whether an aborted response had come to its end: a server that is told to abort between two tokens looks at the
    abort alone, not at whether the last token is a stop token. What it would draw after that belongs to no response."""
    return reply.token_ids.size > 0 and int(reply.token_ids[-1]) in sampling.stop_token_ids


def nothing_more() -> Reply:
    """The end of a response that is as long as can be."""
    ids, log_probs = np.zeros(0, np.int32), np.zeros(0, np.float32)
    return Reply(token_ids=ids, log_probs=log_probs, finish_reason=FinishReason.LENGTH, weight_label=None)


def join(request: GenerationRequest, parts: Sequence[tuple[Reply, int]]) -> Generation:
    """The whole response: at least one part, each with the weight version that drew it."""
    last, tokens = parts[-1][0].finish_reason, sum(part.token_ids.size for part, _ in parts)
    if last is FinishReason.ABORT:  # the limit goes first, as in a server
        last = FinishReason.LENGTH if tokens >= request.sampling.max_new_tokens else FinishReason.STOP
    return Generation(
        request_id=request.request_id,
        token_ids=np.concatenate([part.token_ids for part, _ in parts]),
        log_probs=np.concatenate([part.log_probs for part, _ in parts]),
        weight_versions=np.concatenate([np.full(part.token_ids.size, version, np.int32) for part, version in parts]),
        finish_reason=last,
    )
