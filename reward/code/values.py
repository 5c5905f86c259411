"""Plain Python values over a pipe, exactly: 1 is not True, a tuple is no list, and no class of the other side comes.

A frame is its length (8 bytes, big endian) and JSON. Numbers, texts, None and booleans stand for themselves; everything
else is {"tag": content}. Example: (1, {2}) is {"t": [1, {"s": [2]}]}.
"""

import itertools
import json
import os
import select
import struct
import time
from collections import deque, namedtuple
from collections.abc import Callable, Iterable, Iterator
from datetime import date, datetime, timedelta
from decimal import Decimal
from fractions import Fraction
from functools import cache
from keyword import iskeyword
from typing import Any

FRAME_LIMIT = 16 << 20
ITEMS_LIMIT = 200_000
"""Items that are taken of an iterator."""

_LENGTH = struct.Struct(">Q")
_EXACT = 1 << 53
_EXPONENT_LIMIT = 10_000
CHANGEABLE = (list, dict, set, bytearray, deque)
"""What a function may change in place."""


class NotPlain(TypeError):
    """A value that cannot pass; the message names its type."""


def _decimal(text: str) -> Decimal:
    """Raises ValueError for one that takes all memory as an integer."""
    number = Decimal(text)
    if number.is_finite() and abs(number.adjusted()) > _EXPONENT_LIMIT:
        raise ValueError(f"a decimal of the size {number.adjusted()}")
    return number


# (tag, type, its JSON, the value of that JSON)
_SCALARS: tuple[tuple[str, type, Callable[[Any], Any], Callable[[Any], Any]], ...] = (
    ("f", float, float.hex, float.fromhex),
    ("c", complex, str, complex),
    ("b", bytes, lambda value: bytes(value).hex(), bytes.fromhex),
    ("B", bytearray, lambda value: bytes(value).hex(), bytearray.fromhex),
    ("q", Fraction, lambda q: [f"{n:x}" for n in q.as_integer_ratio()], lambda q: Fraction(*(int(n, 16) for n in q))),
    ("D", Decimal, str, _decimal),
    ("r", range, lambda value: [value.start, value.stop, value.step], lambda parts: range(*parts)),
    ("dt", datetime, datetime.isoformat, datetime.fromisoformat),
    ("da", date, date.isoformat, date.fromisoformat),
    ("td", timedelta, lambda value: [value.days, value.seconds, value.microseconds], lambda parts: timedelta(*parts)),
)
_DATES = ("dt", "da", "td")
# (tag, type, the value of a list of its items)
_CONTAINERS: tuple[tuple[str, type[Iterable[Any]], Callable[[list[Any]], Any]], ...] = (
    ("l", list, list),
    ("t", tuple, tuple),
    ("s", set, set),
    ("S", frozenset, frozenset),
    ("Q", deque, deque),
    ("dk", type({}.keys()), lambda items: dict.fromkeys(items).keys()),
    ("di", type({}.items()), lambda items: dict(items).items()),
    ("dv", type({}.values()), lambda items: dict(enumerate(items)).values()),
)
_READ = {tag: read for tag, _, _, read in _SCALARS} | {"n": lambda digits: int(digits, 16)}
_BUILD = {tag: build for tag, _, build in _CONTAINERS} | {"i": iter}


@cache
def _named(name: str, fields: tuple[str, ...]) -> Any:
    return namedtuple(name if name.isidentifier() and not iskeyword(name) else "nt", fields, rename=True)


def encode(value: Any, refer: Callable[[Any], Any] | None = None) -> Any:
    """JSON of a value. Subclasses become their base, iterators what is left of them.

    Args:
        refer: JSON for what is no plain value, to stand under the tag "o"; may raise NotPlain.

    Raises:
        NotPlain: a function, an object of a class, ...
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        number = int.__index__(value)
        return number if -_EXACT < number < _EXACT else {"n": hex(number)}
    for tag, kind, write, _ in _SCALARS:
        if isinstance(value, kind) and (tag not in _DATES or type(value) is kind):
            return {tag: write(value)}
    if isinstance(value, dict):
        return {"d": [[encode(key, refer), encode(item, refer)] for key, item in value.items()]}
    fields = getattr(value, "_fields", None)
    if isinstance(value, tuple) and isinstance(fields, tuple) and len(fields) == len(value):
        return {"nt": [type(value).__name__, list(map(str, fields)), *(encode(item, refer) for item in value)]}
    for tag, kind, _ in _CONTAINERS:
        if isinstance(value, kind):
            return {tag: [encode(item, refer) for item in value]}
    if isinstance(value, Iterator) and type(value).__module__ in ("builtins", "itertools"):
        items = list(itertools.islice(value, ITEMS_LIMIT + 1))
        if len(items) > ITEMS_LIMIT:
            raise NotPlain(f"an iterator of more than {ITEMS_LIMIT} items")
        return {"i": [encode(item, refer) for item in items]}
    if refer is not None:
        return {"o": refer(value)}
    raise NotPlain(f"{type(value).__name__} cannot be passed; only plain values can")


def become(value: Any, other: Any) -> None:
    """Makes one of CHANGEABLE equal to another one of its kind, in place; of another kind: nothing is done."""
    if any(isinstance(value, kind) and isinstance(other, kind) for kind in CHANGEABLE):
        value.clear()
        (value.update if isinstance(value, dict | set) else value.extend)(other)


def decode(content: Any, resolve: Callable[[Any], Any] | None = None) -> Any:
    """The value of JSON that `encode` made; `resolve` undoes its `refer`.

    Raises ValueError, TypeError, KeyError, ArithmeticError or RecursionError for any other JSON.
    """
    if content is None or isinstance(content, bool | str | int):
        return content
    if not isinstance(content, dict) or len(content) != 1:
        raise ValueError("not the JSON of a value")
    ((tag, inner),) = content.items()
    if tag == "d":
        return {decode(key, resolve): decode(item, resolve) for key, item in inner}
    if tag == "o" and resolve is not None:
        return resolve(inner)
    if tag == "nt":
        return _named(inner[0], tuple(inner[1]))(*(decode(item, resolve) for item in inner[2:]))
    if tag in _READ:
        return _READ[tag](inner)
    if tag not in _BUILD:
        raise ValueError(f"unknown tag {tag!r}")
    return _BUILD[tag]([decode(item, resolve) for item in inner])


def send(descriptor: int, message: Any) -> None:
    """Writes one frame, whole. Raises OSError if the other end is gone."""
    payload = json.dumps(message).encode("ascii")
    view = memoryview(_LENGTH.pack(len(payload)) + payload)
    while view:
        view = view[os.write(descriptor, view) :]


def receive(descriptor: int, deadline: float | None = None) -> Any:
    """Reads one frame, until `deadline` (time.monotonic).

    Raises:
        EOFError: the other end is gone, or sends what is no frame.
        TimeoutError: the deadline has passed.
    """
    (length,) = _LENGTH.unpack(_read(descriptor, _LENGTH.size, deadline))
    if length > FRAME_LIMIT:
        raise EOFError(f"a frame of {length} bytes")
    try:
        return json.loads(_read(descriptor, length, deadline))
    except (ValueError, RecursionError) as error:
        raise EOFError(f"a frame that is no JSON: {error}") from None


def _read(descriptor: int, size: int, deadline: float | None) -> bytes:
    received = bytearray()
    while len(received) < size:
        if deadline is not None:
            left = deadline - time.monotonic()
            poll = select.poll()  # as `reward.code.seccomp` allows
            poll.register(descriptor, select.POLLIN)
            if left <= 0 or not poll.poll(left * 1000):
                raise TimeoutError
        part = os.read(descriptor, size - len(received))
        if not part:
            raise EOFError("the other end is closed")
        received += part
    return bytes(received)
