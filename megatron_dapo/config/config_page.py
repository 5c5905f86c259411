"""The configuration reference: one Markdown page made from the sections themselves, so that it cannot drift."""

import ast
import dataclasses
import inspect
from itertools import pairwise
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from megatron_dapo.config.root import Config

HEADER = """# Configuration reference

Made from the code by `make docs`; a test keeps it equal. A config is a YAML file with these sections; on the command
line a key is `section.key=value`. Unknown keys, wrong types and keys that contradict each other stop the run before it
starts. In brackets: type and default. Defaults are the paper's where the paper states one.
"""


def reference_page() -> str:
    """Markdown: a list a section. A key that an earlier section has too, with the same meaning, is named only."""
    parts, seen = [HEADER], dict[tuple[str, str], str]()
    for field in dataclasses.fields(Config):
        parts.append(_section(field.name, field.type, seen))
    return "\n".join(parts)


def _section(name: str, section: Any, seen: dict[tuple[str, str], str]) -> str:
    """`seen`: (key, entry) -> the section that has it."""
    summary = (inspect.getmodule(section).__doc__ or "").strip().splitlines()[0] if "." not in name else ""
    lines = [f"{'##' if '.' not in name else '###'} {name}", ""]
    if summary:
        lines += [summary, ""]
    meanings = _attribute_docstrings(section)
    below, same = [], []
    for field in dataclasses.fields(section):
        if dataclasses.is_dataclass(field.type):
            below.append((f"{name}.{field.name}", field.type))
            continue
        item = _item(field.type)
        if item is not None:
            below.append((f"{name}.{field.name}.N", item))
        entry = f"({_type(field.type)}, {_default_of(field)}): {meanings[field.name]}"
        if seen.setdefault((field.name, entry), name) == name:
            lines.append(f"- `{name}.{field.name}` {entry}")
        else:
            same.append(f"`{name}.{field.name}` (`{seen[field.name, entry]}`)")
    if same:
        lines.append(f"- As in another section: {', '.join(same)}.")
    if lines[-1]:
        lines.append("")
    return "\n".join(lines) + "".join("\n" + _section(*child, seen) for child in below)


def _default_of(field: "dataclasses.Field[Any]") -> str:
    if field.default is not dataclasses.MISSING:
        return f"`{_default(field.default)}`"
    factory: Any = field.default_factory
    return "required" if factory is dataclasses.MISSING else f"`{_default(factory())}`"


def _item(annotation: Any) -> Any:
    """The section that a list consists of, None for anything else."""
    if get_origin(annotation) is Annotated:
        return _item(get_args(annotation)[0])
    items = get_args(annotation) if get_origin(annotation) is tuple else ()
    return items[0] if items and dataclasses.is_dataclass(items[0]) else None


def _default(value: Any) -> str:
    if isinstance(value, FieldInfo):
        value = value.default
    if value is None or isinstance(value, bool):
        return {None: "none", True: "true", False: "false"}[value]
    if isinstance(value, tuple):
        return str(list(value))
    if isinstance(value, dict):
        return str(value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def _type(annotation: Any) -> str:
    """`int`, `a`/`b`, `list of float`, ... without the bounds, which the error messages state."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(arguments[0])
    if origin is Literal:
        return "/".join(f"`{option}`" for option in arguments)
    if origin in (Union, UnionType):
        return "/".join(_type(option) for option in arguments)
    if origin is tuple:
        return f"list of {_type(arguments[0])}"
    if origin is dict:
        return f"{_type(arguments[0])} to {_type(arguments[1])}"
    if dataclasses.is_dataclass(annotation):
        return "section"
    return "none" if annotation is type(None) else annotation.__name__


def _attribute_docstrings(section: Any) -> dict[str, str]:
    """Texts under the fields, one line each; those of the classes that it inherits from first."""
    texts: dict[str, str] = {}
    for above in section.__bases__:
        if dataclasses.is_dataclass(above):
            texts |= _attribute_docstrings(above)
    body = ast.parse(inspect.getsource(section)).body[0].body  # type: ignore[attr-defined]
    for statement, after in pairwise(body):
        if (
            isinstance(statement, ast.AnnAssign)
            and isinstance(after, ast.Expr)
            and isinstance(after.value, ast.Constant)
        ):
            texts[statement.target.id] = " ".join(str(after.value.value).split())  # type: ignore[union-attr]
    return texts
