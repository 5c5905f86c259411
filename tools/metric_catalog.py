"""Every metric, declared once in megatron_dapo/monitor/catalog.yaml: name, unit, how it stands for a whole rollout
step, where the paper plots it.

Tests refuse a name that is not there. The page docs/metrics.md is made from it.
"""

from dataclasses import dataclass
from pathlib import Path

import yaml


@dataclass(frozen=True, slots=True)
class Metric:
    """One declared metric."""

    name: str
    unit: str
    reduce: str
    """How the values inside a rollout step become the one value of its line."""
    help: str
    figure: str = ""
    """Where the paper plots it."""


FILE = Path(__file__).parents[1] / "megatron_dapo" / "monitor" / "catalog.yaml"
_DECLARED = yaml.safe_load(FILE.read_text(encoding="utf-8"))
GROUPS = {title: [Metric(name, *about) for name, about in metrics.items()] for title, metrics in _DECLARED.items()}
"""All metrics under their headings."""

CATALOG = {metric.name: metric for group in GROUPS.values() for metric in group}
"""All metrics by name."""
