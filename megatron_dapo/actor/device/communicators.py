"""`actor.offload.communicators`: NCCL's own memory on a rank's GPU, released while servers have it.

`ncclCommSuspend` unmaps a communicator's buffers of transfers inside a node and keeps its connections;
`ncclCommResume` puts new memory at the same addresses. Buffers of the network and of NVLS stay, and everything with
NCCL_CUMEM_ENABLE=0. NCCL does not refuse a call on a suspended communicator: the GPU faults.
"""

import ctypes
import os
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

OLDEST, SUSPEND_MEMORY, SUSPENDABLE_BYTES = 22907, 1, 0
"""NCCL's codes: of the first version that suspends, NCCL_SUSPEND_MEM, ncclStatGpuMemSuspend."""


class Communicators:
    """Those of this rank's process groups that have been used, but for the default group's.

    The default group stays: a checkpoint that is written in the background ends over it while servers write. What torch
    makes for single sends between two ranks it shows to nobody, so that stays too.
    """

    def __init__(self, used: bool) -> None:
        """Takes the NCCL that torch has loaded: another library would not know its communicators.

        Args:
            used: whether `suspend` will be called.

        Raises:
            ValueError: `used`, and torch has loaded none, or an older one.
        """
        self._suspended: list[ctypes.c_void_p] = []
        if not used:
            return
        version = ctypes.c_int()
        with suppress(OSError):  # none is loaded
            self._nccl = ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOLOAD)
            self._nccl.ncclGetLastError.restype = ctypes.c_char_p
            self._nccl.ncclGetVersion(ctypes.byref(version))
        if version.value < OLDEST:
            found = version.value or "none"
            raise ValueError(f"actor.offload.communicators: needs NCCL {OLDEST} (2.29.7); torch has loaded {found}")

    def suspend(self) -> int:
        """Release their memory; bytes of it. Collective over all ranks, with no call under way.

        NCCL waits for all ranks of a communicator in each call. Torch lists groups in the order in which they were
        made, which is one on all ranks, so that none waits for another.

        Raises:
            RuntimeError: in NCCL's words.
        """
        self.resume()
        groups = [group for group in dist.distributed_c10d._world.pg_map if group is not dist.group.WORLD]
        # A pointer is 0 where a group has not been used: NCCL knows nothing of it.
        backends: list[Any] = [group._get_backend(torch.device("cuda")) for group in groups]
        self._suspended = [ctypes.c_void_p(pointer) for backend in backends if (pointer := backend._comm_ptr())]
        total, size = 0, ctypes.c_uint64()
        for communicator in self._suspended:
            self._call("ncclCommSuspend", communicator, SUSPEND_MEMORY)
            self._call("ncclCommMemStats", communicator, SUSPENDABLE_BYTES, ctypes.byref(size))
            total += size.value
        print(f"{len(self._suspended)} communicators suspended: {total / 2**30:.2f} GiB", flush=True)
        return total

    def resume(self) -> None:
        """Take memory again for those that are suspended. Collective like `suspend`.

        Raises:
            RuntimeError: in NCCL's words: the GPU may have too little.
        """
        while self._suspended:
            self._call("ncclCommResume", self._suspended.pop(0))

    def _call(self, name: str, *arguments: object) -> None:
        if code := self._nccl[name](*arguments):
            raise RuntimeError(f"{name}: NCCL error {code}: {self._nccl.ncclGetLastError(None).decode()}")
