"""One call of a strict group: how it is queued, compared with the other ranks' calls, made over gloo and waited for."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions
from torch.distributed import DistError, PrefixStore, ProcessGroupGloo

from tests.emulated import strict_calls as calls
from tests.emulated.strict_board import Aborted, Hang, Mismatch, StrictError, patience_s

LATENCY_S = 0.001
"""Between the last rank's arrival and the data: `wait` by itself must not suffice to see it."""

THREADS = "strict-stream"
"""How the names of the threads begin that stand for NCCL's streams."""

ABORT_POLL_S = 0.02
"""How soon a thread that waits for a call sees that its group was aborted."""


def memory(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory. Autograd does not see what is written to it, as it does not see a GPU's stream."""
    return tensor.data  # `detach` would share the count of changes


class Device:
    """What is known about the device of tensors. This one takes every tensor as the GPU's, and `wait` waits."""

    def data(self, tensor: torch.Tensor, call: str, *, written: bool, communicator: "Communicator") -> torch.Tensor:
        """The memory of a tensor that is given to a call, as it is now: the tensor may get other memory later."""
        return memory(tensor)

    def enqueued(self, work: "StrictWork") -> None:
        """A call has begun to use its tensors."""

    def waited(self, work: "StrictWork") -> None:
        """`wait` was called."""
        work.finish()


device = Device()


class StrictWork(dist._Work):
    """One call under way. An error of the call is raised where its data is needed, and by the group's next call."""

    def __init__(
        self,
        what: str,
        done: "Future[None]",
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
        aborted: threading.Event,
        communicator: "Communicator | None" = None,
    ) -> None:
        super().__init__()
        self.what, self.done, self.reads, self.writes, self.aborted = what, done, reads, list(writes), aborted
        self.communicator = communicator
        self.settled = False
        """The device's stream is ordered behind it: `wait` was called, or everything was synchronised."""

    def finish(self) -> None:
        """Block the host until the data is there."""
        while not self.done.done():
            if self.aborted.is_set():
                raise Aborted(f"{self.what}: aborted on this rank while it was under way")
            wait([self.done], timeout=ABORT_POLL_S)
        self.done.result()

    def is_completed(self) -> bool:
        return self.done.done() or self.aborted.is_set()

    def is_success(self) -> bool:
        return self.done.done() and self.done.exception() is None

    def exception(self) -> Any:
        return self.done.exception() if self.done.done() else None

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        device.waited(self)
        if timeout:  # torch's blocks the host then
            self.finish()
        return True

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()

    def result(self) -> list[torch.Tensor]:
        return self.writes

    def get_future(self) -> Any:
        future: Any = torch.futures.Future()
        self.done.add_done_callback(lambda done: future.set_result(self.writes))
        return future


class StrictBatch(dist._Work):
    """Calls that torch gives out as one."""

    def __init__(self, works: Sequence[StrictWork]) -> None:
        super().__init__()
        self.works = list(works)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        for work in self.works:
            work.wait()
        return True

    synchronize = block_current_stream = wait

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self.works)

    def is_success(self) -> bool:
        return all(work.is_success() for work in self.works)


class Communicator:
    """The ranks of one communicator, its gloo group, and the one thread that makes its calls in order."""

    def __init__(self, group: Any, key: str, ranks: list[int]) -> None:
        self.group, self.key, self.ranks = group, key, ranks
        self.calls = 0
        self._gloo: ProcessGroupGloo | None = None
        self._running: set[Future[None]] = set()
        self._stream = ThreadPoolExecutor(1, thread_name_prefix=THREADS)

    def submit(self, what: str, same: str, run: Callable[[Any], None]) -> "Future[None]":
        """`run` with the gloo group, once every rank has made this call; `same` must be equal on all of them."""
        self.calls += 1
        self.group.board.post(f"last/{self.key}", f"{self.calls}|{what}")
        self.group.board.post("last", f"made call #{self.calls} of communicator '{self.key}', {what}")
        done = self._stream.submit(self._execute, self.calls, what, same, run)
        self._running = {one for one in self._running if not one.done()} | {done}
        return done

    def flush(self) -> None:
        """Block the host until every call that was submitted has ended, well or badly."""
        while self._running and not self.group.aborted.is_set():
            self._running = wait(self._running, timeout=ABORT_POLL_S).not_done

    def _execute(self, number: int, what: str, same: str, run: Callable[[Any], None]) -> None:
        began = time.monotonic()
        if self.group.failed is not None:  # nothing comes behind a call that hangs
            raise self.group.failed
        try:
            gloo = self._connected()
            self._compare(gloo, number, same)
            if self.group.aborted.is_set():
                raise Aborted(f"{self.group.label}: rank {self.group.mine}: {what}: aborted on this rank")
            time.sleep(LATENCY_S)
            run(gloo)
        except StrictError as error:
            self.group.failed = error
            raise
        except (DistError, RuntimeError) as error:
            # gloo notices a dead peer at once; NCCL would not.
            self.group.aborted.wait(max(0.0, patience_s() - (time.monotonic() - began)))
            try:
                self._report(number, what, error)
            except StrictError as report:
                self.group.failed = report
                raise

    def _connected(self) -> Any:
        if self._gloo is None:
            here = self.ranks.index(self.group.mine)
            limit = timedelta(seconds=patience_s())
            # A client of its own: one that waits in a thread lets no other thread of this process ask.
            store = PrefixStore(f"gloo/{self.key}", self.group.store.clone())
            self._gloo = ProcessGroupGloo(store, here, len(self.ranks), limit)
        return self._gloo

    def _compare(self, gloo: Any, number: int, same: str) -> None:
        if len(self.ranks) == 1:
            return
        mine = calls.digest(f"{number} {same}")
        seen = [torch.empty_like(mine) for _ in self.ranks]
        options = AllgatherOptions()
        options.timeout = timedelta(seconds=patience_s())
        gloo.allgather([seen], [mine], options).wait()
        if all(torch.equal(value, mine) for value in seen):
            return
        group, where = self.group, f"mismatch/{self.key}/{number}"
        texts = group.board.meet(where, self.ranks, "a mismatch", same, group.aborted)
        rank, text = next((rank, text) for rank, text in texts.items() if text != same)
        raise Mismatch(
            f"{group.label}: call #{number} of communicator '{self.key}': rank {group.mine} makes {same}, rank {rank} "
            f"makes {text}"
        )

    def _report(self, number: int, what: str, error: Exception) -> None:
        group = self.group
        if group.aborted.is_set():
            raise Aborted(f"{group.label}: rank {group.mine}: {what}: aborted on this rank") from error
        entries = {rank: group.board.read(f"last/{self.key}", rank) for rank in self.ranks if rank != group.mine}
        missing = [rank for rank, text in entries.items() if text is None or int(text.partition("|")[0]) < number]
        why = f"call #{number} of communicator '{self.key}', {what}"
        if missing:
            group.board.hang(why, missing)
        raise Hang(
            f"{group.label}: rank {group.mine} hangs in {why}: every rank has made the call, and one has ended "
            f"or aborted it since ({error})"
        )
