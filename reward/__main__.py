"""`python -m reward`: verdicts without the rest of the system."""

import sys

from reward.grade import main

if __name__ == "__main__":
    sys.exit(main())
