"""Pages in Markdown from `templates/`."""

from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from megatron_dapo.plan.memory import PHASES

_PAGES = Environment(
    loader=PackageLoader("megatron_dapo.plan"), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
)


def page(template: str, **values: Any) -> str:
    """The page of `templates/TEMPLATE`; it knows `phases` besides the `values`."""
    return _PAGES.get_template(template).render(phases=PHASES, **values)
