"""Which file of the product imports which, read from the source: also imports inside functions, and for type checks."""

import ast
import io
import tokenize
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("megatron_dapo", "rollout", "reward")
Graph = Mapping[str, frozenset[str]]
"""Module -> the modules of the product that it names in an import."""


@cache
def product_files() -> Mapping[str, Path]:
    """Every module of the product and its file."""
    files = (file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py")))
    return {module_name(file.relative_to(ROOT)): file for file in files}


def module_name(file: Path) -> str:
    """`a/b.py` and `a/b/__init__.py` -> a.b."""
    parts = file.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def import_graph() -> Graph:
    """Of the whole product."""
    files = product_files()
    return {module: frozenset(named_imports(module, file) & set(files)) for module, file in files.items()}


def named_imports(module: str, file: Path) -> set[str]:
    """Modules, and names that may be modules, in the import statements of a file. `from package import x` where x is no
    module of the product leaves the package itself."""
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            inside = {f"{base}.{alias.name}" for alias in node.names}
            found |= inside
            if not inside <= set(product_files()):
                found.add(base)
    return found


def import_cycles(graph: Graph) -> list[list[str]]:
    """Groups of modules that import each other, directly or through others: the strongly connected components with more
    than one member, or one that imports itself."""
    reach = {module: reachable(graph, [module]) for module in graph}
    cycles: list[list[str]] = []
    for module in graph:
        group = sorted(other for other in reach[module] if module in reach[other])
        if group and group not in cycles:
            cycles.append(group)
    return cycles


def reachable(graph: Graph, start: Iterable[str]) -> set[str]:
    """Modules that `start` import, themselves or through others. A start is in it only if something imports it."""
    seen: set[str] = set()
    todo = [target for module in start for target in graph[module]]
    while todo:
        module = todo.pop()
        if module not in seen:
            seen.add(module)
            todo += graph[module]
    return seen


def closure(entry: str) -> set[str]:
    """All modules that are loaded when `entry` has imported everything it ever does: with the packages that they are
    in."""
    graph, seen, todo = import_graph(), set(), [entry]
    while todo:
        module = todo.pop()
        if module in seen or module not in graph:
            continue
        seen.add(module)
        parts = module.split(".")
        todo += [*graph[module], *(".".join(parts[:end]) for end in range(1, len(parts)))]
    return seen


def code_lines(file: Path) -> int:
    """Lines without blanks, comments and docstrings."""
    text = file.read_text()
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        body = getattr(node, "body", None)
        for child in body if isinstance(body, list) else ():
            value = child.value if isinstance(child, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                docstrings |= set(range(child.lineno, (child.end_lineno or child.lineno) + 1))
    silent = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in silent:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)
