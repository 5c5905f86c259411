"""Section `reward`: which rule judges a response and how long it may take."""

from typing import Annotated

from pydantic import AfterValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass

from reward.registry import find

STRICT = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True, allow_inf_nan=False)


def _known_verifier(name: str) -> str:
    find(name)
    return name


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RewardConfig:
    verifier: Annotated[str, AfterValidator(_known_verifier)] = "robust"
    """`robust`: last stated answer, equivalent forms accepted. `exact`: the reference rule of the paper's
    reproduction. `choice`, `json`: for other tasks. Or `module:function` (takes a VerificationRequest)."""

    workers: Annotated[int, Field(gt=0)] = 2
    """Processes for verdicts that cost microseconds: `robust` but for its algebra, `exact`, `choice`."""

    algebra_workers: Annotated[int, Field(gt=0)] = 1
    """Further processes, started when first needed and at a lower priority, for verdicts that may take long and are
    judged one by one: symbolic equality, `json`, verifiers of your own."""

    timeout_s: Annotated[float, Field(gt=0)] = 5.0
    """Wall-clock limit of one verdict, imports and queues not counted; past it the process is killed and the verdict
    is `timeout` (not correct)."""

    memory_mb: Annotated[int, Field(gt=0)] = 2048
    """Address space a worker may take beyond what it holds at its start."""
