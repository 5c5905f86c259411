"""Responses that are written down beforehand, at full size, without a model: who asks can check every token.

Token 0 of a response names its tag t, drawn by the server; prompt and tag decide length, rightness and all other
tokens. So a response can go on at another server, and a token that is lost, doubled or another's is seen. Tokens and
log-probs are slices of one stream that is kept as JSON: a server sends megabytes without computing them.
"""

import random
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from rollout.generation import FinishReason, Generation

END, RIGHT, WRONG = 2, 3, 4
TAGS = 1 << 16
FIRST_TAG, FIRST_WORD, WORDS = 1000, 80_000, 50_000
VOCABULARY = FIRST_WORD + WORDS
PROMPT_TOKENS = 128


@dataclass(frozen=True, kw_only=True)
class Script:
    """What every server of a run plays.

    Prompts are always solved, never solved, or solved with a chance of their own, uniform in (0.1, 0.9). Lengths are
    lognormal over the responses and longer for harder prompts.
    """

    max_new_tokens: int = 20480
    median_tokens: int = 2800
    """Of a prompt that is solved half of the time."""
    spread: float = 0.9
    """Standard deviation of the logarithm of the length, within a prompt."""
    always: float = 0.12
    never: float = 0.14
    """Shares of the prompts; with G = 16 a few of the others come out all right or all wrong by chance."""
    seed: int = 0

    def chance(self, prompt: int) -> float:
        """Share of right responses of the prompt."""
        place = random.Random(f"{self.seed}/{prompt}").random()
        if place < self.always + self.never:
            return float(place < self.always)
        return 0.1 + 0.8 * (place - self.always - self.never) / (1 - self.always - self.never)

    def response(self, prompt: int, tag: int) -> tuple[int, bool]:
        """Length in tokens, and whether it ends in the right answer; a truncated one never does."""
        draw = random.Random(f"{self.seed}/{prompt}/{tag}")
        chance = self.chance(prompt)
        median = self.median_tokens * 2 ** (1 - 2 * chance)
        length = max(4, int(median * draw.lognormvariate(0, self.spread)))
        right = draw.random() < chance
        return (length, right) if length <= self.max_new_tokens else (self.max_new_tokens, False)

    def tokens(self, prompt: int, tag: int) -> tuple[np.ndarray, np.ndarray]:
        """The whole response: int32 [T] ids and float32 [T] log-probs."""
        length, _ = self.response(prompt, tag)
        return self.arrays(prompt, tag, 0, length)

    def arrays(self, prompt: int, tag: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens start..stop of the response: int32 [T] ids and float32 [T] log-probs."""
        entries = [np.array(part, np.float64) for part in self._parts(prompt, tag, start, stop, numbers=True)]
        rows = np.concatenate([np.zeros((0, 2)), *(entry.reshape(-1, 2) for entry in entries)])
        return rows[:, 1].astype(np.int32), rows[:, 0].astype(np.float32)

    def body(self, prompt: int, tag: int, start: int, stop: int) -> tuple[bytes, bytes]:
        """Tokens start..stop of the response as JSON: `output_token_logprobs` and `output_ids`, without brackets."""
        parts = self._parts(prompt, tag, start, stop, numbers=False)
        return b",".join(part[0] for part in parts), b",".join(part[1] for part in parts)

    def _parts(self, prompt: int, tag: int, start: int, stop: int, *, numbers: bool) -> list:
        length, right = self.response(prompt, tag)
        ends = length if length == self.max_new_tokens else length - 2
        words = stream()
        parts: list = []
        if start == 0 < stop:
            parts.append(words.single(FIRST_TAG + tag, numbers))
        if max(start, 1) < min(stop, ends):
            parts.append(words.slice(tag + max(start, 1), tag + min(stop, ends), numbers))
        for at, token in ((length - 2, RIGHT if right else WRONG), (length - 1, END)):
            if ends < length and start <= at < stop:
                parts.append(words.single(token, numbers))
        return parts


def prompt_ids(prompt: int) -> np.ndarray:
    """int32 [128]; the first two tell the prompt."""
    ids = np.arange(FIRST_WORD, FIRST_WORD + PROMPT_TOKENS, dtype=np.int32)
    ids[:2] = FIRST_WORD + prompt // WORDS, FIRST_WORD + prompt % WORDS
    return ids


def prompt_of(ids: list[int]) -> int:
    """Undoes `prompt_ids`."""
    return (ids[0] - FIRST_WORD) * WORDS + ids[1] - FIRST_WORD


def check_generation(script: Script, prompt: int, generation: Generation) -> None:
    """Every token and log-prob stands where the script has it, once."""
    tag = int(generation.token_ids[0]) - FIRST_TAG
    ids, log_probs = script.tokens(prompt, tag)
    np.testing.assert_array_equal(generation.token_ids, ids)
    np.testing.assert_array_equal(generation.log_probs, log_probs)
    assert (generation.finish_reason is FinishReason.LENGTH) == (ids.size == script.max_new_tokens)


class _Stream:
    """A ring of words with log-probs, as numbers and as JSON with the digits that SGLang sends."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        size = TAGS + 32768
        self.ids = rng.integers(FIRST_WORD, VOCABULARY, size)
        self.log_probs = (-rng.exponential(0.4, size)).astype(np.float32).astype(np.float64)
        entries = [f"[{a!r},{b},null]" for a, b in zip(self.log_probs.tolist(), self.ids.tolist(), strict=True)]
        words = [str(token) for token in self.ids.tolist()]
        self._entries, self._entry_at = _joined(entries)
        self._words, self._word_at = _joined(words)

    def slice(self, start: int, stop: int, numbers: bool) -> object:
        if numbers:
            return np.stack([self.log_probs[start:stop], self.ids[start:stop]], 1)
        return (
            self._entries[self._entry_at[start] : self._entry_at[stop] - 1],
            self._words[self._word_at[start] : self._word_at[stop] - 1],
        )

    def single(self, token: int, numbers: bool) -> object:
        return [[-0.5, token]] if numbers else (f"[-0.5,{token},null]".encode(), str(token).encode())


def _joined(texts: list[str]) -> tuple[bytes, list[int]]:
    """The texts with a comma after each, and where each begins."""
    starts = np.cumsum([0, *(len(text) + 1 for text in texts)])
    return (",".join(texts) + ",").encode(), starts.tolist()


@lru_cache(maxsize=1)
def stream() -> _Stream:
    """The one stream of a process."""
    return _Stream()
