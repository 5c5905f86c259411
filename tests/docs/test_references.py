"""What documents say of the code is there: files, functions, config keys, exit codes, errors, alarms."""

import ast
import re
from dataclasses import fields, is_dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import get_args

import pytest

from megatron_dapo.cli.exit_codes import ExitCode
from megatron_dapo.config import Config
from tests.docs.documents import ROOT, documents, inline_code

PLACES = (ROOT, ROOT / "megatron_dapo")
"""Where a path that a document names may begin, beside the document's own folder."""

FILE = re.compile(r"(?<![\w./{-])((?:[\w.-]+/)*[\w.-]+\.(?:py|toml))\b(?:: ([\w, ]+))?$")
DOCUMENTS = pytest.mark.parametrize("document", documents(), ids=lambda file: str(file.relative_to(ROOT)))
EXAMPLE_FILES = {"units_verifier.py", "two_sided.py", "largest_deviation.py", "short_first.py"}
"""Files that docs/extending.md has the reader write."""


def names_of(file: Path) -> set[str]:
    """Classes, functions and variables at the top of a module."""
    found: set[str] = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
    return found


def wrong_references(document: Path) -> list[str]:
    """Files, and names in them, that a document names and that are not there."""
    wrong = []
    for code in inline_code(document.read_text()):
        match = FILE.fullmatch(code)
        if not match or match[1] in EXAMPLE_FILES or "NAME" in match[1]:
            continue
        there = [place / match[1] for place in (*PLACES, document.parent) if (place / match[1]).is_file()]
        if not there:
            wrong.append(f"{code}: no such file")
        elif match[2] and (missing := set(match[2].split(", ")) - names_of(there[0])):
            wrong.append(f"{code}: {there[0].relative_to(ROOT)} has no {', '.join(sorted(missing))}")
    return wrong


@DOCUMENTS
def test_named_files_and_functions_exist(document: Path) -> None:
    assert not wrong_references(document)


def test_a_wrong_reference_is_found(tmp_path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "`coordinator/loop.py` `megatron_dapo/algorithm/kl.py: kl_estimate, Estimator` `algorithm/gone.py`\n"
        "`megatron_dapo/algorithm/kl.py: kl_estimate, k4`"
    )
    assert wrong_references(page) == [
        "algorithm/gone.py: no such file",
        "megatron_dapo/algorithm/kl.py: kl_estimate, k4: megatron_dapo/algorithm/kl.py has no k4",
    ]


def test_the_algorithm_page_names_a_function_for_every_row() -> None:
    text = (ROOT / "docs" / "algorithm.md").read_text().partition("## The family")[0]
    rows = [line for line in text.splitlines() if line.startswith("| ") and "| function |" not in line]
    assert len(rows) >= 11
    assert not [row for row in rows if not re.search(r"`megatron_dapo/[\w/]+\.py: \w+", row)]
    for equation in ("7", "8", "9", "11", "13"):
        assert f"eq. {equation}" in text, f"eq. {equation} of the paper has no row"


def keys_of(section: type, above: str = "") -> set[str]:
    """Every dotted key of the config, sections included."""
    found: set[str] = set()
    for field in fields(section):
        name = f"{above}{field.name}"
        found.add(name)
        for member in (field.type, *get_args(field.type)):
            if isinstance(member, type) and is_dataclass(member):
                found |= keys_of(member, f"{name}.")
    return found


FILE_ENDINGS = {"py", "yaml", "json", "jsonl", "md", "safetensors"}


def may_be_key(code: str) -> bool:
    """`run.seed` or `run.seed=1`, and neither a file nor a name in one of the packages `rollout` and `reward`."""
    section, *rest = code.split("=")[0].split(".")
    plain = bool(rest) and all(re.fullmatch("[a-z_]+", part) for part in (section, *rest))
    known = {field.name for field in fields(Config)}
    module = plain and any((ROOT / section / name).exists() for name in (rest[0], f"{rest[0]}.py"))
    return plain and section in known and rest[-1] not in FILE_ENDINGS and not module


@DOCUMENTS
def test_named_config_keys_exist(document: Path) -> None:
    named = {code.split("=")[0] for code in inline_code(document.read_text()) if may_be_key(code)}
    assert not named - keys_of(Config)


def test_a_key_is_told_from_other_names() -> None:
    keys = ["run.seed", "reward.timeout_s=3", "rollout.gone"]
    others = ["rollout.wire.reply.read_part", "reward.verdict", "config.yaml", "model.safetensors", "algorithm", "a.b"]
    assert [code for code in (*keys, *others) if may_be_key(code)] == keys


OPERATIONS = (ROOT / "docs" / "operations.md").read_text()


def test_the_runbook_has_every_exit_code() -> None:
    rows = dict(re.findall(r"^\| (\d+) \| `(\w+)` \|", OPERATIONS, flags=re.MULTILINE))
    assert rows == {str(code.value): code.name for code in ExitCode}


def test_the_runbook_has_every_error_with_its_exit_code() -> None:
    rows = re.findall(r"^- (`\w+`(?:, `\w+`)*) \((\d+)\): ", OPERATIONS, flags=re.MULTILINE)
    stated = {name: int(code) for names, code in rows for name in re.findall(r"\w+", names)}
    assert stated == error_classes() | {"OSError": ExitCode.FAILED}


def error_classes() -> dict[str, int]:
    """Every class of the product and its tools with an `exit_code` of its own."""
    found: dict[str, int] = {}
    for package in ("megatron_dapo", "rollout", "reward", "tools"):
        for file in (ROOT / package).rglob("*.py"):
            for kind in (node for node in ast.parse(file.read_text()).body if isinstance(node, ast.ClassDef)):
                for line in kind.body:
                    if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == "exit_code":
                        found[kind.name] = ExitCode(ast.literal_eval(line.value))
    return found


WAITERS = {"wait_for": "", "blocking": "", "_wait": "", "_ask": ""} | dict.fromkeys(
    ("_all_of", "_each", "_everyone"), "trainer "
)
"""Methods that wait -> what they put before the name, their first argument."""


def wait_names() -> set[str]:
    """What the coordinator waits for by name, up to the first part that is filled in."""
    found = set()
    for file in (ROOT / "megatron_dapo").rglob("*.py"):
        for call in ast.walk(ast.parse(file.read_text())):
            if not isinstance(call, ast.Call):
                continue
            partial = isinstance(call.func, ast.Name) and call.func.id == "partial"
            waiter, *arguments = call.args if partial else (call.func, *call.args)
            method = getattr(waiter, "attr", getattr(waiter, "id", ""))
            if method in WAITERS and arguments:
                what = arguments[0].values[0] if isinstance(arguments[0], ast.JoinedStr) else arguments[0]
                if isinstance(what, ast.Constant):
                    found.add(f"{WAITERS[method]}{what.value}".strip())
    return found


def test_the_runbook_has_every_wait() -> None:
    section = OPERATIONS.partition("## A run that hangs")[2].partition("\n## ")[0]
    named = re.findall(r"`([\w .-]+)`", "\n".join(re.findall(r"^- (`.*?): ", section, flags=re.MULTILINE)))
    names = wait_names()
    assert {"held-out answers", "weight version", "Ray start", "trainer write", "trainer build"} <= names
    patterns = [row.replace("...", "*") for row in named]
    missing = {name for name in names if not any(row.startswith(name) or fnmatch(name, row) for row in patterns)}
    assert not missing
    assert not {row for row in named if row.startswith("trainer ") and "..." not in row} - names, "gone"
