"""Token ids -> text, for the millions of tokens of a rollout step.

A byte-level tokenizer's text is the bytes of its tokens, one after the other: a column of an Arrow table from which
rows are taken, far less work than the tokenizer's own `decode`, and the same text.
"""

import json
from typing import Any, Protocol

import numpy as np
import pyarrow


class Decoder(Protocol):
    """What is used of a Hugging Face tokenizer."""

    def decode(self, token_ids: np.ndarray, *, skip_special_tokens: bool) -> str: ...


class ByteLevelDecoder:
    """`decode` by a table of every token's bytes."""

    def __init__(self, table: dict[int, bytes], special: frozenset[int]) -> None:
        texts = [table.get(number, b"") for number in range(max(table) + 1)]
        self._all = pyarrow.array(texts, pyarrow.binary())
        plain = [b"" if number in special else text for number, text in enumerate(texts)]
        self._plain = pyarrow.array(plain, pyarrow.binary())

    def decode(self, token_ids: np.ndarray, *, skip_special_tokens: bool) -> str:
        """The text of int32 [T] ids, none of them negative.

        Ids outside the vocabulary have no text; bytes that are no UTF-8 become U+FFFD, as the tokenizer does it.
        """
        table = self._plain if skip_special_tokens else self._all
        try:
            taken = table.take(pyarrow.array(token_ids))
        except IndexError:
            taken = table.take(pyarrow.array(token_ids[token_ids < len(table)]))
        _, _, joined = taken.buffers()  # the bytes of all rows, without gaps
        return str(joined, "utf-8", "replace")


def decoder_of(tokenizer: Any) -> Decoder:
    """The table where the tokenizer is byte-level and changes nothing afterwards, else the tokenizer itself."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or tokenizer.clean_up_tokenization_spaces:
        return tokenizer
    described = json.loads(backend.to_str())
    if (described["decoder"] or {}).get("type") != "ByteLevel":
        return tokenizer
    alphabet = _alphabet()
    table = {number: _bytes(text, alphabet) for text, number in backend.get_vocab(with_added_tokens=True).items()}
    return ByteLevelDecoder(table, frozenset(each["id"] for each in described["added_tokens"] if each["special"]))


def _bytes(token: str, alphabet: dict[str, int]) -> bytes:
    """A token with a character outside the alphabet was added as text and stands for itself."""
    try:
        return bytes(alphabet[character] for character in token)
    except KeyError:
        return token.encode()


def _alphabet() -> dict[str, int]:
    """Byte-level BPE's spelling of the 256 bytes: printable Latin-1 as itself, the others from U+0100 on, in order."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}
