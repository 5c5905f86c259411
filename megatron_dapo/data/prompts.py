"""Prompt files -> tokenised prompts, with every row accounted for."""

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from megatron_dapo.config.data_config import DataConfig
from megatron_dapo.data.field_mapping import PromptFile
from megatron_dapo.data.order import Span
from megatron_dapo.data.records import DataError, Row, parse_row, raw_rows
from megatron_dapo.data.sample_verifiers import VerifierChoice


class Tokenizer(Protocol):
    """What is used of a Hugging Face tokenizer."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def apply_chat_template(self, conversation: list[dict[str, str]], **options: Any) -> Any: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One problem. Prompt(text="Tom has 3 ...", answer="7", ids=array([12, 5, ...]), place="train.jsonl:17",
    source="train", verifier="robust")."""

    text: str
    """The prompt as the template made it; what the server gets."""
    answer: str
    """Ground truth for the verifier."""
    ids: np.ndarray
    """Token ids of `text`, int32 [P]."""
    place: str
    """File and line (parquet: row) that it came from."""
    source: str
    """Data source: what the row says, or else the file's name."""
    verifier: str
    """Name of the verifier that judges its responses."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptSet:
    """The usable prompts of one or more files and what became of the other rows."""

    prompts: tuple[Prompt, ...]
    spans: tuple[Span, ...]
    """Which prompts are whose, in order; what `order.PromptOrder` needs."""
    rows_read: int
    duplicates: int
    contradictions: int
    """Those of the duplicates whose ground truth is another than that of the row that was kept."""
    broken: int
    too_long: int
    content_hash: str
    """sha256 over the texts and answers in file order, and the weights where there are several files: equal files of
    prompts have equal hashes."""

    def summary(self) -> str:
        verifiers = Counter(prompt.verifier for prompt in self.prompts)
        judged = ", ".join(f"{count} by {name}" for name, count in sorted(verifiers.items()))
        against = f" ({self.contradictions} with another answer)" if self.contradictions else ""
        return (
            f"{self.rows_read} rows read, {len(self.prompts)} used, {self.duplicates} duplicates{against}, "
            f"{self.broken} broken, {self.too_long} too long; judged: {judged}"
        )


def read_prompts(
    files: Sequence[PromptFile], config: DataConfig, choice: VerifierChoice, tokenizer: Tokenizer, *, vocab_size: int
) -> PromptSet:
    """The prompts of `files`, put into the template of `config`.

    Raises:
        DataError: no such file, unknown kind, no usable row in a file, an unknown verifier, a broken row or a too long
            prompt (unless told to skip).
    """
    gathered = _Gathered()
    spans = []
    for file in files:
        start, before = len(gathered.prompts), gathered.counts.copy()
        _read_file(file, config, choice, tokenizer, vocab_size, gathered)
        count = len(gathered.prompts) - start
        if count == 0:
            seen = gathered.counts - before
            raise DataError(
                f"{file.path}: no usable prompt ({seen['rows']} rows read, {seen['duplicates']} duplicates, "
                f"{seen['broken']} broken, {seen['too_long']} too long)"
            )
        spans.append(Span(name=file.name, start=start, count=count, weight=file.weight))
    digest = hashlib.sha256()
    for prompt in gathered.prompts:
        digest.update(json.dumps([prompt.text, prompt.answer]).encode())
    if len(spans) > 1:
        digest.update(json.dumps([[span.count, span.weight] for span in spans]).encode())
    return PromptSet(
        prompts=tuple(gathered.prompts),
        spans=tuple(spans),
        rows_read=gathered.counts["rows"],
        duplicates=gathered.counts["duplicates"],
        contradictions=gathered.counts["contradictions"],
        broken=gathered.counts["broken"],
        too_long=gathered.counts["too_long"],
        content_hash=digest.hexdigest(),
    )


@dataclass(kw_only=True)
class _Gathered:
    """What has been read so far."""

    prompts: list[Prompt] = field(default_factory=list)
    raw: dict[str, str] = field(default_factory=dict)
    """Ground truth of each prompt, as the files hold it."""
    texts: dict[str, str] = field(default_factory=dict)
    """Ground truth of each prompt, as the template makes it."""
    counts: Counter[str] = field(default_factory=Counter)


def _read_file(
    file: PromptFile,
    config: DataConfig,
    choice: VerifierChoice,
    tokenizer: Tokenizer,
    vocab_size: int,
    gathered: _Gathered,
) -> None:
    counts = gathered.counts
    for place, record in raw_rows(file.path, file.setting):
        counts["rows"] += 1
        try:
            row = parse_row(record, file, place)
        except DataError:
            if config.broken_rows == "stop":
                raise
            counts["broken"] += 1
            continue
        verifier = choice.of(row, file, place)  # an unknown one is a wrong setting, which no skipping fixes
        try:
            choice.check(row, verifier, place)
        except DataError:
            if config.broken_rows == "stop":
                raise
            counts["broken"] += 1
            continue
        raw = row.prompt if isinstance(row.prompt, str) else json.dumps(row.prompt)
        if config.deduplicate and _is_copy(raw, row.answer, gathered.raw, counts):
            continue  # before the tokenizer, which takes longer than all else: most rows of DAPO-Math-17k are copies
        text, ids = _render_row(row, config, tokenizer, place)
        if config.deduplicate and _is_copy(text, row.answer, gathered.texts, counts):
            continue
        if _too_long(ids, config, place):
            counts["too_long"] += 1
            continue
        if len(ids) == 0 or int(ids.max()) >= vocab_size:
            raise DataError(f"{place}: the tokenizer gives ids outside the model's vocabulary of {vocab_size}, or none")
        gathered.prompts.append(
            Prompt(text=text, answer=row.answer, ids=ids, place=place, source=row.source, verifier=verifier)
        )


def _is_copy(prompt: str, answer: str, answers: dict[str, str], counts: Counter[str]) -> bool:
    if prompt not in answers:
        answers[prompt] = answer
        return False
    counts["duplicates"] += 1
    counts["contradictions"] += answers[prompt] != answer
    return True


def _too_long(ids: np.ndarray, config: DataConfig, place: str) -> bool:
    if len(ids) <= config.max_prompt_tokens:
        return False
    if config.too_long == "stop":
        raise DataError(
            f"{place}: the prompt has {len(ids)} tokens, more than data.max_prompt_tokens = "
            f"{config.max_prompt_tokens}; raise it (with model.context_length) or set data.too_long=drop"
        )
    return True


def _render_row(row: Row, config: DataConfig, tokenizer: Tokenizer, place: str) -> tuple[str, np.ndarray]:
    try:
        return render(row.prompt, config.template, tokenizer)
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
