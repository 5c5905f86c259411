"""Engine and workshop: what training imports, in which direction, and how large that may become."""

from collections.abc import Set
from pathlib import Path

import pytest

from tests.import_graph import (
    ROOT,
    closure,
    code_lines,
    import_cycles,
    import_graph,
    module_name,
    product_files,
    reachable,
)

ENTRY = "megatron_dapo.cli.train"
WORKSHOP = {f"megatron_dapo.{room}" for room in ("diagnostics", "report", "plan", "doctor", "slurm")} | {"tools"}
ABOVE = {
    "megatron_dapo.storage": {"megatron_dapo.cluster", "megatron_dapo.coordinator"},
    "megatron_dapo.monitor": {"megatron_dapo.cluster", "megatron_dapo.coordinator", "megatron_dapo.experience"},
    "megatron_dapo.experience": {"megatron_dapo.cluster", "megatron_dapo.coordinator"},
    "megatron_dapo.actor": {"megatron_dapo.cluster", "megatron_dapo.coordinator", "megatron_dapo.experience"},
    "megatron_dapo.cluster": {"megatron_dapo.coordinator"},
    "rollout": {"megatron_dapo", "reward"},
    "reward": {"megatron_dapo", "rollout"},
}
"""Room to those that stand above it: nothing that it imports, directly or through others, may be in them."""

ENGINE_LINES, ENGINE_FILES = 14_500, 150
PRODUCT_LINES, TOOLS_LINES, DOCS_WORDS = 19_500, 3_500, 20_000
"""What there may be, never more: who adds takes it from something that earns less."""

LARGEST_FOLDER = 16
VERBS = "megatron_dapo/cli"
"""A verb a file."""


def within(module: str, rooms: Set[str]) -> bool:
    return any(module == room or module.startswith(f"{room}.") for room in rooms)


def test_no_files_import_each_other_in_a_circle() -> None:
    assert import_cycles(import_graph()) == []


@pytest.mark.parametrize("room", ABOVE)
def test_nothing_flows_back_up(room: str) -> None:
    graph = import_graph()
    wrong = {
        module: sorted(found)
        for module in graph
        if within(module, {room})
        and (found := {target for target in reachable(graph, [module]) if within(target, ABOVE[room])})
    }
    assert not wrong


def test_training_needs_nothing_of_the_workshop() -> None:
    assert not {module for module in closure(ENTRY) if within(module, WORKSHOP)}


def test_the_engine_stays_within_its_budget() -> None:
    files = [product_files()[module] for module in closure(ENTRY)]
    lines: dict[str, int] = {}
    for file in files:
        folder = str(file.parent.relative_to(ROOT))
        lines[folder] = lines.get(folder, 0) + code_lines(file)
    print(f"engine: {sum(lines.values())} code lines of {ENGINE_LINES}, {len(files)} files of {ENGINE_FILES}")
    assert sum(lines.values()) <= ENGINE_LINES, f"code lines that {ENTRY} imports: {sum(lines.values())}: {lines}"
    assert len(files) <= ENGINE_FILES, f"{ENTRY} imports {len(files)} files"


def test_product_tools_and_documents_stay_within_their_budgets() -> None:
    product = sum(code_lines(file) for file in product_files().values())
    assert product <= PRODUCT_LINES, f"code lines of the product: {product}"
    tools = sum(code_lines(file) for file in (ROOT / "tools").rglob("*.py"))
    assert tools <= TOOLS_LINES, f"code lines of tools: {tools}"
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
    words = sum(len(page.read_text().split()) for page in pages)
    print(f"product: {product} of {PRODUCT_LINES}; tools: {tools} of {TOOLS_LINES}; words: {words} of {DOCS_WORDS}")
    assert words <= DOCS_WORDS, f"words of the documents: {words}"


def test_every_folder_can_be_looked_over_and_every_file_has_a_name_of_its_own() -> None:
    files = list(product_files().values())
    folders = [file.parent for file in files]
    crowded = {folder for folder in folders if folders.count(folder) > LARGEST_FOLDER}
    assert crowded <= {ROOT / VERBS}
    names = [file.name for file in files if file.name not in ("__init__.py", "__main__.py", "config.py")]
    assert not {name for name in names if names.count(name) > 1}


@pytest.mark.parametrize(
    ("edges", "cycles"),
    [
        ({"a": "b", "b": "c", "c": ""}, []),
        ({"a": "b", "b": "a", "c": "a"}, [["a", "b"]]),
        ({"a": "b", "b": "c", "c": "a", "d": "d"}, [["a", "b", "c"], ["d"]]),
        ({"a": "b", "b": "a", "c": "ad", "d": "c"}, [["a", "b"], ["c", "d"]]),
    ],
)
def test_a_circle_is_found(edges: dict[str, str], cycles: list[list[str]]) -> None:
    assert import_cycles({name: frozenset(targets) for name, targets in edges.items()}) == cycles


def test_the_graph_knows_imports_inside_functions_and_the_modules_of_packages() -> None:
    graph = import_graph()
    assert "megatron_dapo.coordinator.run" in graph[ENTRY], "imported in a function"
    assert "megatron_dapo.coordinator.loop" in closure(ENTRY)
    assert "megatron_dapo.coordinator" in closure(ENTRY), "a module is loaded with its packages"
    assert module_name(Path("rollout/fleet/__init__.py")) == "rollout.fleet"


def test_code_lines_are_those_that_run(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text(
        '"""Two\nlines."""\n\n# A comment.\nX = (\n    1,\n)\n"""Of X."""\n\n\ndef f():\n    """Doc."""\n    return X\n'
    )
    assert code_lines(file) == 3 + 2
