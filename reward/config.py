"""Section `reward`: which rule judges a response and how long it may take."""

from typing import Annotated, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

STRICT = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True, allow_inf_nan=False)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RewardConfig:
    verifier: Literal["robust", "exact"] = "robust"
    """`robust`: last stated answer, equivalent forms accepted. `exact`: the reference rule of the paper's reproduction."""

    workers: Annotated[int, Field(gt=0)] = 2
    """Processes of the verification pool."""

    timeout_s: Annotated[float, Field(gt=0)] = 5.0
    """Wall-clock limit of one verdict; past it the process is killed and the verdict is `timeout` (not correct)."""

    memory_mb: Annotated[int, Field(gt=0)] = 2048
    """Address space a worker may take beyond what it holds at its start."""
