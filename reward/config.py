"""Section `reward`: which rule judges a response and how long it may take."""

from dataclasses import field
from typing import Annotated

from pydantic import AfterValidator, AnyHttpUrl, ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass

from reward.environment import check_environment
from reward.registry import find

STRICT = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True, allow_inf_nan=False)


def check_url(url: str) -> str:
    """The address of a service itself. Raises ValueError: no request could ever be sent there."""
    if not url.isascii() or not url.isprintable() or " " in url:
        raise ValueError("holds a space or a character that must be written as %XX")
    try:
        parsed = AnyHttpUrl(url)
        (parsed.host or "").encode("idna")
    except ValidationError as error:
        raise ValueError(error.errors()[0]["msg"]) from None
    except UnicodeError as error:
        raise ValueError(f"its host is not a host name: {error.__cause__ or error}") from None
    if parsed.port == 0:
        raise ValueError("port 0 must be a number from 1 to 65535")
    return url


def _known_verifier(name: str) -> str:
    find(name)
    return name


EnvironmentName = Annotated[str, AfterValidator(check_environment)]
VerifierName = Annotated[str, AfterValidator(_known_verifier)]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ServiceConfig:
    url: Annotated[str, AfterValidator(check_url)] | None = None
    """Service of verifier `remote`, or of environment `remote`: POST, JSON in and out (`reward/pool/remote.py`)."""

    key_file: Annotated[str, Field(min_length=1)] | None = None
    """File with a key, sent as `Authorization: Bearer`."""

    connections: Annotated[int, Field(gt=0)] = 8
    """Requests at a time (verifier: of one call)."""

    attempt_s: Annotated[float, Field(gt=0)] = 60.0
    """Seconds that the service may take to answer one request."""

    deadline_s: Annotated[float, Field(gt=0)] = 600.0
    """Seconds until a request without an answer stops the run; it is sent again meanwhile. Must be below
    `run.step_deadline_s`."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RemoteConfig(ServiceConfig):
    batch: Annotated[int, Field(gt=0)] = 64
    """Responses of one request, at most."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RewardConfig:
    """Section `reward`: which rule judges a response and how long it may take."""

    verifier: VerifierName = "robust"
    """`robust`: last stated answer, equivalent forms accepted. Others (docs/rewards.md): `exact`, `robust:####
    {answer}`, `choice`, `json`, `code`, `remote`, `module:function`, or a weighted sum, as `robust + 0.2 *
    module:function`; `none`: environments judge."""

    by_source: dict[str, VerifierName] = field(default_factory=dict)
    """Verifier of each source whose rows name none, as {gsm8k: robust, contests: code}; other sources have
    `verifier`."""

    workers: Annotated[int, Field(gt=0)] = 2
    """Processes for verdicts that cost microseconds: `robust` but for its algebra, `exact`, `choice`."""

    algebra_workers: Annotated[int, Field(gt=0)] = 1
    """Further processes, started when needed, at a lower priority, for slow verdicts, judged one by one: symbolic
    equality, `json`, `code`, verifiers of your own."""

    environment_workers: Annotated[int, Field(gt=0)] = 2
    """Processes for environments, as those."""

    timeout_s: Annotated[float, Field(gt=0)] = 5.0
    """Wall-clock limit of one verdict or turn of an environment, imports and queues not counted; past it the process is
    killed and the verdict is `timeout` (wrong)."""

    memory_mb: Annotated[int, Field(gt=0)] = 2048
    """Address space a worker may take beyond what it holds at its start."""

    code_reads: tuple[Annotated[str, Field(pattern="^/[^:]*$")], ...] = ()
    """What tests of `code` may read besides Python's files. `[/]`: everything; needed where the kernel has no
    Landlock."""

    remote: RemoteConfig = RemoteConfig()
    remote_environment: ServiceConfig = ServiceConfig()
