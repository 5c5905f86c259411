"""What the sandboxed process may still ask of the kernel: memory, time, and the pipes that it holds.

A seccomp filter (Linux, x86-64) allows the calls below; every other one fails with EPERM. So there is no network, no
file, no new process or thread, no signal to anybody, no look at another process, whoever the user is and without any
privilege, name space or container.
"""

import ctypes
import json
import os
import platform
import resource
import signal
import struct
import sys
from collections.abc import Collection, Mapping
from pathlib import Path

ALLOWED, READING, LOCKING = json.loads(Path(__file__).with_name("system_calls.json").read_text("ascii")).values()
"""System calls by their numbers on x86-64: what is always allowed, what else it takes to import modules (`openat` for
reading alone), and to install one more filter (of several, the strictest decides)."""

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
_SECCOMP_MODE_FILTER, _PROT_EXEC = 2, 4
_ARCHITECTURE, _X32 = 0xC000003E, 0x40000000
_ALLOW, _REFUSE, _KILL = 0x7FFF0000, 0x00050001, 0x80000000  # refuse: errno 1, EPERM
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NO_READING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class LockError(RuntimeError):
    """This system cannot confine a process; the message says why."""


def limit(*, memory_bytes: int, cpu_s: int, file_bytes: int) -> None:
    """Bounds what the process may use up. The soft and hard limits are equal: no handler gets to see the end."""
    limits = {resource.RLIMIT_AS: memory_bytes, resource.RLIMIT_CPU: cpu_s, resource.RLIMIT_FSIZE: file_bytes}
    for kind, amount in (limits | {resource.RLIMIT_NPROC: 1, resource.RLIMIT_CORE: 0}).items():
        hard = resource.getrlimit(kind)[1]
        amount = amount if hard == resource.RLIM_INFINITY else min(amount, hard)
        resource.setrlimit(kind, (amount, amount))


def die_with_parent() -> None:
    """Has the kernel kill this process when the one that started it ends."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def hide_memory() -> None:
    """Keeps other processes of the same user from reading this one's memory and descriptors below /proc."""
    _prctl(_PR_SET_DUMPABLE, 0)


def forbid_privileges() -> None:
    """No program that this process starts has more rights than itself: without that nobody may install a filter."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def lock(also: Mapping[str, int] | None = None) -> None:
    """Installs the filter, for the rest of the life of the process.

    Args:
        also: what is allowed beyond `ALLOWED`, such as `READING`.

    Raises:
        LockError: this system has no such filter.
    """
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        raise LockError(f"no filter for {sys.platform} on {platform.machine()}, only for Linux on x86-64")
    program = _program({*ALLOWED.values(), *(also or {}).values()}, may_load=also is not None)
    buffer = ctypes.create_string_buffer(program)
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(buffer)))
    forbid_privileges()
    _prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(header))


def _program(allowed: Collection[int], *, may_load: bool) -> bytes:
    """The filter in the kernel's machine language: (code, jump if true, jump if false, value) of 8 bytes each.

    Args:
        may_load: whether memory may become executable, as where a library is loaded.
    """
    calls, refused = sorted(allowed), [(READING["openat"], _NO_READING)]
    checks: list[tuple[int, int, int, int]] = []
    if not may_load:
        refused += [(ALLOWED[name], _PROT_EXEC) for name in ("mmap", "mprotect")]
    for left in reversed(range(len(refused))):
        call, bits = refused[left]  # of the third argument: how a file is opened, what memory may be used for
        ahead = len(calls) + 1 + 4 * left
        checks += [(_EQUAL, 0, 3, call), (_LOAD, 0, 0, 32), (_ANY_BIT, ahead, 0, bits), (_LOAD, 0, 0, 0)]
    lines = [
        (_LOAD, 0, 0, 4),  # the architecture of the call
        (_EQUAL, 1, 0, _ARCHITECTURE),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, 0),  # its number
        (_AT_LEAST, 0, 1, _X32),
        (_RETURN, 0, 0, _KILL),
        *checks,
        *((_EQUAL, len(calls) - at, 0, number) for at, number in enumerate(calls)),
        (_RETURN, 0, 0, _REFUSE),
        (_RETURN, 0, 0, _ALLOW),
    ]
    return b"".join(struct.pack("HBBI", *line) for line in lines)


def _prctl(option: int, argument: int, further: int = 0) -> None:
    words = [ctypes.c_ulong(word) for word in (argument, further, 0, 0)]
    if ctypes.CDLL(None, use_errno=True).prctl(option, *words) != 0:
        raise LockError(f"prctl {option} is refused (errno {ctypes.get_errno()})")
