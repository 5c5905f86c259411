"""What a server answers to /generate, from JSON to arrays.

At the paper's size a rollout step brings some 10^8 numbers. They never become one long-lived Python object each.
"""

from dataclasses import dataclass

import msgspec
import numpy as np
import orjson

from rollout.generation import FinishReason

_ROUNDING = 1e-3
"""Nats by which the log-prob of a certain token may come out above 0."""

_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORT}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Reply:
    """What one call of /generate drew; partial if `finish_reason` is ABORT."""

    token_ids: np.ndarray
    """int32 [T]"""
    log_probs: np.ndarray
    """float32 [T]"""
    finish_reason: FinishReason
    weight_label: str | None
    """The server's name of its weights when it answered."""
    total: int | None = None
    """Tokens of the whole response up to here, as the server counts them; None: it does not say."""


class _Token(msgspec.Struct, array_like=True, gc=False):
    """One entry [log_prob, id, text] of `output_token_logprobs`.

    Untracked by the garbage collector, which would otherwise run hundreds of times over one long response.
    """

    log_prob: float
    id: int


class Finish(msgspec.Struct, omit_defaults=True):
    """Why a response ended, as SGLang writes it."""

    type: str
    matched: int | str | None = None
    """The stop token's id. A text only where SGLang drew no token at all: its logits were not numbers."""
    status_code: int | None = None
    """Of an abort that is the server's own, as an HTTP status: 400 for what it cannot bear, 500 and 503 for want of
    memory or room."""
    message: str | None = None


class StreamedError(Exception):
    """What a server answers in the place of a segment: an error, its HTTP status notwithstanding."""

    def __init__(self, status: int, words: str) -> None:
        super().__init__(words)
        self.status = status


class _Meta(msgspec.Struct):
    """The two fields that every version sends are `finish_reason` and `output_token_logprobs`; all else is optional."""

    finish_reason: Finish | None
    """None in a segment of a stream that is not the last one."""
    output_token_logprobs: list[_Token] | None = None
    weight_version: str | int | None = None
    completion_tokens: int | None = None


class _Answer(msgspec.Struct):
    meta_info: _Meta
    output_ids: msgspec.Raw = msgspec.Raw(b"null")
    """Left as it is: in nearly all cases its bytes are those of the ids among the log-probs."""


_ANSWER = msgspec.json.Decoder(_Answer)


def read_part(content: bytes) -> tuple[Reply, bool]:
    """(what was drawn, whether that is the end); where it is not, the finish reason is ABORT.

    Straight into arrays; what stands between is freed at once.

    Raises:
        StreamedError: the server ended the request because it failed.
        ValueError, KeyError: not an answer of /generate, or one that contradicts itself.
    """
    answer = _ANSWER.decode(content)
    meta = answer.meta_info
    aborted = meta.finish_reason is None or meta.finish_reason.type == "abort"
    drawn = meta.output_token_logprobs
    if drawn is None:
        # A request that is aborted before its first token has no log-probs at all.
        if not aborted:
            raise KeyError("output_token_logprobs")
        drawn = []
    ids = np.fromiter([token.id for token in drawn], np.int32, len(drawn))
    if not aborted and not _says(answer.output_ids, ids):
        raise ValueError("output_ids and output_token_logprobs disagree")
    with np.errstate(over="ignore"):  # `check_reply` refuses what is infinite
        log_probs = np.fromiter([token.log_prob for token in drawn], np.float32, len(drawn))
    return reply_of(ids, log_probs, meta.finish_reason, meta.weight_version, meta.completion_tokens)


def reply_of(
    ids: np.ndarray, log_probs: np.ndarray, finish: Finish | None, version: str | int | None, total: int | None
) -> tuple[Reply, bool]:
    """(what was drawn, whether that is the end).

    Args:
        ids: int32 [T]
        log_probs: float32 [T]
        finish: None where the response goes on.
        version: the server's name of its weights.
        total: tokens of the whole response up to here.

    Raises:
        StreamedError: the server ended the request because it failed.
        ValueError, KeyError: a reason that is unknown, or that no request of ours can have.
    """
    if finish is not None and finish.status_code is not None:
        raise StreamedError(finish.status_code, finish.message or "aborted")
    if finish is not None and isinstance(finish.matched, str):  # no request of ours names a text to stop at
        raise ValueError(f"the response was ended by {finish.matched!r}")
    reason = FinishReason.ABORT if finish is None else _REASONS[finish.type]
    label = None if version is None else str(version)
    reply = Reply(token_ids=ids, log_probs=log_probs, finish_reason=reason, weight_label=label, total=total)
    return reply, finish is not None


def check_reply(reply: Reply, *, asked: int, vocab_size: int) -> None:
    """What the servers and the trainer that read the tokens next could not bear.

    Args:
        asked: tokens that were asked for at most.
        vocab_size: rows of the model's embedding.

    Raises:
        ValueError: tokens outside the vocabulary, more than were asked for, none at all in a response that is said to
            be complete, or log-probs that no probability has.
    """
    ids, log_probs = reply.token_ids, reply.log_probs
    if ids.size > asked:
        raise ValueError(f"{ids.size} tokens where {asked} were asked for")
    if ids.size == 0 and reply.finish_reason is not FinishReason.ABORT:
        raise ValueError(f"no token, and yet ended by {reply.finish_reason.value!r}")
    if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        raise ValueError(f"token ids {ids.min()} .. {ids.max()}, with a vocabulary of {vocab_size}")
    if not (np.isfinite(log_probs) & (log_probs <= _ROUNDING)).all():
        raise ValueError("log-probs that are not finite, or above 0")


def _says(output_ids: msgspec.Raw, ids: np.ndarray) -> bool:
    """Whether the JSON is these ids, or null."""
    written = bytes(output_ids)
    if written in (b"null", orjson.dumps(ids, option=orjson.OPT_SERIALIZE_NUMPY)):
        return True
    return bool(msgspec.json.decode(written, type=list[int]) == ids.tolist())  # spaces between the ids, say
