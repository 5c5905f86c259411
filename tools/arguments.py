"""Types of the tools' command-line options: a value that makes no sense is refused with the option's name."""

import argparse
import math
from collections.abc import Callable
from typing import Any


def _number(kind: Callable[[str], Any], holds: Callable[[Any], bool], rule: str) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        if not holds(number := kind(text)):
            raise argparse.ArgumentTypeError(f"{number} must be {rule}")
        return number

    parse.__name__ = "whole number" if kind is int else "number"  # argparse says "invalid number value"
    return parse


count = _number(int, lambda number: number >= 0, "0 or more")
positive_count = _number(int, lambda number: number > 0, "above 0")
positive = _number(float, lambda number: 0 < number < math.inf, "above 0 and finite")
share = _number(float, lambda number: 0 < number <= 1, "above 0 and at most 1")
