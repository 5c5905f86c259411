"""Which files tests and tested code may read: Python's, the system's libraries, and what `reward.code_reads` names.

Landlock (Linux 5.13 and later) looks at where a file lies, whatever the path, link or folder that led there, and needs
no privilege. It does not hide whether a file exists or how large it is; `reward.code.seccomp` forbids what else it
leaves open: to change, start, rename or truncate. Source: `landlock(7)`.
"""

import ctypes
import os
import struct
import sys
from collections.abc import Sequence

from reward.code import READS
from reward.code.seccomp import LockError, forbid_privileges

_SYSTEM = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/share/zoneinfo",
           "/etc/ld.so.cache", "/etc/localtime", "/etc/ssl/openssl.cnf",
           "/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")  # fmt: skip
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION, _PATH_BENEATH = 1, 1
_READ_FILE, _READ_FOLDER = 1 << 2, 1 << 3
_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}
"""How many kinds of access each version can refuse; later ones 16."""


def readable() -> list[str]:
    """Files and folders that tests may read; "/" is all."""
    standard_library = os.path.dirname(os.__file__)
    packages = (path for path in sys.path if path.endswith(("/site-packages", "/dist-packages")))
    libraries = filter(os.path.isabs, os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep))
    python = (os.path.dirname(standard_library), standard_library, *packages, *libraries)
    return [*filter(os.path.exists, (*_SYSTEM, *python)), *filter(None, os.environ.get(READS, "").split(os.pathsep))]


def confine(paths: Sequence[str]) -> None:
    """Lets this process open nothing but `paths` and what lies below them, for reading, for the rest of its life. What
    is open stays open.

    Raises:
        LockError: this system cannot do that.
        OSError: one of them cannot be opened.
    """
    if "/" in paths:
        return
    rights = _RIGHTS.get(_call(_CREATE_RULESET, None, 0, _VERSION), 16)
    ruleset = _call(_CREATE_RULESET, struct.pack("Q", (1 << rights) - 1), 8, 0)
    for path in paths:
        descriptor = os.open(path, os.O_PATH)
        allowed = _READ_FILE | (_READ_FOLDER if os.path.isdir(path) else 0)
        _call(_ADD_RULE, ruleset, _PATH_BENEATH, struct.pack("=Qi", allowed, descriptor), 0)
        os.close(descriptor)
    forbid_privileges()
    _call(_RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)


def _call(number: int, *arguments: int | bytes | None) -> int:
    result: int = ctypes.CDLL(None, use_errno=True).syscall(number, *arguments)
    if result < 0:
        refused = f"this kernel refuses its call {number} (errno {ctypes.get_errno()})"
        raise LockError(f"Landlock needs Linux 5.13: {refused}; reward.code_reads=[/] lets tests read every file")
    return result
