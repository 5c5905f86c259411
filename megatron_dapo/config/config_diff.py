"""How a config differs from a preset: the paper's (arXiv 2503.14476), or another recipe's.

Works on plain trees, so also on an old run's config. The presets are files in `presets`: `paper` names every key that
changes what is learnt, with its source; the others name what they set otherwise.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

from megatron_dapo.config.algorithm_config import automatic_mode
from megatron_dapo.config.load import ABSENT, PRESETS, flatten, read_yaml, shown

PAPER = "paper"

NOT_COMPARED = (
    "the model, prompts and their order, template, sources' verifiers and seed; number formats; how many prompts are "
    "sent at a time (algorithm.dynamic_sampling.initial_pass_rate, surplus, ahead, max_oversampling); and where it all "
    "runs"
)
"""What a comparison with a preset leaves out unless the preset sets it."""


class Stated(NamedTuple):
    """One setting that a preset states."""

    key: str
    value: Any
    where: str
    """Equation or section of the paper, or what else states it."""


@cache
def stated(preset: str = PAPER) -> Mapping[str, Stated]:
    """What a preset sets by key; below it, what DAPO's paper says of the other keys that change what is learnt."""
    below = () if preset == PAPER else stated().values()
    known = {each.key: each._replace(where=f"DAPO: {each.where}") for each in below}
    tree, places = read_yaml(PRESETS[preset])
    rows = PRESETS[preset].read_text(encoding="utf-8").splitlines()
    for key, value in flatten(tree).items():
        row = rows[int(places[tuple(key.split("."))].rpartition(":")[2]) - 1]
        known[key] = Stated(key, value, row.partition("  # ")[2])
    return known


def described(preset: str) -> str:
    """The preset's own words: whose recipe it is, and what of it no key says."""
    rows = PRESETS[preset].read_text(encoding="utf-8").splitlines()
    return "\n".join(row.removeprefix("# ") for row in rows if row.startswith("#"))


def departures(flat: Mapping[str, Any], preset: str = PAPER) -> list[Stated]:
    """What the preset states and `flat` sets otherwise, in the order of the preset."""
    known, given = stated(preset), _meant(flat)
    wanted = _meant({key: each.value for key, each in known.items()})
    return [known[key] for key, value in wanted.items() if given.get(key, ABSENT) != value]


def _meant(flat: Mapping[str, Any]) -> dict[str, Any]:
    """With one word for what two say: `auto` and what it stands for; taking turns, on one GPU or on two."""
    meant = dict(flat)
    if meant.get("algorithm.importance.mode") == "auto":
        loss, stale = meant.get("algorithm.policy_loss"), meant.get("algorithm.dynamic_sampling.max_staleness")
        meant["algorithm.importance.mode"] = automatic_mode(str(loss), stale or 0)
    if meant.get("run.mode") == "colocated":
        meant["run.mode"] = "sync"
    return meant


def shown_of(flat: Mapping[str, Any], key: str) -> str:
    """A key's value as `shown`; of `auto` also what it stands for here, as in `auto (truncated)`."""
    value, meant = flat.get(key), _meant(flat).get(key)
    return f"{shown(value)} ({shown(meant)})" if value == "auto" != meant else shown(value)
