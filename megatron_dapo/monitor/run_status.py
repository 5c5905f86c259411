"""status.json: a run's sign of life."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

FILE = "status.json"


@dataclass(kw_only=True)
class Heartbeat:
    """What status.json holds. Times are seconds since 1970."""

    pid: int
    host: str
    started: float
    written: float
    state: str
    """`running`, `finished`, `stopped` (by a signal) or `failed`."""
    rollout_steps: int
    waits: list[str]
    """Open waits when it was written, oldest first."""
    error: str | None
    """The last error, also of an earlier start of the same run."""
    error_at: float | None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def read_heartbeat(folder: Path) -> Heartbeat | None:
    """The last sign of life; None if there is none that can be read."""
    try:
        return TypeAdapter(Heartbeat).validate_json((folder / FILE).read_bytes())
    except (OSError, ValueError):
        return None
