"""Prompt files -> tokenised prompts, with every row accounted for."""

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from megatron_dapo.config.data import DataConfig


class DataError(ValueError):
    """A prompt file that cannot be used. The message names the file, the line and the remedy."""


class Tokenizer(Protocol):
    """What is used of a Hugging Face tokenizer."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def apply_chat_template(self, conversation: list[dict[str, str]], **options: Any) -> Any: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One problem. Prompt(text="Tom has 3 ...", answer="7", ids=array([12, 5, ...]), place="train.jsonl:17")."""

    text: str
    """The prompt as the template made it; what the server gets."""
    answer: str
    """Ground truth for the verifier."""
    ids: np.ndarray
    """Token ids of `text`, int32 [P]."""
    place: str
    """File and line (parquet: row) that it came from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptSet:
    """The usable prompts of one file and what became of its other rows."""

    prompts: tuple[Prompt, ...]
    rows_read: int
    duplicates: int
    broken: int
    too_long: int
    content_hash: str
    """sha256 over the texts and answers in file order: equal files of prompts have equal hashes."""

    def summary(self) -> str:
        return (
            f"{self.rows_read} rows read, {len(self.prompts)} used, {self.duplicates} duplicates, "
            f"{self.broken} broken, {self.too_long} too long"
        )


def read_prompts(path: str | Path, config: DataConfig, tokenizer: Tokenizer, *, vocab_size: int) -> PromptSet:
    """The prompts of `path`, read by the keys and the template of `config`.

    Raises:
        DataError: no such file, unknown kind, no usable row, a broken row or a too long prompt (unless told to skip).
    """
    path = Path(path)
    prompts: list[Prompt] = []
    seen: set[str] = set()
    rows = duplicates = broken = too_long = 0
    for place, row in _rows(path):
        rows += 1
        try:
            raw, answer = _fields(row, config, place)
        except DataError:
            if config.broken_rows == "stop":
                raise
            broken += 1
            continue
        text, ids = _render_row(raw, config, tokenizer, place)
        if config.deduplicate and text in seen:
            duplicates += 1
            continue
        seen.add(text)
        if len(ids) > config.max_prompt_tokens:
            if config.too_long == "stop":
                raise DataError(
                    f"{place}: the prompt has {len(ids)} tokens, more than data.max_prompt_tokens = "
                    f"{config.max_prompt_tokens}; raise it (with model.context_length) or set data.too_long=drop"
                )
            too_long += 1
            continue
        if len(ids) == 0 or int(ids.max()) >= vocab_size:
            raise DataError(f"{place}: the tokenizer gives ids outside the model's vocabulary of {vocab_size}, or none")
        prompts.append(Prompt(text=text, answer=answer, ids=ids, place=place))
    if not prompts:
        raise DataError(f"{path}: no usable prompt ({rows} rows read, {broken} broken, {too_long} too long)")
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(json.dumps([prompt.text, prompt.answer]).encode())
    return PromptSet(
        prompts=tuple(prompts),
        rows_read=rows,
        duplicates=duplicates,
        broken=broken,
        too_long=too_long,
        content_hash=digest.hexdigest(),
    )


def _render_row(
    raw: str | list[dict[str, str]], config: DataConfig, tokenizer: Tokenizer, place: str
) -> tuple[str, np.ndarray]:
    try:
        return render(raw, config.template, tokenizer)
    except Exception as error:  # a chat template is a program of the model's author and may raise anything
        raise DataError(
            f"{place}: the tokenizer's chat template fails ({type(error).__name__}: {error}); "
            "set data.template to plain or to a text that holds {prompt}"
        ) from error


def render(raw: str | list[dict[str, str]], template: str, tokenizer: Tokenizer) -> tuple[str, np.ndarray]:
    """The text that the server gets and its ids, int32 [P]. A chat list goes through the chat template always."""
    if template == "chat" or isinstance(raw, list):
        messages = raw if isinstance(raw, list) else [{"role": "user", "content": raw}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    elif template == "plain":
        text = raw
    else:
        text = template.replace("{prompt}", raw)
    return text, np.asarray(tokenizer.encode(text, add_special_tokens=False), dtype=np.int32)


def check_file(path: str | Path) -> None:
    """Whether `path` can be a prompt file, without reading it.

    Raises:
        DataError: it is missing, unreadable, empty or of another kind.
    """
    path = Path(path)
    if not path.is_file():
        raise DataError(f"{path}: no such prompt file; set data.path (evaluation.path) to a .jsonl or .parquet file")
    if not os.access(path, os.R_OK):
        raise DataError(f"{path}: this user may not read it; change its permissions or name another file")
    if path.suffix not in (".parquet", ".jsonl", ".json"):
        raise DataError(f"{path}: unknown kind {path.suffix!r}; use .jsonl or .parquet")
    if path.stat().st_size == 0:
        raise DataError(f"{path}: no usable prompt, the file is empty")


def _rows(path: Path) -> Iterator[tuple[str, Any]]:
    """(place, row) of each row; a line that is no JSON comes as its DataError's text."""
    check_file(path)
    if path.suffix == ".parquet":
        import pyarrow.parquet

        at = 0
        try:
            for batch in pyarrow.parquet.ParquetFile(path).iter_batches():
                for row in batch.to_pylist():
                    at += 1
                    yield f"{path}: row {at}", row
        except pyarrow.ArrowException as error:
            raise DataError(f"{path}: damaged after row {at} ({error}); get the file anew") from None
    else:
        with path.open("rb") as lines:
            for at, line in enumerate(lines, start=1):
                if line.strip():
                    yield f"{path}:{at}", line


def _fields(row: Any, config: DataConfig, place: str) -> tuple[str | list[dict[str, str]], str]:
    if isinstance(row, bytes):
        try:
            row = json.loads(row)
        except ValueError as error:
            raise DataError(f"{place}: not valid JSON ({error}); mend it or set data.broken_rows=skip") from None
    prompt = _column(row, config.prompt_key, "data.prompt_key", place)
    answer = _column(row, config.answer_key, "data.answer_key", place)
    if isinstance(prompt, list):
        if not prompt or not all(isinstance(turn, dict) and {"role", "content"} <= turn.keys() for turn in prompt):
            raise DataError(f"{place}: {config.prompt_key} is no chat list of {{role, content}}")
    elif not isinstance(prompt, str) or not prompt.strip():
        raise DataError(f"{place}: {config.prompt_key} is empty or neither a text nor a chat list")
    if isinstance(answer, bool) or not isinstance(answer, str | int | float) or not str(answer).strip():
        raise DataError(f"{place}: {config.answer_key} = {answer!r}: expected a text or a number that is not empty")
    return prompt, str(answer)


def _column(row: Any, key: str, setting: str, place: str) -> Any:
    at = row
    for part in key.split("."):
        if not isinstance(at, dict) or part not in at:
            known = sorted(at) if isinstance(at, dict) else []
            near = get_close_matches(part, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(known) or 'no columns'}"
            raise DataError(f"{place}: no column {key!r} ({setting}); {hint}")
        at = at[part]
    return at


def prompt_at(position: int, count: int, seed: int) -> int:
    """Index of the prompt at `position` of the endless shuffled order: epoch after epoch, each a permutation of its
    own.

    Depends on the seed and the number of prompts only, so that a resumed run sees the same order.
    """
    epoch, at = divmod(position, count)
    return int(_permutation(count, seed, epoch)[at])


@lru_cache(maxsize=2)
def _permutation(count: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.Generator(np.random.PCG64([seed, epoch])).permutation(count)
