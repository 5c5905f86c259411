"""The tests' process: a fork of the worker that has the tests, and calls the tested code where that is.

What the tests call by name is a stand-in that asks the sandbox and gets plain values back. So whatever the tested code
does to its own process, to builtins, at exit, to frames or files: there is no test to find there and no verdict to
overwrite. The most it can do is to give an answer, which the tests compare: a plain value, of a built-in type whose
`==` and `<` are Python's own. The tests come out of a data file, so they are confined
too: they may read Python's files (`reward.code.landlock`), to import what they need, and write none.
"""

import builtins
import io
import itertools
import os
import sys
import types
import unittest
from collections.abc import Iterator
from contextlib import suppress
from functools import partialmethod
from typing import Any, NoReturn

from reward.code.landlock import confine, readable
from reward.code.sandbox import Sandbox
from reward.code.seccomp import READING, die_with_parent, hide_memory, lock
from reward.code.suite_source import RAN, SOLUTION, Suite, marked
from reward.code.values import NotPlain, become, decode, encode, receive, send


class _Ended(BaseException):
    """The deadline has passed, or the tests compare an object of the tested code, or the like: the answer would be the
    tested code's own. No `except Exception` of the tests may go on."""


class TestedCodeError(Exception):
    """The tested code raised what is no exception of Python's, ended its process, or sent what is no value."""


def passes(suite: Suite, sandbox: Sandbox, deadline: float) -> bool | None:
    """Whether the code in the sandbox passes; None if it is not known by the deadline (time.monotonic).

    Raises:
        NotPlain: it does not, and the tests had passed it what is no plain value.
    """
    result, verdict = os.pipe()
    files = readable()
    pid = os.fork()
    if pid == 0:
        try:
            die_with_parent()
            hide_memory()
            _forget(verdict, sandbox.requests, sandbox.replies)
            confine(files)
            lock(READING)
            caller = _Caller(sandbox, deadline)
            send(verdict, {"passed": _run(suite, caller), "fault": caller.fault})
        finally:
            os._exit(0)
    os.close(verdict)
    try:
        outcome = receive(result, deadline)
    except TimeoutError:
        return None
    except EOFError:
        return False
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
        os.close(result)
    if outcome["fault"] and not outcome["passed"]:
        raise NotPlain(outcome["fault"])
    return bool(outcome["passed"])


def _forget(*kept: int) -> None:
    """Lets go of what is the worker's: every other descriptor, such as its line to the pool, variables, modules."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in kept:
            with suppress(OSError):  # the one that listed them
                os.close(int(name))
    for _ in range(3):
        os.open(os.devnull, os.O_RDWR)
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115  for as long as the process lives
    for variable in [name for name in os.environ if name != "TZ" and not name.endswith("_THREADS")]:
        del os.environ[variable]
    for module in [name for name in sys.modules if name.partition(".")[0] == "reward"]:
        del sys.modules[module]


def _run(suite: Suite, caller: "_Caller") -> bool:
    try:
        module, solution, ran = types.ModuleType("tests"), types.ModuleType(SOLUTION), set[int]()
        namespace = vars(module)
        sys.modules[SOLUTION] = solution
        namespace.update(caller.stand_ins(suite) | {RAN: ran})
        vars(solution).update(namespace)
        tree, lines = marked(suite.source)
        exec(compile(tree, "<tests>", "exec", dont_inherit=True, optimize=0), namespace)
        if suite.entry is not None:
            namespace["check"](eval(compile(suite.entry.strip(), "<entry>", "eval"), namespace))
        for name, value in list(namespace.items()):
            given = isinstance(value, types.FunctionType) and _wants_arguments(value)
            if name.startswith("test") and callable(value) and not given and not isinstance(value, type | _StandIn):
                value()
        cases = unittest.defaultTestLoader.loadTestsFromModule(module)
        outcome = unittest.TextTestRunner(stream=io.StringIO()).run(cases)
        passed = outcome.wasSuccessful() and caller.answered and not caller.misused
        if passed and (unseen := sorted(lines - ran)):
            caller.fault = f"line {unseen[0]} of the tests: nothing runs what is checked there"
        return passed and not unseen
    except BaseException:  # a failed assertion, an error, sys.exit: not passed
        return False


def _wants_arguments(function: types.FunctionType) -> bool:
    wanted = function.__code__.co_argcount - len(function.__defaults__ or ())
    return wanted > 0 or function.__code__.co_kwonlyargcount > len(function.__kwdefaults__ or ())


class _Caller:
    """Asks the sandbox."""

    def __init__(self, sandbox: Sandbox, deadline: float) -> None:
        self._sandbox, self._deadline = sandbox, deadline
        self.answered = False
        """Whether the tested code has said anything yet."""
        self.misused = False
        """Whether the tests left it to an object of the tested code what they are about to find."""
        self._objects: dict[str, _StandIn] = {}
        """One for each object, so that `is` tells them apart."""
        self._exceptions: dict[str, type[Exception]] = {}
        """What the tests expect of the exceptions that the tested code defines."""
        self.fault = ""
        """What the tests wanted to pass that cannot be passed."""

    def stand_ins(self, suite: Suite) -> dict[str, Any]:
        """For each name that the tested code defines: its plain value, what calls it, or an exception of that name."""
        described = self._sandbox.ask({"names": suite.names}, self._deadline)
        found: dict[str, Any] = {}
        for name in suite.names:
            entry = described.get(name) if isinstance(described, dict) else None
            if name in suite.exceptions and (entry is None or (isinstance(entry, dict) and entry.get("exception"))):
                found[name] = self._exceptions[name] = type(name, (TestedCodeError,), {})
            elif isinstance(entry, dict):
                plain = "value" in entry
                found[name] = decode(entry["value"]) if plain else _StandIn(self, {"name": name})
                self.answered = self.answered or plain
        return found

    def call(self, target: dict[str, Any], arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """The result of a call over there."""
        try:
            passed = encode((arguments, keywords), _target_of)
        except NotPlain as error:
            self.fault = f"the tests pass the tested code a value that cannot be passed: {error}"
            raise
        return self.ask(target | {"arguments": passed}, {}, (*arguments, *keywords.values()))

    def ask(self, request: dict[str, Any], otherwise: dict[str, Any], passed: tuple[Any, ...] = ()) -> Any:
        """A plain value over there, an object, or what calls it, as `otherwise` says.

        `passed`: arguments, which a call that returns None may have changed in place. One that returns anything else
        leaves the tests theirs: else `f(x) == sorted(x)` would be true of an `f` that empties `x`."""
        try:
            reply = self._sandbox.ask(request, self._deadline)
        except TimeoutError:
            raise _Ended from None
        except (EOFError, OSError):  # its process is gone
            self.refuse()
        if not isinstance(reply, dict):
            raise TestedCodeError("its answer is none")
        self.answered = True
        return self._value(reply, otherwise, passed)

    def _value(self, reply: dict[str, Any], otherwise: dict[str, Any], passed: tuple[Any, ...] = ()) -> Any:
        if "object" in reply:
            return self._objects.setdefault(str(reply["object"]), _StandIn(self, {"object": reply["object"]}))
        if "generator" in reply:
            return self._items({"object": reply["generator"]})
        if "items" in reply:
            return reply["items"]
        if "value" not in reply and "raised" not in reply:
            return _StandIn(self, otherwise)
        try:
            if "raised" in reply:
                result = self._exception(reply)
            elif reply["value"] is None:
                for argument, left in zip(passed, reply.get("left", ()), strict=False):
                    if left is not None:
                        become(argument, decode(left["value"]))
                return None
            else:
                return decode(reply["value"])
        except (LookupError, ArithmeticError, TypeError, ValueError, RecursionError) as error:
            raise TestedCodeError(f"its answer is no value: {error}") from None
        raise result

    def _items(self, generator: dict[str, Any]) -> Iterator[Any]:
        for count in (1 << min(power, 12) for power in itertools.count()):
            for reply in self.ask(generator | {"next": count}, {}):
                if "end" in reply:
                    return
                yield self._value(reply, {})

    def _exception(self, reply: dict[str, Any]) -> Exception:
        """One of the class that the tests expect, or of Python's own or the standard library's that they may."""
        *derived, (_, nearest) = reply["raised"]
        message = str(reply["message"])
        kind: Any = vars(builtins).get(nearest)
        if not isinstance(kind, type) or not issubclass(kind, Exception | SystemExit) or issubclass(kind, _LOOPS):
            return TestedCodeError(f"{nearest}: {message}")
        if bases := [self._exceptions[name] for _, name in derived if name in self._exceptions]:
            kind = type(derived[0][1], (*bases, kind), {})
        elif kind is not Exception:  # what skips a test, say, is derived from that alone
            known = (vars(sys.modules.get(module, builtins)).get(name) for module, name in derived)
            kind = next((each for each in known if isinstance(each, type) and issubclass(each, kind)), kind)
        for arguments in (decode(reply["arguments"]["value"]) if reply.get("arguments") else (), (message,)):
            with suppress(Exception):  # some want more, and some texts are the class's own
                error = kind(*arguments)
                if str(error)[: len(message)] == message:
                    return error
        return kind.__new__(kind, message)

    def refuse(self) -> NoReturn:
        """Ends the tests, which cannot pass any more whatever they catch."""
        self.misused = True
        raise _Ended


class _StandIn:
    """A function, class or object of the tested code. It can be called, its methods too, asked for attributes, items,
    length and text, get attributes and items, and is told apart by `is`. Comparing it, its truth, and every
    other operator end the tests: what comes out of those would be the tested code's to decide."""

    __slots__ = ("_caller", "_target")

    def __init__(self, caller: _Caller, target: dict[str, Any]) -> None:
        object.__setattr__(self, "_caller", caller)
        object.__setattr__(self, "_target", target)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._caller.call(self._target, arguments, keywords)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "method" in self._target:
            raise AttributeError(name)
        return self._caller.ask(self._target | {"attribute": name}, self._target | {"method": name})

    def __setattr__(self, name: str, value: Any) -> None:
        self._caller.call(self._target | {"method": "__setattr__"}, (name, value), {})

    def _special(self, method: str, *arguments: Any) -> Any:
        if "method" in self._target:
            self._caller.refuse()
        return self._caller.call(self._target | {"method": method}, arguments, {})

    def _text(self, method: str) -> str:
        text = self._special(method)
        return text if type(text) is str else self._caller.refuse()

    __repr__ = partialmethod(_text, "__repr__")
    __str__ = partialmethod(_text, "__str__")
    __len__ = partialmethod(_special, "__len__")
    __getitem__ = partialmethod(_special, "__getitem__")
    __setitem__ = partialmethod(_special, "__setitem__")
    __delitem__ = partialmethod(_special, "__delitem__")


_TWO_SIDED = ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "divmod", "pow", "and", "or", "xor",
              "lshift", "rshift")  # fmt: skip
_ONE_SIDED = ("eq", "ne", "lt", "le", "gt", "ge", "hash", "bool", "iter", "next", "contains", "neg", "pos", "abs",
              "invert", "int", "float", "complex", "index", "round", "enter", "exit", "await", "aiter", "anext",
              "format")  # fmt: skip
for _name in (*_ONE_SIDED, *_TWO_SIDED, *(f"r{name}" for name in _TWO_SIDED)):
    setattr(_StandIn, f"__{_name}__", lambda stand_in, *_: stand_in._caller.refuse())


def _target_of(value: Any) -> dict[str, Any]:
    """What a stand-in stands for, when the tests pass it back."""
    if type(value) is not _StandIn:
        raise NotPlain(f"{type(value).__name__}; only plain values and objects of the tested code can")
    return value._target


_LOOPS = (StopIteration, StopAsyncIteration)
"""Raised in the middle of a test, these end its loops as if all were well: `all(map(f, xs))` would be true."""
