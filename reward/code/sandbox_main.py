"""The sandboxed process, started by `reward.code.sandbox` with MODE REQUESTS REPLIES as its last arguments.

It gets the program as text and imports what that names of the standard library, behind a first lock, under which
nothing can be written or started. Then it locks itself up, and only then runs the first line. MODE `program`: does so
in a fork for each order, with the standard input and output it was given, and tells the exit code. MODE `functions`:
runs it and answers calls.
"""

import ast
import builtins
import gc
import importlib
import os
import signal
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

from reward.code import landlock, seccomp
from reward.code.values import CHANGEABLE, NotPlain, decode, encode, receive, send

_NOT_IMPORTED = {"antigravity", "idlelib", "test", "this", "tkinter", "turtle", "turtledemo"}
_ENCODINGS = ("ascii", "base64_codec", "cp1252", "cp437", "hex_codec", "idna", "latin_1", "punycode", "rot_13",
              "unicode_escape", "utf_16", "utf_16_be", "utf_16_le", "utf_32", "utf_8_sig")  # fmt: skip
_ALWAYS = ("_strptime", "linecache", "traceback", *(f"encodings.{name}" for name in _ENCODINGS))
_LATE = {"argparse": ["shutil"], "email": ["email.message", "email.parser"], "functools": ["typing", "weakref"],
         "xml": ["xml.dom.expatbuilder"]}  # fmt: skip
"""What modules of the standard library import late, when no file can be read any more."""


def main() -> None:
    """Runs the program that each frame holds."""
    mode, requests, replies = sys.argv[-3], int(sys.argv[-2]), int(sys.argv[-1])
    seccomp.die_with_parent()
    for name in _ALWAYS:
        importlib.import_module(name)
    gc.freeze()  # a fork would look through all of it when it ends: 10 ms
    send(replies, "started")
    order = receive(requests) if mode == "functions" else _in_a_fork(requests, replies)
    seccomp.limit(memory_bytes=order["memory_bytes"], cpu_s=order["cpu_s"], file_bytes=order["file_bytes"])
    code, failure = None, ""
    try:
        landlock.confine(order["readable"])
        seccomp.lock(seccomp.READING | seccomp.LOCKING)
        try:
            tree = ast.parse(order["source"], "<response>")
            _import_named(tree)
            code = compile(tree, "<response>", "exec")
        except Exception as error:  # no Python, too deep, null bytes: wrong, and nothing is run
            failure = type(error).__name__
        # Programs ask how long their input is, to read it at once; a call of newer C libraries that takes paths too.
        stdin = os.fstat(0)
        os.fstat = lambda fd: stdin
        seccomp.lock()
    except (seccomp.LockError, OSError) as error:  # the latter: a path of reward.code_reads
        send(replies, {"open": str(error)})
        return
    send(replies, {"locked": failure})
    if code is None:
        return
    for name in [name for name in sys.modules if name.partition(".")[0] == "reward"]:
        del sys.modules[name]  # not the tested code's to import
    sys.argv = ["response.py"]
    vars(builtins).update(exit=sys.exit, quit=sys.exit)  # as `site` does, which -S leaves out
    if thread := getattr(sys.modules.get("threading"), "Thread", None):  # there is one; programs recurse in another
        thread.start, thread.join = lambda self: self.run(), lambda *_, **__: None
    module = types.ModuleType("__main__" if mode == "program" else "response")
    sys.modules[module.__name__] = module  # dataclasses and pickle look there
    if mode == "program":
        os.close(requests)
        os.close(replies)
        exec(code, vars(module))
    else:
        exec(code, vars(module))
        _serve(requests, replies, vars(module))


def _in_a_fork(requests: int, replies: int) -> Any:
    """Returns the next order in a process for it alone; the one that starts it ends with the orders."""
    starter = os.getpid()
    while True:
        try:
            order = receive(requests)
        except EOFError:
            sys.exit()
        try:
            child = os.fork()
        except OSError as error:
            send(replies, {"open": f"no process can be started ({error})"})
            continue
        if child == 0:
            seccomp.die_with_parent()
            return order if os.getppid() == starter else sys.exit()  # it ended first
        signal.signal(signal.SIGTERM, lambda *_, child=child: _end(child))
        send(replies, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _end(child: int) -> None:
    """Ends the program and this process. Nobody else could wait for it, where process 1 waits for none."""
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os._exit(0)


def _import_named(tree: ast.AST) -> None:
    """Imports every module of the standard library that the program names anywhere."""
    names = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            names.add(str(node.args[0].value))  # `__import__("heapq")`
    for name in list(names):
        names.update(_LATE.get(name.partition(".")[0], ()))
    for name in sorted(names):
        top = name.partition(".")[0]
        runs = "__main__" in name.split(".")  # `venv.__main__` is a program, not a module
        if top in sys.stdlib_module_names and top not in _NOT_IMPORTED and not runs:
            try:
                importlib.import_module(name)
            except (ImportError, ValueError):  # ValueError: `f(".")`
                continue  # `from math import sin`: no module; what is really missing fails when the program asks for it


def _serve(requests: int, replies: int, namespace: dict[str, Any]) -> None:
    """Answers until the tests end. Answers are not trusted: the tests compare plain values."""
    objects: dict[int, Any] = {}
    """What the tests hold of it, by `id`: one object is one stand-in."""
    while True:
        try:
            request = receive(requests)
        except EOFError:
            return
        try:
            if "names" in request:
                found = {name: namespace[name] for name in request["names"] if name in namespace}
                kinds = {name for name, each in found.items() if isinstance(each, type) and issubclass(each, Exception)}
                reply = {name: _plain(value) or {"exception": name in kinds} for name, value in found.items()}
            else:
                reply = _answer(request, namespace, objects)
        except BaseException as error:  # the tests are told, whatever it is
            reply = _raised(error)
        send(replies, reply)


def _raised(error: BaseException) -> dict[str, Any]:
    """Its classes up to the nearest of Python's own: a test that expects a ValueError takes what is derived from it."""
    kinds = [(kind.__module__, kind.__qualname__) for kind in type(error).__mro__]
    nearest = next(at for at, (module, _) in enumerate(kinds) if module == "builtins")
    return {"raised": kinds[: nearest + 1], "message": str(error)[:1000], "arguments": _plain(error.args)}


def _answer(request: dict[str, Any], namespace: dict[str, Any], objects: dict[int, Any]) -> Any:
    def resolve(target: dict[str, Any]) -> Any:
        """What a stand-in of the tests stands for."""
        found = namespace[target["name"]] if "name" in target else objects[target["object"]]
        return getattr(found, target["method"]) if "method" in target else found

    def reply(value: Any) -> Any:
        if not isinstance(value, types.GeneratorType) and (plain := _plain(value)):
            return plain
        kind = "generator" if isinstance(value, types.GeneratorType) else "object"
        return {kind: id(objects.setdefault(id(value), value))}

    target = resolve(request)
    if "next" in request:
        return {"items": list(_some(target, request["next"], reply))}
    if "attribute" in request:
        result, passed = getattr(target, request["attribute"]), list[Any]()
        if callable(result):
            return {"callable": True}
    else:
        arguments, keywords = decode(request["arguments"], resolve)
        result, passed = target(*arguments, **keywords), [*arguments, *keywords.values()]
    if result is None:  # what it made of those that it may have changed in place
        return {"value": None, "left": [_plain(each) if isinstance(each, CHANGEABLE) else None for each in passed]}
    return reply(result)


def _some(items: Iterator[Any], count: int, reply: Callable[[Any], Any]) -> Iterator[Any]:
    """Replies for the next items of a generator, and for how it ends."""
    try:
        for _ in range(count):
            if (item := next(items, _some)) is _some:
                yield {"end": True}
                return
            yield reply(item)
    except BaseException as error:
        yield _raised(error)


def _plain(value: Any) -> Any:
    """A value as the tests get it; None if it cannot pass."""
    try:
        return {"value": encode(value)}
    except NotPlain:
        return None
