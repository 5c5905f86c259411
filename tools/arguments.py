"""Types of the tools' command-line options: a value that makes no sense is refused with the option's name."""

import argparse
import math


def count(text: str) -> int:
    """0, 1, 2, ..."""
    if (number := int(text)) < 0:
        raise argparse.ArgumentTypeError(f"{number} must be 0 or more")
    return number


def positive_count(text: str) -> int:
    """1, 2, 3, ..."""
    if (number := int(text)) <= 0:
        raise argparse.ArgumentTypeError(f"{number} must be above 0")
    return number


def positive(text: str) -> float:
    """Above 0, and finite."""
    if not 0 < (number := float(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"{number} must be above 0 and finite")
    return number


def share(text: str) -> float:
    """Above 0, at most 1."""
    if not 0 < (number := float(text)) <= 1:
        raise argparse.ArgumentTypeError(f"{number} must be above 0 and at most 1")
    return number
