"""Every metric, declared once in catalog.yaml: name, unit, how it stands for a whole rollout step, where the paper
plots it.

A name that is not there cannot be written. The page docs/metrics.md is made from it.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
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


class UndeclaredMetricError(ValueError):
    """A metric is written under a name that the catalog does not hold."""


_DECLARED = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
GROUPS = {title: [Metric(name, *about) for name, about in metrics.items()] for title, metrics in _DECLARED.items()}
"""All metrics under their headings."""

CATALOG = {metric.name: metric for group in GROUPS.values() for metric in group}
"""All metrics by name."""


def check_declared(names: Iterable[str]) -> None:
    """Raise `UndeclaredMetricError`, with the nearest declared name, for the first name that is not in the catalog."""
    for name in names:
        if name not in CATALOG and f"{name.partition('/')[0]}/*" not in CATALOG:
            near = get_close_matches(name, CATALOG, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "declare it in megatron_dapo/monitor/catalog.yaml"
            raise UndeclaredMetricError(f"metric {name!r}: not declared; {hint}")
