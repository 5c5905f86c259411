"""What every config section shares: a frozen, strict, documented dataclass and one kind of error."""

from typing import Annotated

from pydantic import ConfigDict, Field

STRICT = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True, allow_inf_nan=False)

# YAML has lists, not tuples: only the container is converted, its items stay strictly typed.
DecayRate = Annotated[float, Field(ge=0, lt=1)]
DecayRates = Annotated[tuple[DecayRate, DecayRate], Field(strict=False)]
# No path may hold a NUL, and no other text needs one.
Text = Annotated[str, Field(min_length=1, pattern=r"^[^\x00]*$")]
Fraction = Annotated[float, Field(gt=0, le=1)]


class ConfigError(ValueError):
    """A config that must not run. The message names the file and line or the key, the rule and the remedy."""

    exit_code = 2
