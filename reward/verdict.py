"""What goes into a verdict and what comes out. Nothing here is imported from outside the standard library."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True, kw_only=True, slots=True)
class VerificationRequest:
    """One response to judge.

    Example: VerificationRequest(response="6 * 7 = 42\\n\\n**Answer:** $42$.", ground_truth="42") is right under
    `robust` and wrong under `exact`, whose regex reads `** $42$.`.
    """

    response: str
    """The generated text, without the prompt. May be truncated, empty, or hold lone surrogates."""

    ground_truth: str
    """The reference answer; for DAPO-Math-17k an integer."""

    prompt: str = ""
    """The prompt as the model saw it. `robust` uses it to tell an answer from a repetition of the question."""

    verifier: str = "robust"
    """A name of `reward.registry.VERIFIERS`, `module:function`, or a weighted sum of such."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """One response, judged. Example: Verdict(accuracy=True, extracted="42", rule="integer", seconds=1e-5)."""

    accuracy: bool
    """Equivalent to the ground truth: the only thing dynamic sampling may read. Eq. 7 makes +1 or -1 of it."""

    extracted: str | None
    """The answer the response states, None if it states none. At most `EXTRACTED_LIMIT` characters."""

    rule: str
    """Which rule decided, see `Rule`; other verifiers may name their own. When `error` is set: `Rule.UNJUDGED` or
    empty."""

    seconds: float
    """Time spent on this response alone, waiting in queues not counted."""

    error: str | None = None
    """None, or why there is no verdict: "timeout", "memory", "worker died (signal 11)", ... Then accuracy is False,
    unless only another reward of a weighted sum is without one, which the text then names."""

    rewards: dict[str, float] | None = None
    """Of a weighted sum: each verifier's reward, +1 or -1. Accuracy, extracted and rule are the first one's."""

    reward: float | None = None
    """Of a weighted sum: the sum. None: eq. 7 holds."""

    @property
    def unjudged(self) -> bool:
        """Whether the fault is not the response's: nobody could have had a verdict, so nothing may be learnt here."""
        return self.error is not None and self.rule == Rule.UNJUDGED


@dataclass(frozen=True, kw_only=True, slots=True)
class Judgement:
    """What a verifier returns: a verdict without its timing.

    Example: Judgement(accuracy=True, extracted="B", rule="choice")."""

    accuracy: bool
    extracted: str | None
    rule: str


_THOUGHT = re.compile(r"^[ \t]*<think>", re.MULTILINE)


def said(response: str) -> str:
    """Without a thought at its end that was cut off: it begins a line with `<think>` and is never closed."""
    begin = _THOUGHT.search(response, response.rfind("</think>") + 1)
    return response[: begin.start()] if begin else response


def fault_of(judged: object) -> str | None:
    """What is wrong with what a verifier of one's own returned; None: nothing."""
    match judged:
        case Judgement(accuracy=bool(), extracted=None | str(), rule=str()) | Deferred() | bool():
            return None
    wanted = "a Judgement (accuracy True or False, extracted a text or None, rule a text), nor a bool"
    return f"returned {judged!r:.100}, not {wanted}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Deferred:
    """A fast verifier's way to say that this response needs slow work: a symbolic comparison that may never end.

    The pool runs it by itself, under the wall-clock limit, in a process that may be killed.
    """

    answer: str
    """The response's answer, cleaned and known to fit the grammar of `reward.answer.symbolic`."""

    truth: str
    """The ground truth, cleaned."""

    extracted: str
    """What `Verdict.extracted` will say."""

    seconds: float = 0.0
    """Time spent so far; the pool sets it."""


Verifier = Callable[[VerificationRequest], Judgement | Deferred]
"""The one interface of all verifiers. One that is registered as fast must take linear time whatever the text holds."""

EXTRACTED_LIMIT = 200
"""Characters of the extracted answer that a verdict carries."""

TRUTH_LIMIT = 4096
"""Longest ground truth, in characters, that the verifiers of this package accept."""


class Rule(StrEnum):
    """Why a response is right or wrong, under `robust`."""

    NONE = "none"
    """Wrong: no `Answer:` line and no box with anything in it."""
    INTEGER = "integer"
    """Both are integers; right if equal."""
    NUMBER = "number"
    """Both are exact numbers (fraction, decimal, percentage, ...); right if equal."""
    TEXT = "text"
    """Equal as texts, up to case, spacing and LaTeX layout."""
    LIST = "list"
    """Compared item by item."""
    SYMBOLIC = "symbolic"
    """Compared by math-verify."""
    HEDGE = "hedge"
    """Wrong: several different answers where one was asked for."""
    PLACEHOLDER = "placeholder"
    """Wrong: the prompt's placeholder (`$Answer`, `N`) instead of an answer."""
    ECHO = "echo"
    """Wrong: an expression copied out of the question, not worked out."""
    EQUATION = "equation"
    """Wrong: an equation that still has to be solved for its unknown, as `2x = 42`, unless the question asks so."""
    UNREADABLE = "unreadable"
    """Wrong: differs from the ground truth, and is nothing that could be compared with it (prose, or too long)."""
    UNJUDGED = "unjudged"
    """No verdict, whatever the response: unusable ground truth, a verifier that cannot be loaded, a service away."""


class VerifierError(ValueError):
    """A request that no verifier could judge, whoever answered: unknown verifier, unusable ground truth. A verifier of
    your own may raise it too: its verdict is then `unjudged`, and a run stops instead of learning from it."""

    exit_code = 2


class LoadError(VerifierError):
    """Code that is named as `module:name` cannot be imported, or is not there. The message says why."""


def check_length(ground_truth: str) -> None:
    """Raises VerifierError: the ground truth is longer than `TRUTH_LIMIT`."""
    if len(ground_truth) > TRUTH_LIMIT:
        raise VerifierError(f"ground truth has {len(ground_truth)} characters; at most {TRUTH_LIMIT} can be compared")


class PoolError(RuntimeError):
    """The pool can give no verdicts: it is closed, or its workers do not start, or nothing moves any more."""

    exit_code = 1
