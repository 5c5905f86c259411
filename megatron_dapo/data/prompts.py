"""Prompt files -> tokenised prompts, with every row accounted for."""

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_dapo.config.base import ConfigError
from megatron_dapo.config.data_config import DataConfig
from megatron_dapo.data.order import PromptOrder, Span
from megatron_dapo.data.records import Chat, DataError, PromptFile, Row, nearest, parse_row, raw_rows
from megatron_dapo.data.tokenizer import TextTools
from reward.check import check_ground_truth
from reward.config import RewardConfig
from reward.registry import find_named_by_data, load_named, stated_form, weighted
from reward.verdict import VerifierError

PROBED = 1000
"""Positions at which an order of the user's own is tried before a run."""


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
    environment: str | None = None
    """Name of the environment that answers its turns. None: there is one, which is judged."""
    chat: bool = False
    """Whether the tokenizer's chat template made `text`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptSet:
    """The usable prompts of one or more files and what became of the other rows."""

    prompts: tuple[Prompt, ...]
    spans: tuple[Span, ...]
    """Which prompts are whose, in order; what `order.PromptOrder` needs."""
    counts: Counter[str]
    """`rows` read; of them `duplicates`, `broken`, `too_long`. `contradictions`: those of the duplicates whose ground
    truth is another than that of the row that was kept."""
    content_hash: str
    """sha256 over the texts, answers and environments in file order, and the weights where there are several files:
    equal files of prompts have equal hashes."""
    ordered: str = "spaced"
    """`data.order`."""

    def order(self, seed: int) -> PromptOrder:
        """The endless order: ours, or what `ordered`, as `module:name`, makes of prompts and seed, with its `index_at`.

        Raises:
            ConfigError: it cannot be imported; or the first positions are no indices of prompts, or others if they
                are asked for again, as a resumed run does.
        """
        if self.ordered in ("spaced", "shuffled"):
            return PromptOrder(self.spans, seed, spaced=self.ordered == "spaced")
        name, count = self.ordered, len(self.prompts)
        try:
            order, other = (load_named(name)(self.prompts, seed) for _ in range(2))
            found = [order.index_at(position) for position in range(PROBED)]
            if found != [other.index_at(position) for position in reversed(range(PROBED))][::-1]:
                raise ValueError("a position has another prompt when it is asked again, not by its number alone")
            if wrong := [at for at, one in enumerate(found) if not (isinstance(one, int) and 0 <= one < count)]:
                raise ValueError(f"index_at({wrong[0]}) = {found[wrong[0]]!r} is no index of the {count} prompts")
        except Exception as error:  # a user's code may fail in any way
            raise ConfigError(f"data.order = {name}: {type(error).__name__}: {error}") from error
        return order

    def summary(self) -> str:
        if not self.spans:
            return "none (evaluation.path is not set)"
        verifiers, counts = Counter(prompt.verifier for prompt in self.prompts), self.counts
        judged = ", ".join(f"{count} by {name}" for name, count in sorted(verifiers.items()))
        against = f" ({counts['contradictions']} with another answer)" if counts["contradictions"] else ""
        read = f"{counts['rows']} rows read, {len(self.prompts)} used, {counts['duplicates']} duplicates{against}"
        return f"{read}, {counts['broken']} broken, {counts['too_long']} too long; judged: {judged}"


class VerifierChoice:
    """The verifier of each row, first that is given: the row's own, its file's, its source's, `reward.verifier`."""

    def __init__(self, reward: RewardConfig, files: tuple[PromptFile, ...]) -> None:
        self._reward = reward
        self._named = {reward.verifier, *reward.by_source.values()}
        self._named |= {file.verifier for file in files if file.verifier is not None}
        self._sources: set[str] = set()

    def of(self, row: Row, file: PromptFile, place: str) -> str:
        """The verifier's name.

        Raises:
            ConfigError: the row names one that is not known, or code that the config does not name.
            DataError: the verifier cannot use the row's ground truth.
        """
        self._sources.add(row.source)
        name = row.verifier or file.verifier or self._reward.by_source.get(row.source, self._reward.verifier)
        try:
            verifier = find_named_by_data(name, self._named)
        except VerifierError as error:
            raise ConfigError(f"{place} ({file.columns.verifier_key}): {error}") from None
        hint = "; an environment that ends every episode itself may have none" if file.columns.environment else ""
        if not file.columns.environment and any(part == "none" for _, part in weighted(name)):
            raise ConfigError(f"{place}: verifier none is for prompts with an environment that judges; set that too")
        if row.structured and verifier.fast:
            raise DataError(f"{place}: the ground truth is an object or a list; verifier {name!r} wants a text{hint}")
        try:
            check_ground_truth(name, row.answer)
        except VerifierError as error:
            raise DataError(f"{place}: {error}{hint}") from None
        return name

    def check_sources(self) -> None:
        """ConfigError if `reward.by_source` has a source that no row has."""
        for source in self._reward.by_source:
            if source not in self._sources:
                near = nearest(source, self._sources)
                raise ConfigError(f"reward.by_source.{source}: no prompt has this source; {near}")


def read_prompts(files: Sequence[PromptFile], config: DataConfig, choice: VerifierChoice, text: TextTools) -> PromptSet:
    """The prompts of `files`, put into the template of `config`.

    Raises:
        DataError: no such file, unknown kind, no usable row in a file, a broken row or a too long prompt (unless told
            to skip).
        ConfigError: a row names a verifier that it may not.
    """
    reading, spans = _Reading(config, choice, text), []
    for file in files:
        start, before = len(reading.prompts), reading.counts.copy()
        reading.read(file)
        count = len(reading.prompts) - start
        if count == 0:
            seen = reading.counts - before
            told = f"{seen['rows']} rows read, {seen['duplicates']} duplicates, {seen['broken']} broken"
            raise DataError(f"{file.path}: no usable prompt ({told}, {seen['too_long']} too long)")
        spans.append(Span(start=start, count=count, weight=file.weight))
    digest = hashlib.sha256()
    for prompt in reading.prompts:
        environment = [] if prompt.environment is None else [prompt.environment]
        digest.update(json.dumps([prompt.text, prompt.answer, *environment]).encode())
    if len(spans) > 1:
        digest.update(json.dumps([[span.count, span.weight] for span in spans]).encode())
    prompts, sha = tuple(reading.prompts), digest.hexdigest()
    return PromptSet(prompts=prompts, spans=tuple(spans), counts=reading.counts, content_hash=sha, ordered=config.order)


class _Reading:
    """What has been read so far."""

    def __init__(self, config: DataConfig, choice: VerifierChoice, text: TextTools) -> None:
        self.prompts: list[Prompt] = []
        self.counts: Counter[str] = Counter()
        self._config, self._choice, self._text = config, choice, text
        self._by_raw: dict[tuple[str, str], str] = {}
        """Ground truth of each prompt, as the files hold it."""
        self._by_text: dict[tuple[str, str], str] = {}
        """Ground truth of each prompt, as the template makes it."""

    def read(self, file: PromptFile) -> None:
        """Add the prompts of a file."""
        for place, record in raw_rows(file.path, file.setting):
            self.counts["rows"] += 1
            try:
                row = parse_row(record, file, place)
                verifier = self._choice.of(row, file, place)
            except DataError as error:
                if self._config.broken_rows == "stop":
                    raise DataError(f"{error}; data.broken_rows=skip leaves such rows out") from None
                self.counts["broken"] += 1
                continue
            # Before the tokenizer, which takes longer than all else: most rows of DAPO-Math-17k are copies.
            # Games differ by what is to be found.
            apart = f"{file.columns.environment} {row.answer}" if file.columns.environment else ""
            if self._is_copy((json.dumps(row.prompt), apart), row.answer, self._by_raw):
                continue
            raw = instructed(row.prompt, file.columns.instruction, verifier)
            try:
                text, ids = render(raw, self._config.template, self._text.tokenizer)
            except Exception as error:  # a chat template is a program of the model's author and may raise anything
                told = f"the tokenizer's chat template fails ({error!r}); set data.template to plain or to a text"
                raise DataError(f"{place}: {told} that holds {{prompt}}") from error
            if self._is_copy((text, apart), row.answer, self._by_text) or self._too_long(ids, place):
                continue
            if int(ids.max(initial=0)) >= (size := self._text.vocab_size) or len(ids) == 0:
                raise DataError(f"{place}: the tokenizer gives ids outside the model's vocabulary of {size}, or none")
            chat = self._config.template == "chat" or isinstance(raw, list)
            also: dict[str, Any] = {"source": row.source, "verifier": verifier, "environment": file.columns.environment}
            self.prompts.append(Prompt(text=text, answer=row.answer, ids=ids, place=place, chat=chat, **also))

    def _is_copy(self, prompt: tuple[str, str], answer: str, answers: dict[tuple[str, str], str]) -> bool:
        if not self._config.deduplicate:
            return False
        if prompt not in answers:
            answers[prompt] = answer
            return False
        self.counts["duplicates"] += 1
        self.counts["contradictions"] += answers[prompt] != answer
        return True

    def _too_long(self, ids: np.ndarray, place: str) -> bool:
        longest = self._config.max_prompt_tokens
        if longest is None or len(ids) <= longest:
            return False
        if self._config.too_long == "stop":
            told = f"the prompt has {len(ids)} tokens, more than data.max_prompt_tokens = {longest}"
            raise DataError(f"{place}: {told}; raise it (with model.context_length) or set data.too_long=drop")
        self.counts["too_long"] += 1
        return True


def instructed(raw: str | Chat, instruction: str | None, verifier: str) -> str | Chat:
    """The prompt with the instruction behind it, whose `{form}` becomes the form that the verifier reads.

    Raises:
        ConfigError: the verifier has no form.
    """
    if instruction is None:
        return raw
    form = stated_form(verifier)
    if form is None and "{form}" in instruction:
        raise ConfigError(f"instruction = {instruction!r}: verifier {verifier} has no {{form}}; say what it wants")
    added = "\n\n" + instruction.replace("{form}", (form or "").replace("{answer}", "ANSWER"))
    return raw + added if isinstance(raw, str) else [*raw[:-1], raw[-1] | {"content": raw[-1]["content"] + added}]


def render(raw: str | Chat, template: str, tokenizer: Any) -> tuple[str, np.ndarray]:
    """The text that the server gets and its ids, int32 [P]. A chat list goes through the chat template always.

    `tokenizer`: a Hugging Face one, or what has its `encode` and `apply_chat_template`.
    """
    if template == "chat" or isinstance(raw, list):
        messages = raw if isinstance(raw, list) else [{"role": "user", "content": raw}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    else:
        text = raw if template == "plain" else template.replace("{prompt}", raw)
    return text, np.asarray(tokenizer.encode(text, add_special_tokens=False), dtype=np.int32)
