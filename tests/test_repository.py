"""Rules on the source tree: who may import whom, what stays light, how long a file is, that named commands exist."""

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_dapo.config import load_config

ROOT = Path(__file__).parents[1]
PROJECT = {"megatron_dapo", "rollout", "reward", "tools", "examples", "tests"}
HEAVY = {"torch", "ray", "megatron", "sglang", "transformers", "aiohttp"}

ONLY = {"megatron_dapo/algorithm": {"megatron_dapo.algorithm", "torch", "numpy", "jaxtyping"}}
"""Package to the only modules that it may import besides the standard library."""

BANNED = {
    "reward": PROJECT - {"reward"},
    "rollout": PROJECT - {"rollout"},
    "megatron_dapo": {"tools", "examples", "tests"},
    "megatron_dapo/actor": {"megatron_dapo.coordinator", "megatron_dapo.cli", "ray", "rollout", "reward", "sglang"},
    "megatron_dapo/config": HEAVY,
}
"""Package to what none of its files may import, at the top or inside a function."""

LINES = 400


def python_files(folder: str = ".") -> list[Path]:
    """The committed or committable Python files below `folder`."""
    return [path for path in tracked_files(folder) if path.suffix == ".py"]


def tracked_files(folder: str = ".") -> list[Path]:
    listing = ["git", "ls-files", "-co", "--exclude-standard", "-z", "--", folder]
    names = subprocess.run(listing, cwd=ROOT, capture_output=True, check=True, text=True).stdout.split("\0")
    return [ROOT / name for name in names if name and (ROOT / name).is_file()]


def imports(file: Path, root: Path = ROOT) -> Iterator[str]:
    """Every module that `file` imports anywhere, with full names; `from a import b` gives `a.b`."""
    package = file.relative_to(root).with_suffix("").parts[:-1]
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and _called(node.func) in ("import_module", "__import__") and node.args:
            name = node.args[0]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                yield name.value


def _called(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def within(module: str, packages: set[str]) -> bool:
    return any(module == package or module.startswith(package + ".") for package in packages)


@pytest.mark.parametrize("package", BANNED)
def test_no_package_imports_what_it_must_not(package: str) -> None:
    files = python_files(package)
    assert files, f"{package} has no Python file: the rule would hold for nothing"
    bad = {str(file.relative_to(ROOT)): [m for m in imports(file) if within(m, BANNED[package])] for file in files}
    assert not {file: modules for file, modules in bad.items() if modules}


@pytest.mark.parametrize("package", ONLY)
def test_a_pure_package_imports_only_its_tools(package: str) -> None:
    for file in python_files(package):
        bad = [
            m for m in imports(file) if m.split(".")[0] not in sys.stdlib_module_names and not within(m, ONLY[package])
        ]
        assert not bad, f"{file.relative_to(ROOT)} imports {bad}; {package} may import {sorted(ONLY[package])}"


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import ray", "ray"),
        ("def f():\n    from rollout.fleet.fleet import RolloutFleet", "rollout.fleet.fleet.RolloutFleet"),
        ("from .. import coordinator", "megatron_dapo.coordinator"),
        ("from ..coordinator import loop", "megatron_dapo.coordinator.loop"),
        ("import importlib\nimportlib.import_module('sglang.srt')", "sglang.srt"),
    ],
)
def test_the_rule_sees_every_kind_of_import(source: str, found: str, tmp_path: Path) -> None:
    file = tmp_path / "megatron_dapo" / "actor" / "step.py"
    file.parent.mkdir(parents=True)
    file.write_text(source)
    assert found in imports(file, tmp_path)


@pytest.mark.parametrize(
    "module", ["megatron_dapo.config", "megatron_dapo.cli.main", "megatron_dapo.coordinator.inputs"]
)
def test_what_a_login_node_imports_stays_light(module: str) -> None:
    code = f"import sys, json, {module}; print(json.dumps(sorted(m.split('.')[0] for m in sys.modules)))"
    loaded = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=True, text=True, timeout=60
    )
    assert not HEAVY & set(json.loads(loaded.stdout))


def test_files_stay_readable_in_one_sitting() -> None:
    long = {str(f.relative_to(ROOT)): n for f in python_files() if (n := len(f.read_text().splitlines())) > LINES}
    assert not long, f"above {LINES} lines: {long}"


def test_no_file_names_a_place_on_one_machine() -> None:
    place = re.compile(rb"(?<![\w.$}])/(?:root|work|Users|home/\w+|tmp/[a-z]\d+|opt/(?:pypi|wheels))(?:/|\b(?![\w-]))")
    found = [
        f"{f.relative_to(ROOT)}: {m.group().decode()}" for f in tracked_files() for m in place.finditer(f.read_bytes())
    ]
    assert not found


@pytest.mark.parametrize(
    "config", [pytest.param(f, id=f.stem) for f in tracked_files("examples") if f.suffix == ".yaml"]
)
def test_every_example_config_is_valid(config: Path) -> None:
    load_config(config)


def documents() -> str:
    return "\n".join(file.read_text() for file in tracked_files() if file.suffix == ".md")


def code_of(markdown: str) -> str:
    """The code blocks and the `inline code` of a document."""
    return "\n".join(re.findall(r"```.*?```|`[^`\n]+`", markdown, flags=re.DOTALL))


def test_every_make_target_that_a_document_names_exists() -> None:
    targets = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    calls = re.findall(r"(?:^|[`\s;&])make((?: [a-z][\w-]*)+)", code_of(documents()), flags=re.MULTILINE)
    assert {target for call in calls for target in call.split()} <= targets


def test_every_file_that_the_makefile_runs_exists() -> None:
    named = re.findall(r"(?<![\w./])[\w.-]+/[\w./-]+\.(?:py|yaml)\b", (ROOT / "Makefile").read_text())
    assert named
    assert not [name for name in named if not (ROOT / name).is_file()]
