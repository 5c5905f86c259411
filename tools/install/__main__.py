"""Refuses a Python that was not tried, in syntax that old Pythons read, and hands over to the installer."""

import sys

SUPPORTED = ("3.11", "3.12")

if __name__ == "__main__":
    if "%d.%d" % sys.version_info[:2] not in SUPPORTED:  # noqa: UP031
        sys.exit(
            "Python %d.%d.%d" % sys.version_info[:3] + " (" + sys.executable + ") was not tried with these packages.\n"  # noqa: UP031
            "megatron-dapo runs on Python 3.11 and 3.12. Name one of them:\n  PYTHON=/path/to/python3.12 make install"
        )
    from tools.install.installer import main

    sys.exit(main(sys.argv[1:]))
