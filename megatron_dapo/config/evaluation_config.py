"""Section `evaluation`: problems apart from the training prompts, answered by the servers."""

from pydantic.dataclasses import dataclass

from megatron_dapo.config.base import STRICT, Fraction, NonNegativeFloat, NonNegativeInt, PositiveInt, Text
from megatron_dapo.config.data_config import ColumnsConfig, Schema


@dataclass(frozen=True, kw_only=True, config=STRICT)
class EvaluationConfig(ColumnsConfig):
    path: str
    """File of held-out problems, put into the template of section `data`."""

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
    """Also measure, before training, the base model when responses may not begin with this text's first token (printed
    as "made to work")."""
