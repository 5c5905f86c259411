"""What the ranks of strict groups tell one another through their store, and how a hang is reported from it."""

import os
import threading
import time
from collections.abc import Sequence
from typing import Any

from torch.distributed import DistError

PATIENCE = "STRICT_NCCL_PATIENCE_S"
POLL_S = 0.002

faults: list[str] = []
"""Every rule that this process saw broken, in order."""


class StrictError(RuntimeError):
    """A call that NCCL would refuse, or would answer with wrong data."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        faults.append(text)


class Hang(StrictError):
    """NCCL would wait here until its watchdog ends the process."""


class Mismatch(StrictError):
    """The ranks of a group make different calls."""


class Aborted(StrictError):
    """The group was aborted on this rank."""


def patience_s() -> float:
    """Seconds after which a wait counts as a hang; read at each wait, so a test may change it."""
    return float(os.environ.get(PATIENCE, "60"))


class Board:
    """One group's corner of the store. Each rank writes its last call of each communicator, and what it waits for."""

    def __init__(self, store: Any, rank: int, label: str) -> None:
        self.store, self.rank, self.label = store, rank, label

    def post(self, key: str, text: str) -> None:
        """This rank's entry under `key`, for all to read."""
        self.store.set(f"{key}/{self.rank}", text)

    def read(self, key: str, rank: int) -> str | None:
        """A rank's entry, if it has made one and the store still answers."""
        try:
            name = f"{key}/{rank}"
            return self.store.get(name).decode() if self.store.check([name]) else None
        except (DistError, RuntimeError):
            return None

    def meet(self, key: str, ranks: Sequence[int], why: str, mine: str, aborted: threading.Event) -> dict[int, str]:
        """What every one of `ranks` has left under `key`; blocks the thread that asks, as NCCL does.

        Raises:
            Hang: some do not come.
            Aborted: by another thread of this process.
        """
        self.post(key, mine)
        end, seen = time.monotonic() + patience_s(), {}
        while len(seen) < len(ranks):
            seen |= {rank: text for rank in ranks if rank not in seen and (text := self.read(key, rank)) is not None}
            if aborted.is_set():
                raise Aborted(f"{self.label}: rank {self.rank}: {why}: aborted on this rank")
            if time.monotonic() > end:
                self.hang(why, [rank for rank in ranks if rank not in seen])
            if len(seen) < len(ranks):
                time.sleep(POLL_S)
        return seen

    def hang(self, why: str, missing: Sequence[int]) -> None:
        """Report that `missing` never came.

        Raises:
            Hang: always; it says what each of them did last.
        """
        said = "; ".join(
            f"rank {rank} {self.read('last', rank) or 'has made no call of this group'}" for rank in missing
        )
        raise Hang(
            f"{self.label}: rank {self.rank} hangs in {why}: waits for ranks {list(missing)}, which did not come "
            f"within {patience_s():g} s ({said})"
        )
