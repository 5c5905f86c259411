"""The run's tokenizer and the tokens that end a response, resolved once and checked; and token ids as text.

A byte-level tokenizer's text is the bytes of its tokens, one after the other: a column of an Arrow table from which
rows are taken, far less work than the tokenizer's own `decode`, and the same text.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow

from megatron_dapo.data.hub import read_json


class TokenizerError(ValueError):
    """A tokenizer that cannot be used. The message names the folder and the fix."""

    exit_code = 2


class Decoder(Protocol):
    """What is used of a Hugging Face tokenizer."""

    def decode(self, token_ids: np.ndarray, *, skip_special_tokens: bool) -> str: ...


@dataclass(frozen=True, kw_only=True)
class TextTools:
    """Tokenizer of the model and what follows from it."""

    tokenizer: Any
    """A Hugging Face tokenizer."""
    stop_token_ids: tuple[int, ...]
    """Tokens after which a response is complete."""
    vocab_size: int
    """Rows of the model's embedding: an id beyond would crash a server."""

    @cached_property
    def decoder(self) -> Decoder:
        """Turns responses into text."""
        return decoder_of(self.tokenizer)

    def ids_behind(self, said: str) -> list[int]:
        """Ids of a text that goes on behind tokens: without the space that SentencePiece puts before a first word."""
        behind = self._ids("\n" + said) if self._seam else []
        return behind[len(self._seam) :] if behind and behind[: len(self._seam)] == self._seam else self._ids(said)

    def _ids(self, said: str) -> list[int]:
        return list(self.tokenizer.encode(said, add_special_tokens=False))

    @cached_property
    def _seam(self) -> list[int]:
        """Ids of a line break, which stay as they are, where a first word gets a space; else none."""
        seam = self._ids("\n")
        return seam if self._ids("\na") != seam + self._ids("a") else []


def load_text_tools(folder: str | Path, stop_token_ids: Sequence[int] | None = None) -> TextTools:
    """Tokenizer, stop ids and vocabulary size of a model folder.

    Args:
        stop_token_ids: `model.stop_token_ids` of a run, whose tokenizer, generation_config.json and config.json must
            agree where it is empty; None: whatever any of them names ends a response.

    Raises:
        ConfigError: no model folder.
        TokenizerError: no tokenizer, no end token, or end tokens that contradict each other.
    """
    folder = Path(folder)
    vocab_size = read_json(folder / "config.json").get("vocab_size")
    if not isinstance(vocab_size, int):
        raise TokenizerError(f"{folder / 'config.json'}: vocab_size = {vocab_size!r}: expected a whole number")
    tokenizer = _load_tokenizer(folder)
    stops = _stop_ids(folder, tokenizer, stop_token_ids)
    if not stops:
        raise TokenizerError(f"model.path = {folder}: no file names an end token; model.stop_token_ids can name it")
    if beyond := [stop for stop in stops if not 0 <= stop < vocab_size]:
        raise TokenizerError(f"model.path = {folder}: end token {beyond[0]} is outside the vocabulary of {vocab_size}")
    return TextTools(tokenizer=tokenizer, stop_token_ids=stops, vocab_size=vocab_size)


def _load_tokenizer(folder: Path) -> Any:
    """tokenizer.json as it stands. AutoTokenizer, for a folder without one, takes a second longer to import, and may
    build another tokenizer than the file holds: it picks the class by the model's type."""
    try:
        if (folder / "tokenizer.json").is_file():
            from transformers import PreTrainedTokenizerFast as Loader
        else:
            from transformers import AutoTokenizer as Loader
        # With the length that the folder names, it warns of errors that no server makes.
        loaded = Loader.from_pretrained(str(folder), local_files_only=True, model_max_length=sys.maxsize)
        if len(loaded) < 3:  # transformers invents one where there is no file of a tokenizer
            raise ValueError("no tokenizer files there")
        return loaded
    except Exception as error:  # the libraries raise anything for a damaged file, bare Exception too
        raise TokenizerError(f"model.path = {folder}: its tokenizer cannot be loaded ({error!r})") from None


def _stop_ids(folder: Path, tokenizer: Any, told: Sequence[int] | None) -> tuple[int, ...]:
    """Once for the whole run: the servers are given these, and end at those of the two configs in any case."""
    own = () if tokenizer.eos_token_id is None else (int(tokenizer.eos_token_id),)
    model, generation = (_eos_ids(folder / name) for name in ("config.json", "generation_config.json"))
    if told:
        if missing := sorted({*model, *generation} - set(told)):
            raise TokenizerError(f"model.stop_token_ids = {list(told)}: SGLang ends a response also at {missing}")
        return tuple(dict.fromkeys(told))
    # The tokenizer's end token must be one of generation_config.json's, which may have more (the end of a turn and the
    # end of text); config.json counts where there is no such file, and may otherwise add nothing.
    engine = generation or model
    stray = bool(engine) and not set(own) <= set(engine)
    if told is not None and (stray or (generation and not set(model) <= {*generation, *own})):
        said = {"the tokenizer": own, "generation_config.json": generation, "config.json": model}
        ends = ", ".join(f"{_named(tokenizer, ids)} to {file}" for file, ids in said.items())
        remedy = "say which token ids end one in model.stop_token_ids, or correct the files"
        raise TokenizerError(f"model.path = {folder}: the end of a response is {ends}; {remedy}")
    return tuple(dict.fromkeys((*own, *generation, *model)))


def _named(tokenizer: Any, ids: Sequence[int]) -> str:
    return " and ".join(f"{one} {tokenizer.decode([one])!r}" for one in ids) or "unknown"


def _eos_ids(file: Path) -> tuple[int, ...]:
    named = read_json(file).get("eos_token_id") if file.is_file() else None
    listed = named if isinstance(named, list) else [] if named is None else [named]
    if not all(isinstance(stop, int) for stop in listed):
        raise TokenizerError(f"{file}: eos_token_id = {named}: expected token ids, which are whole numbers")
    return tuple(listed)


class ByteLevelDecoder:
    """`decode` by a table of every token's bytes."""

    def __init__(self, table: dict[int, bytes], special: frozenset[int]) -> None:
        texts = [table.get(number, b"") for number in range(max(table) + 1)]
        plain = [b"" if number in special else text for number, text in enumerate(texts)]
        self._all, self._plain = (pyarrow.array(each, pyarrow.binary()) for each in (texts, plain))

    def decode(self, token_ids: np.ndarray, *, skip_special_tokens: bool) -> str:
        """The text of int32 [T] ids, none of them negative.

        Ids outside the vocabulary have no text; bytes that are no UTF-8 become U+FFFD, as the tokenizer does it.
        """
        table = self._plain if skip_special_tokens else self._all
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
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    alphabet = {letter: byte for byte, letter in bytes_to_unicode().items()}
    # A token with a character outside the alphabet was added as text and stands for itself.
    table = {
        number: bytes(map(alphabet.__getitem__, text)) if set(text) <= alphabet.keys() else text.encode()
        for text, number in backend.get_vocab(with_added_tokens=True).items()
    }
    return ByteLevelDecoder(table, frozenset(each["id"] for each in described["added_tokens"] if each["special"]))
