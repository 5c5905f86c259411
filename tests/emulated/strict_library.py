"""The native side of strict groups: a libnccl.so.2 of our own, for a torch that has brought none (strict_library.c)."""

import ctypes
import subprocess
from pathlib import Path
from typing import Any

from tests.emulated.strict_board import StrictError

NAME = "libnccl.so.2"
BYTES = 3 << 20
"""Of each communicator, that it can release."""

_MEETING = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)


def compiled(folder: Path) -> Path:
    """The library in `folder`; NCCL's name is in it, by which a process that has loaded it finds it again."""
    library = folder / "strict_nccl.so"
    command = ["gcc", "-shared", "-fPIC", "-Wall", "-Werror", f"-Wl,-soname,{NAME}", "-o", str(library)]
    subprocess.run([*command, str(Path(__file__).with_suffix(".c"))], check=True)
    return library


class Library:
    """Of this process, once `load` was called."""

    def __init__(self) -> None:
        self._native: Any = None
        self._groups: dict[int, Any] = {}
        self._meetings: dict[int, int] = {}
        self._meet = _MEETING(self._met)  # as long as C may call it

    def load(self, library: Path, *, version: int = 22907) -> None:
        """`version`: that it says to be, in NCCL's code."""
        self._native = ctypes.CDLL(str(library))
        self._native.strict_make.restype = ctypes.c_void_p
        self._native.strict_begin(version, self._meet)

    def pointer(self, group: Any) -> int:
        """NCCL's own communicator of a group's."""
        found = [pointer for pointer, other in self._groups.items() if other is group]
        if not found:
            found = [self._native.strict_make(ctypes.c_uint64(BYTES))]
            self._groups[found[0]] = group
        return found[0]

    def is_suspended(self, group: Any) -> bool:
        """Whether a call of the group would fault."""
        pointers = [pointer for pointer, other in self._groups.items() if other is group]
        return any(self._native.strict_is_suspended(ctypes.c_void_p(pointer)) for pointer in pointers)

    def _met(self, pointer: int, what: bytes) -> int:
        """Whether all ranks of a communicator have come to this call; Python's errors cannot pass through C."""
        group = self._groups[pointer]
        self._meetings[pointer] = count = self._meetings.get(pointer, 0) + 1
        call = f"{what.decode()}, call {count} of its communicator"
        group.board.post("last", f"came to {call}")
        try:
            group.board.meet(f"native/{count}", range(group.count), call, what.decode(), group.aborted)
        except StrictError:
            return 0
        return 1


library = Library()
