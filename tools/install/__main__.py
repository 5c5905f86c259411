"""Refuses a Python that was not tried, in syntax that old Pythons read, and hands over to the installer."""

import os
import subprocess
import sys

SUPPORTED = ("3.11", "3.12")


def unsupported():
    # type: () -> str
    """The message for a Python that was not tried; names a supported one where the machine has one."""
    way_out = "Install one of them, then name it: PYTHON=/path/to/python3.12 make install"
    for version in SUPPORTED:
        command = ["python" + version, "-c", "import sys; print(sys.executable)"]
        try:
            found = subprocess.check_output(command, stderr=subprocess.STDOUT).decode().strip()
        except (OSError, subprocess.CalledProcessError):
            continue
        way_out = "This machine has one: PYTHON=" + found + " make install"
    return (
        "Python %d.%d.%d" % sys.version_info[:3] + " (" + sys.executable + ") was not tried with these packages.\n"  # noqa: UP031
        "megatron-dapo runs on Python " + " and ".join(SUPPORTED) + ".\n" + way_out
    )


if __name__ == "__main__":
    if "%d.%d" % sys.version_info[:2] not in SUPPORTED:  # noqa: UP031
        sys.exit(unsupported())
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    from tools.install.installer import main

    sys.exit(main(sys.argv[1:]))
