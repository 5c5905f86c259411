"""YAML file + `section.key=value` overrides -> Config, strictly (no key is ignored, none is guessed)."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml
from pydantic import TypeAdapter, ValidationError

from megatron_dapo.config.base import ConfigError
from megatron_dapo.config.root import Config, contradictions

KeyPath = tuple[str, ...]
Lines = dict[KeyPath, str]
"""Where each key was given: `file:line` or `override`."""

_UNREADABLE = (ValueError, RecursionError)
"""Not YAML's own errors: an integer of thousands of digits, a section that holds itself."""


class _Loader(yaml.SafeLoader):
    """Safe YAML that reads numbers, true and false as YAML 1.2 does, and dates as text.

    YAML 1.1 takes 1e-6 for a text, 010 for 8, 1:30 for 90, `off` for false and an impossible date for a fault of
    Python's.
    """


_SCALARS = {
    "null": r"^(~|null|Null|NULL|)$",
    "merge": r"^<<$",
    "bool": r"^(true|True|TRUE|false|False|FALSE)$",
    "int": r"^[-+]?(0|[1-9][\d_]*|0x[\da-fA-F_]+|0o[0-7_]+)$",
    "float": r"^[-+]?(\d[\d_]*)(\.\d*)?[eE][-+]?\d+$|^[-+]?(\d[\d_]*)\.\d*$|^[-+]?\.\d+([eE][-+]?\d+)?$"
    r"|^[-+]?\.(inf|Inf|INF)$|^\.(nan|NaN|NAN)$",
}
_Loader.yaml_implicit_resolvers = {}


class _Dumper(yaml.SafeDumper):
    """Quotes a text that `_Loader` or a reader of YAML 1.1 would take for something else, as 1e5 and 010."""


for _kind, _pattern in _SCALARS.items():  # None: whatever the first character
    _Dumper.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", re.compile(_pattern), None)
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", re.compile(_pattern), None)


ABSENT = "(no such key)"

PRESETS = {file.stem: file for file in sorted((Path(__file__).parent / "presets").glob("*.yaml"))}
"""What `preset: NAME` may name, and the keys that it sets."""


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """The config of `path`, a file or the directory of a run, with its preset below it and `overrides`
    (`actor.layout.tensor=2`) above it. Raises as `load_with_sources` does."""
    return load_with_sources(path, overrides)[0]


def load_with_sources(path: str | Path, overrides: Sequence[str] = ()) -> tuple[Config, Lines]:
    """The config, and where each of its keys was given that is no default.

    Raises:
        ConfigError: file missing or no YAML, unknown key (with the nearest valid one), wrong type, contradiction.
            All faults are listed at once, each with its file and line.
    """
    path = Path(path, "config.yaml") if Path(path).is_dir() else Path(path)
    tree, lines = read_yaml(path)
    for override in overrides:
        _override(tree, lines, override)
    _apply_preset(tree, lines)
    try:
        config = TypeAdapter(Config).validate_json(json.dumps(tree))
    except ValidationError as error:
        wrong = "".join(f"\n  {_fault(fault, lines)}" for fault in error.errors())
        raise ConfigError(f"config is not valid{wrong}") from None
    except (TypeError, *_UNREADABLE) as error:
        raise ConfigError(f"{path}: a value is no text, number, list or section ({error}); put it in quotes") from None
    faults = list(contradictions(config))
    # What a run has stored was valid when it began.
    if faults and (overrides or not path.with_name("ledger.jsonl").exists()):
        raise ConfigError(f"{path}: keys contradict each other\n" + "\n".join(f"  {fault}" for fault in faults))
    return config, lines


def dump_config(config: Config, sources: Lines | None = None) -> str:
    """The resolved config as YAML; `load_config` reads it back to an equal config. With `sources` each value is
    followed by a comment that says where it was given; those without one are defaults."""
    tree = TypeAdapter(Config).dump_python(config, mode="json")
    text = yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    if sources is None:
        return text
    rows = text.splitlines()
    for where, key, value in _entries(yaml.compose(text, Loader=_Loader)):
        if where in sources and not (isinstance(value, yaml.MappingNode) and value.value):
            row = (value.end_mark if isinstance(value, yaml.ScalarNode) else key.start_mark).line
            rows[row] += f"  # {sources[where]}"
    return "\n".join(rows) + "\n"


def _entries(node: yaml.Node | None, above: KeyPath = ()) -> Iterator[tuple[KeyPath, yaml.Node, yaml.Node]]:
    """(key path, key, value) of all that YAML mappings hold, those in lists under the number of their item."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            where = (*above, str(key.value))
            yield where, key, value
            yield from _entries(value, where)
    elif isinstance(node, yaml.SequenceNode):
        for number, item in enumerate(node.value):
            yield from _entries(item, (*above, str(number)))


def _apply_preset(tree: dict[str, Any], lines: Lines) -> None:
    """Set the keys of `preset` that the config does not set itself."""
    name = tree.pop("preset", None)
    if name is None:
        return
    if not isinstance(name, str) or name not in PRESETS:
        known = ", ".join(PRESETS)
        raise ConfigError(f"{_place(('preset',), lines)}: preset = {name}: no such preset; valid: {known}")
    below, places = read_yaml(PRESETS[name])
    _fill(tree, below)
    for where in places:
        lines.setdefault(where, f"preset {name}")


def _fill(tree: dict[str, Any], below: Mapping[str, Any]) -> None:
    for key, value in below.items():
        if isinstance(value, dict) and (key not in tree or isinstance(tree[key], dict | None)):
            tree[key] = tree.get(key) or {}
            _fill(tree[key], value)
        else:
            tree.setdefault(key, value)


def read_yaml(path: Path) -> tuple[dict[str, Any], Lines]:
    """A config file as it is written, and the place of each key.

    Raises:
        ConfigError: it is missing, no YAML, or gives a key twice.
    """
    try:
        text = path.read_text(encoding="utf-8")
        node, tree = yaml.compose(text, Loader=_Loader), yaml.load(text, Loader=_Loader)
        lines: Lines = {}
        for where, key, _ in _entries(node) if isinstance(tree, dict) else ():
            place = f"{path}:{key.start_mark.line + 1}"
            if key.tag == "tag:yaml.org,2002:float":
                raise ConfigError(f"{place}: {'.'.join(where)}: a number is no key; a comma ends a value, write 3.0e-4")
            if where in lines:
                raise ConfigError(f"{place}: {'.'.join(where)} is given twice, first at {lines[where]}; remove one")
            lines[where] = place
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        presets = "" if path.suffix else f"; presets: {', '.join(PRESETS)}"
        raise ConfigError(f"config file {path}: {why}; give a YAML file in UTF-8, or a run's folder{presets}") from None
    except (yaml.YAMLError, *_UNREADABLE) as error:
        told = str(error).replace("<unicode string>", str(path))
        raise ConfigError(f"config file {path} is not valid YAML: {told}") from None
    if not isinstance(tree, dict):
        found = "nothing" if tree is None else type(tree).__name__
        raise ConfigError(f"config file {path}: expected sections (run:, model:, data:, ...), found {found}")
    return tree, lines


def _override(tree: dict[str, Any], lines: Lines, override: str) -> None:
    name, separator, text = override.partition("=")
    if not separator or not name.strip() or override != override.encode(errors="replace").decode():
        raise ConfigError(f"override {override!r}: write it as section.key=value, in UTF-8")
    path = tuple(part.strip() for part in name.split("."))
    # A text is taken as it stands: YAML would cut `#### {form}` at the mark and read `Answer:` as a section.
    written = text[:1] not in ("'", '"') and name.strip() in _text_keys() and not re.match(_SCALARS["null"], text)
    try:
        value = text.strip(" ") if written else yaml.load(text, Loader=_Loader)
        leaves = flatten(value) if isinstance(value, dict) else {}
    except (yaml.YAMLError, *_UNREADABLE) as error:
        raise ConfigError(f"override {override!r}: the value is not valid YAML: {error}") from None
    at: Any = tree
    for depth, part in enumerate(path[:-1], 1):
        lines.setdefault(path[:depth], f"override {override!r}")
        if isinstance(at, dict) and at.get(part) is None:  # also a section whose keys are all commented out
            at[part] = {}
        at = (at if isinstance(at, dict) else dict(zip(map(str, range(len(at))), at, strict=True))).get(part)
        if not isinstance(at, dict | list):
            raise ConfigError(f"override {override!r}: {part} is neither a section nor an item of the list")
    if isinstance(at, list):
        raise ConfigError(f"override {override!r}: give a key of the item, or the whole list")
    for leaf in [(), *(tuple(key.split(".")) for key in leaves)]:
        lines[(*path, *leaf)] = f"override {override!r}"
    if value and isinstance(value, dict) and isinstance(below := at.get(path[-1]), dict):
        _fill(value, below)
    at[path[-1]] = value


def _fault(fault: Any, lines: Lines) -> str:
    inner = ("constrained-", "literal[", "function-")  # pydantic's names for the parts of a type
    path = tuple(str(part) for part in fault["loc"] if not str(part).startswith(inner))
    name, place = ".".join(path), _place(path, lines)
    if fault["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        known = _keys(path[:-1])
        above, word = ".".join((*path[:-1], "")), path[-1]
        near = get_close_matches(word, known, n=1) or [key for key in known if key.startswith(word)]
        elsewhere = [] if near and above else [key for key, _ in _all_keys(Config) if key.endswith(f".{word}")]
        meant = elsewhere or [f"{above}{one}" for one in near[:1]]
        hint = f"did you mean {' or '.join(meant)}?" if meant else f"valid: {', '.join(known)}"
        return f"{place}: {name}: no such key; {hint}"
    if fault["type"] in ("missing", "missing_argument"):
        how = f"{name}=... on the command line, or in the file" if len(path) > 1 else "a section of the file"
        return f"{place}: {name} is missing; set it ({how})"
    said = "must be true or false" if fault["type"] == "bool_type" else fault["msg"].removeprefix("Value error, ")
    return f"{place}: {name} = {fault['input']!r}: {said}"


def _place(path: KeyPath, lines: Lines) -> str:
    file = next(iter(lines.values()), "config").rsplit(":", 1)[0]
    return next((lines[path[:length]] for length in range(len(path), 0, -1) if path[:length] in lines), file)


def _keys(path: KeyPath) -> list[str]:
    """Valid keys below the section `path`."""
    section: Any = Config
    for part in path:
        # A digit stands for an item of a list of sections, whose type is tuple[Section, ...].
        section = get_args(section)[0] if part.isdigit() else section.__pydantic_fields__[part].annotation
    return list(section.__pydantic_fields__)


def _text_keys() -> set[str]:
    """Of `str`, also where it is annotated or may be none."""
    kinds = {key: (kind, *get_args(kind)) for key, kind in _all_keys(Config) if get_origin(kind) not in (dict, tuple)}
    return {key for key, each in kinds.items() if str in [getattr(one, "__origin__", one) for one in each]}


def _all_keys(section: Any, above: str = "") -> Iterator[tuple[str, Any]]:
    for name, field in section.__pydantic_fields__.items():
        yield f"{above}{name}", field.annotation
        if hasattr(field.annotation, "__pydantic_fields__"):
            yield from _all_keys(field.annotation, f"{above}{name}.")


def flatten(tree: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """{"run": {"seed": 1}} -> {"run.seed": 1}; lists stay values."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{above}{key}"
        flat |= flatten(value, f"{name}.") if isinstance(value, Mapping) else {name: value}
    return flat


def flatten_config(config: Config) -> dict[str, Any]:
    """Every key of a loaded config with its value, defaults filled in."""
    return flatten(TypeAdapter(Config).dump_python(config, mode="json"))


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Key -> both values, where they differ, in the order of `one`; ABSENT stands for a key that one side lacks."""
    values = {key: (one.get(key, ABSENT), other.get(key, ABSENT)) for key in [*one, *other]}
    return {key: (here, there) for key, (here, there) in values.items() if here != there}


def shown(value: Any) -> str:
    """A value as it is written in a config file."""
    if value is None or isinstance(value, bool):
        return {None: "none", True: "true", False: "false"}[value]
    if isinstance(value, float):
        return f"{value:g}"
    return f"[{', '.join(map(shown, value))}]" if isinstance(value, list | tuple) else str(value)
