"""What the text of tests says of them: which names a response defines, which exceptions are expected, what must run."""

import ast
import builtins
import symtable
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

SOLUTION = "solution"
"""Tests may import what they test from the module of that name."""

_MODULES = {"bisect", "collections", "copy", "datetime", "decimal", "fractions", "functools", "heapq", "itertools",
            "json", "math", "np", "numpy", "operator", "os", "pandas", "pd", "pytest", "random", "re", "statistics",
            "string", "sys", "time", "unittest"}  # fmt: skip
RAN = "__ran__"


@dataclass(frozen=True, kw_only=True, slots=True)
class Suite:
    """Tests that are ready to be run. `names`: what they call and neither define nor find among the builtins; of these
    `exceptions`: what they expect to be raised."""

    source: str
    entry: str | None
    names: tuple[str, ...]
    exceptions: frozenset[str]


def make_suite(source: str, entry: str | None) -> Suite:
    """Raises ValueError: the tests are no Python, name nothing that a response could define, or lack an import."""
    own, names = _globals(source, "exec", "the tests are no Python")
    nodes = list(ast.walk(ast.parse(source)))
    wanted = [each for each in nodes if isinstance(each, ast.ImportFrom) and each.module == SOLUTION]
    served = {alias.name for each in wanted for alias in each.names} - {"*"}
    members = [each for each in nodes if isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name)]
    names |= (served := served | {each.attr for each in members if ast.unparse(each.value) == SOLUTION in own})
    if entry is not None:
        if "check" not in own:
            raise ValueError("there is an entry, but the tests define no check(candidate)")
        names |= _globals(entry.strip(), "eval", "the entry is no name or expression of Python")[1]
    if not names:
        raise ValueError("the tests call nothing that a response could define; a builtin's name is the builtin")
    bases = {id(each.value) for each in members}
    bare = {each.id for each in nodes if isinstance(each, ast.Name) and id(each) not in bases}
    if missing := sorted((names & _MODULES) - bare - served):
        raise ValueError(f"the tests use {missing[0]} and do not import it: it would be the response's")
    return Suite(source=source, entry=entry, names=tuple(sorted(names)), exceptions=frozenset(_expected(nodes)) & names)


def _expected(nodes: Sequence[ast.AST]) -> Iterator[str]:
    """Names of the exceptions that the tests expect."""
    for node in nodes:
        match node:
            case ast.ExceptHandler(type=ast.expr() as kinds):
                pass
            case ast.Call(func=ast.Attribute(attr="raises" | "assertRaises" | "assertRaisesRegex"), args=[kinds, *_]):
                pass
            case _:
                continue
        named = kinds.elts if isinstance(kinds, ast.Tuple) else [kinds]
        yield from (each.id for each in named if isinstance(each, ast.Name))


def marked(source: str) -> tuple[ast.Module, set[int]]:
    """The tests, where each test (of those with one name the last) and main guard notes in `RAN` that it runs; their
    lines. What only helps them, or is skipped by a decorator, need not run."""
    tree, found = ast.parse(source), dict[str, Any]()
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and _unskipped(node):
            if node.name.startswith("Test") or "TestCase" in " ".join(map(ast.unparse, node.bases)):
                found |= {f"{node.name}.{each.name}": each for each in node.body if _is_test(each)}
        elif _is_test(node) or (isinstance(node, ast.FunctionDef) and node.name == "check"):
            found[node.name] = node
        elif isinstance(node, ast.If) and "__name__" in ast.unparse(node.test):
            found |= {} if all(map(_starts, node.body)) else {"__name__": node}
    marked = [each for each in found.values() if isinstance(each, ast.If) or _unskipped(each)]
    for each in marked:
        documented = isinstance(each.body[0], ast.Expr) and isinstance(each.body[0].value, ast.Constant)
        each.body[documented:documented] = ast.parse(f"{RAN}.add({each.lineno})").body
    return tree, {each.lineno for each in marked}


def _is_test(node: ast.AST) -> TypeGuard[ast.FunctionDef | ast.AsyncFunctionDef]:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test")


def _unskipped(node: Any) -> bool:
    return "skip" not in "".join(map(ast.unparse, node.decorator_list))


def _starts(statement: Any) -> bool:
    """Whether a statement under a main guard only starts the tests, as `unittest.main()`, or prints."""
    called = ast.unparse(statement.value.func) if isinstance(getattr(statement, "value", None), ast.Call) else ""
    return called.startswith(("test", "print")) or called.rpartition(".")[2] == "main"


def _globals(source: str, mode: str, refused: str) -> tuple[set[str], set[str]]:
    """Global names that the source defines, and those that it uses and neither defines nor finds among the builtins."""
    try:
        tables = [symtable.symtable(source, "<tests>", mode)]
    except (SyntaxError, ValueError, RecursionError) as error:
        raise ValueError(f"{refused}: {error}") from None
    for table in tables:
        tables += table.get_children()
    found = [symbol for table in tables for symbol in table.get_symbols() if symbol.is_global()]
    own = {symbol.get_name() for symbol in found if symbol.is_assigned() or symbol.is_imported()}
    used = {symbol.get_name() for symbol in found if symbol.is_referenced()}
    return own, used - own - vars(builtins).keys() - {"__name__"}
