"""Every command that a document names exists, with the options, config keys and example files that it names."""

import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from megatron_dapo.cli.main import app
from megatron_dapo.config import Config, load_config
from tests.docs.commands import Command, commands_of
from tests.docs.documents import ROOT, documents
from tests.docs.test_references import keys_of

DOCUMENTS = pytest.mark.parametrize("document", documents(), ids=lambda file: str(file.relative_to(ROOT)))
OTHERS = {"-m pytest", "-m venv", "-m pip", "examples/verifiers/service.py"}
"""Programs that are not ours, and one whose arguments are another command."""


@functools.cache
def product() -> dict[str, set[str]]:
    """Subcommand of `megatron-dapo` -> its options."""
    group = typer.main.get_command(app)
    assert isinstance(group, typer.core.TyperGroup)
    return {
        name: {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        | {"--help"}
        for name, command in group.commands.items()
    }


@functools.cache
def help_of(program: str, subcommand: str) -> str:
    """What `--help` prints; fails where there is no such program or subcommand."""
    call = [sys.executable, *program.split(), *([subcommand] if subcommand else []), "--help"]
    environment = os.environ | {"COLUMNS": "200", "PYTHONPATH": str(ROOT), "TERM": "dumb"}
    answer = subprocess.run(call, cwd=ROOT, capture_output=True, text=True, timeout=120, env=environment)
    return answer.stdout if answer.returncode == 0 else ""


@functools.cache
def targets() -> set[str]:
    return set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))


def faults(command: Command) -> list[str]:
    """What the command names that is not there."""
    found = []
    if command.program == "megatron-dapo":
        if not command.subcommand:
            return [] if not command.words else [f"{command.text}: no subcommand"]
        if command.subcommand not in product():
            return [f"{command.text}: no such command; there are {sorted(product())}"]
        known = product()[command.subcommand]
        found += [f"{command.text}: no option {name}" for name in command.options if name not in known]
    elif command.program == "make":
        found += [
            f"{command.text}: no target {name}" for name in command.words if "=" not in name and name not in targets()
        ]
    elif command.program not in OTHERS:
        shown = help_of(command.program, "")
        if not shown:
            return [f"{command.text}: cannot be run"]
        if command.subcommand and re.search(rf"[\s│{{,]{command.subcommand}[\s,}}]", shown):
            shown += help_of(command.program, command.subcommand)
        options = set(re.findall(r"--[a-z][\w-]*", shown))
        found += [f"{command.text}: no option {name}" for name in command.options if name not in options | {"--help"}]
    return found + _keys_and_files(command)


def _keys_and_files(command: Command) -> list[str]:
    keys = {match[1] for word in command.words if (match := re.match(r"([a-z_]+(?:\.[a-z_]+)+)=", word))}
    files = [word for word in command.words if re.match(r"examples/.*\.\w+$", word)]
    return [f"{command.text}: no config key {key}" for key in sorted(keys - keys_of(Config))] + [
        f"{command.text}: no file {name}" for name in files if not (ROOT / name).exists()
    ]


@pytest.mark.slow
@DOCUMENTS
def test_commands_exist_with_their_options(document: Path) -> None:
    assert not [fault for command in commands_of(document.read_text()) for fault in faults(command)]


def test_a_wrong_command_is_found() -> None:
    page = """
```
megatron-dapo train examples/quickstart/dapo.yaml run.dir=runs/mine   # fine
megatron-dapo trian examples/quickstart/dapo.yaml
megatron-dapo plan X.yaml --gpu-memroy 141 | tee log; make demmo
OMP_NUM_THREADS=1 python -m reward grade FILE.jsonl \\
    --verifire exact
python -m tools.gone x
megatron-dapo train examples/gone.yaml run.stepps=1
```
Or `make nothing`, not `make` alone.
```python
make = demmo
```
"""
    found = [fault for command in commands_of(page) for fault in faults(command)]
    assert [fault.rpartition(": ")[2].split(";")[0] for fault in found] == [
        "no such command",
        "no option --gpu-memroy",
        "no target demmo",
        "no option --verifire",
        "cannot be run",
        "no config key run.stepps",
        "no file examples/gone.yaml",
        "no target nothing",
    ]


def test_the_parser_takes_commands_apart() -> None:
    outer, inner = commands_of("`python examples/verifiers/service.py megatron-dapo train X.yaml run.seed=1`")
    assert (outer.program, outer.words) == ("examples/verifiers/service.py", ())
    assert (inner.program, inner.words) == ("megatron-dapo", ("train", "run.seed=1"))
    (command,) = commands_of("`python -m tools.convert_checkpoint to-hf runs/a OUT --verify --max-file-gb=2`")
    assert command.program == "-m tools.convert_checkpoint"
    assert command.subcommand == "to-hf"
    assert command.options == ("--verify", "--max-file-gb")
    assert command.words == ("to-hf", "runs/a")
    assert [c.program for c in commands_of("`VENV=x make install && megatron-dapo status RUN`")] == [
        "make",
        "megatron-dapo",
    ]
    assert list(commands_of("`make_base.py` and `the make target`")) == []


def test_the_guides_own_config_is_valid(tmp_path: Path) -> None:
    (block,) = re.findall(r"^```yaml\n(.*?)^```", (ROOT / "docs" / "guide.md").read_text(), re.S | re.M)
    file = tmp_path / "mine.yaml"
    file.write_text(block)
    config = load_config(file)
    assert (config.data.path, config.evaluation.path) == ("mine/train.jsonl", "mine/heldout.jsonl")
    assert config.actor.optimizer.warmup_rollout_steps < config.run.rollout_steps
    assert (ROOT / config.model.path / "config.json").exists()
