"""Refuses a Python that was not tried, in syntax that old Pythons read, and hands over to the installer."""

import os
import subprocess
import sys

SUPPORTED = ("3.11", "3.12")


def unsupported():
    # type: () -> str
    """The message for a Python that was not tried; names a supported one where the machine has one."""
    mine = "%d.%d.%d" % sys.version_info[:3]  # noqa: UP031 (Python 3.5 and older must read this file)
    lines = [
        "Python " + mine + " (" + sys.executable + ") was not tried with these packages.",
        "megatron-dapo runs on Python " + " and ".join(SUPPORTED) + ".",
    ]
    for version in reversed(SUPPORTED):
        found = works("python" + version, version)
        if found:
            lines.append("This machine has one: PYTHON=" + found + " make install")
            break
    else:
        lines.append("Install one of them, then name it: PYTHON=/path/to/python3.12 make install")
    return "\n".join(lines)


def works(command, version):
    # type: (str, str) -> str | None
    """Path of the interpreter that `command` starts; None when it starts none, or another version."""
    code = "import sys; print('%d.%d' % sys.version_info[:2], sys.executable)"
    with open(os.devnull, "w") as nowhere:
        try:
            said = subprocess.check_output([command, "-c", code], stderr=nowhere)
        except (OSError, subprocess.CalledProcessError):
            return None
    running, path = said.decode().split(None, 1)
    return path.strip() if running == version else None


if __name__ == "__main__":
    if "%d.%d" % sys.version_info[:2] not in SUPPORTED:  # noqa: UP031
        sys.exit(unsupported())
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    from tools.install.installer import main

    sys.exit(main(sys.argv[1:]))
