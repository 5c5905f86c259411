"""Sections `data` and `evaluation`: the files of prompts and of held-out problems, and how they are used."""

from functools import partial
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, NonNegativeFloat, NonNegativeInt, PositiveInt
from pydantic.dataclasses import dataclass

from megatron_dapo.config.base import STRICT, Fraction, Text
from reward.config import EnvironmentName, VerifierName
from reward.registry import check_name

Schema = Literal["columns", "dapo", "gsm8k"]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ColumnsConfig:
    prompt_key: Text | None = None
    """Column of the prompt: a text, or a chat list of {role, content}. Dots reach into objects. None: the schema's."""

    answer_key: Text | None = None
    """Column of the ground truth. None: the schema's."""

    answer_after: Text | None = None
    """The ground truth is what follows the last such mark in the column, as `####` in GSM8K. A row without the mark is
    broken. None: the schema's."""

    source_key: Text | None = None
    """Column that names the row's source for `reward.by_source`. None: the schema's, or the file's name without its
    ending."""

    verifier_key: Text | None = None
    """Column that names the row's verifier: a built-in one, or one that the config names too; empty: the config's.
    None: no such column."""

    environment: EnvironmentName | None = None
    """What answers each turn of the model, as `module:function` (docs/environments.md). None: as in `data`; there: a
    prompt has one answer."""

    instruction: Text | None = None
    """Text behind each prompt (a chat's last turn), as `End with a line {form}`; `{form}` becomes what the
    row's verifier reads: `#### ANSWER` for `robust:#### {answer}`. None: as in `data`; there: nothing."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SourceConfig(ColumnsConfig):
    path: Text
    """As `data.path`."""

    weight: Annotated[float, Field(ge=1e-9, le=1e9)] = 1.0
    """Share of the prompts drawn from this file, against the other weights."""

    name: Text | None = None
    """Source of the rows that name none. None: the file's name without its ending."""

    verifier: VerifierName | None = None
    """Verifier of the rows that name none. None: `reward.by_source`, then `reward.verifier`."""

    schema: Schema | None = None
    """As `data.schema`. None: this file is read as section `data` says, but for the keys given here."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DataConfig(ColumnsConfig):
    """Section `data`: the prompts and the text that carries them."""

    path: Text | None = None
    """Prompt file (.jsonl, .json, .csv, .parquet, .arrow), shards as `train-*.parquet`, the folder of a dataset saved
    by Hugging Face's `save_to_disk`, or `hf://datasets/OWNER/NAME/FILE`. None: `mixture`."""

    mixture: Annotated[tuple[SourceConfig, ...], Field(strict=False)] = ()
    """Several prompt files instead of `path`: a list of {path, weight, name, verifier, schema, and the keys above}."""

    schema: Schema = "columns"
    """Which columns hold what, for each key that is none. `columns`: `prompt`, `answer`. `dapo`: `prompt`,
    `reward_model.ground_truth`, source in `data_source`. `gsm8k`: `question`, and in `answer` what follows `####`."""

    template: Annotated[str, Field(pattern=r"\{prompt\}")] | Literal["chat", "plain"] = "chat"
    """`chat`: the tokenizer's chat template. `plain`: the prompt as it is. Else a text that holds `{prompt}`."""

    observation_template: Annotated[str, Field(pattern=r"\{observation\}")] | None = None
    """Text between two turns, with `{observation}`. None: the chat template's; without one the observation alone."""

    max_prompt_tokens: PositiveInt | None = None
    """Longer prompts are handled by `too_long`. Counted after the template. None: what `model.context_length` leaves
    beside `rollout.max_new_tokens`."""

    too_long: Literal["stop", "drop"] = "stop"
    """A prompt over `max_prompt_tokens`: `stop` and name it, or `drop` and count it."""

    broken_rows: Literal["stop", "skip"] = "stop"
    """A row that is no JSON, lacks a key, or has an unusable ground truth: `stop` and name file and line, or `skip` and
    count it."""

    order: Annotated[str, AfterValidator(partial(check_name, table=("spaced", "shuffled")))] = "spaced"
    """By `run.seed` and the weights. `spaced`: no prompt again within a quarter of its file. `shuffled`: independent
    epochs. `module:name`: your own (docs/extending.md)."""

    deduplicate: bool = True
    """Keep one row a prompt text (with an environment: and ground truth), over all files."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class EvaluationConfig(ColumnsConfig):
    """Section `evaluation`: problems apart from the training prompts, answered by the servers."""

    path: Text | None = None
    """File of held-out problems, put into the template of section `data`. None: nothing is held out."""

    schema: Schema | None = None
    """As `data.schema`. None: the file is read as section `data` says, but for the keys given here."""

    every: NonNegativeInt = 0
    """Rollout steps between evaluations; 0: only before the first and after the last step."""

    limit: NonNegativeInt = 0
    """Use the first so many problems; 0: all."""

    samples: PositiveInt = 32
    """Responses a problem for the sampled accuracy (avg@k); the paper has 32."""

    temperature: NonNegativeFloat = 1.0
    """Temperature of the sampled accuracy."""

    top_p: Fraction = 0.7
    """Nucleus of the sampled accuracy."""

    greedy: bool = True
    """Measure greedy accuracy too."""

    forbidden_start: Text | None = None
    """Also measure the base model with responses that may not begin with this text's first token ("no guessing")."""
