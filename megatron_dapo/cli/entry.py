"""`megatron-dapo` itself. The imports of its commands take a second, in which Ctrl-C is no bug."""

import sys


def run() -> None:
    """Entry point."""
    try:
        from megatron_dapo.cli.main import main
    except KeyboardInterrupt:
        sys.exit(130)
    main()
