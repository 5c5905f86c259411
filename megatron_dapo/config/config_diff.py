"""How two configs differ, and how one differs from the paper. Works on plain trees, so also on an old run's config."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

from megatron_dapo.config.load import flatten
from megatron_dapo.config.paper import PAPER, Stated
from megatron_dapo.config.root import Config

ABSENT = "(no such key)"


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """One key that two configs set differently."""

    key: str
    one: Any
    other: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Departure:
    """One key that a config sets otherwise than the paper."""

    stated: Stated
    value: Any


def flatten_config(config: Config) -> dict[str, Any]:
    """Every key of a loaded config with its value, defaults filled in."""
    return flatten(TypeAdapter(Config).dump_python(config, mode="json"))


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[Difference]:
    """Keys whose values differ, in the order of `one`; a key that only one side has counts."""
    keys = [*one, *(key for key in other if key not in one)]
    return [
        Difference(key=key, one=one.get(key, ABSENT), other=other.get(key, ABSENT))
        for key in keys
        if one.get(key, ABSENT) != other.get(key, ABSENT)
    ]


def departures(flat: Mapping[str, Any]) -> list[Departure]:
    """Keys that the paper states and `flat` sets otherwise."""
    return [
        Departure(stated=stated, value=flat.get(stated.key, ABSENT))
        for stated in PAPER
        if flat.get(stated.key, ABSENT) != stated.value
    ]


def shown(value: Any) -> str:
    """A value as it is written in a config file."""
    if value is None or isinstance(value, bool):
        return {None: "none", True: "true", False: "false"}[value]
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(shown, value))}]"
    return str(value)
