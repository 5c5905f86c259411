"""`python -m tests.slurm.standin_node OPTIONS`: megatron_dapo.slurm.node, whose run only sleeps."""

import sys
from pathlib import Path

from megatron_dapo.slurm.node import main


def python_that_sleeps(place: Path) -> str:
    """A Python whose megatron-dapo sleeps and which is the real one otherwise; `place` gets it."""
    place.write_text(f'#!/bin/sh\n[ "$2" = megatron_dapo.cli.main ] && exec sleep 1000\nexec {sys.executable} "$@"\n')
    place.chmod(0o700)
    return str(place)


if __name__ == "__main__":
    sys.executable = python_that_sleeps(Path(sys.argv[-1]))
    sys.exit(main())
