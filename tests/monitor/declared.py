"""Every metric that a run writes is declared."""

from collections.abc import Iterable

from tools.metric_catalog import CATALOG


def check_declared(names: Iterable[str]) -> None:
    """Fails for names that megatron_dapo/monitor/catalog.yaml does not hold, nor their group as `objective/*`."""
    unknown = {name for name in names if name not in CATALOG and f"{name.partition('/')[0]}/*" not in CATALOG}
    assert not unknown, "declare them in megatron_dapo/monitor/catalog.yaml"
