"""`python -m reward`: verdicts without the rest of the system."""

import argparse
import sys

from reward import grade


def main() -> int:
    """Runs the command that the arguments name."""
    parser = argparse.ArgumentParser(prog="python -m reward", description="Verdicts on responses.")
    commands = parser.add_subparsers(dest="command", required=True)
    grade.add_arguments(
        commands.add_parser("grade", help="judge the responses of a JSON lines file", description=grade.__doc__)
    )
    return grade.run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
