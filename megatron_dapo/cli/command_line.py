"""What commands share: arguments, and for `eval` and tools how they end."""

import functools
import json
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, ParamSpec

import typer
from rich.console import Console

from megatron_dapo.cli.exit_codes import ExitCode
from megatron_dapo.config import Config, load_config
from megatron_dapo.data.hub import with_local_paths

P = ParamSpec("P")

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG.yaml", help="Config file; docs/config.md lists every key.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[section.key=value ...]", help="Override keys.")]


def config_of(source: Path, overrides: Sequence[str] = ()) -> Config:
    """The config in a file, or of a run in its directory, with what `hf://` paths name fetched.

    Raises:
        ConfigError: a directory without a config; the hub does not answer.
    """
    return with_local_paths(run_config(source, overrides) if source.is_dir() else load_config(source, overrides))


def run_config(run: Path, overrides: Sequence[str] = ()) -> Config:
    """The config of a run, its relative paths as they were where the run was started, whatever the folder now."""
    stored, began = run / "config.yaml", Path()
    with suppress(OSError, ValueError, KeyError, TypeError):  # of a run of before, or damaged: paths begin here
        began = Path(json.loads((run / "manifest.json").read_text(encoding="utf-8"))["folder"])
    config = load_config(stored)
    if began == Path.cwd():
        return load_config(stored, overrides)

    def there(path: str | None) -> str | None:
        return str(began / path) if path and (began / path).exists() else path

    paths = {"model": config.model.path, "data": config.data.path, "evaluation": config.evaluation.path}
    mixture = [asdict(source) | {"path": there(source.path)} for source in config.data.mixture]
    moved = {f"{name}.path": there(path) for name, path in paths.items()} | {"data.mixture": mixture}
    return load_config(stored, [*(f"{key}={json.dumps(value)}" for key, value in moved.items()), *overrides])


LONGEST_CONTEXT, LONGEST_PROMPT = 32768, 2048
"""Tokens of prompt and response together, and of the prompt, where no config says how many."""


def model_config(folder: Path, overrides: Sequence[str] = ()) -> Config:
    """The config for a model alone: that of the run whose `model` folder it is, else what its own files say: chat
    template, type of the weights, context length, at most 2048 tokens or half of it for the prompt; a server on each
    GPU.

    Raises:
        ConfigError, TokenizerError: no such folder; an override is not valid.
    """
    import torch

    from megatron_dapo.data.hub import read_json
    from megatron_dapo.data.tokenizer import load_text_tools

    run = folder.resolve().parent / "config.yaml"
    if folder.resolve().name == "model" and run.is_file():
        print(f"settings of {run}", file=sys.stderr)
        return run_config(run.parent, [*overrides, f"model.path={json.dumps(str(folder))}"])
    told = read_json(folder / "config.json")
    context = min(told.get("max_position_embeddings") or LONGEST_CONTEXT, LONGEST_CONTEXT)
    known = {
        "model.path": str(folder),
        "model.context_length": context,
        "model.dtype": "float32" if "float32" in (told.get("dtype"), told.get("torch_dtype")) else "bfloat16",
        "data.template": "chat" if load_text_tools(folder).tokenizer.chat_template else "plain",
        "rollout.max_new_tokens": context - min(context // 2, LONGEST_PROMPT),
        "rollout.servers": max(1, torch.cuda.device_count()),
        "rollout.kv_cache_tokens": None if torch.cuda.is_available() else 2 * LONGEST_CONTEXT,
    }
    words = [f"{key}={json.dumps(value)}" for key, value in known.items()]
    return load_config(Path(__file__).with_name("model_alone.yaml"), [*words, *overrides])


def wide_console() -> Console:
    """For tables and long lines: where the output is no terminal, 200 columns in place of eighty."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else 200)


def interrupt(*_: object) -> None:
    """What SIGINT would do; a KeyboardInterrupt where it is ignored, as in a shell's background."""
    handler = signal.getsignal(signal.SIGINT)
    (handler if callable(handler) else signal.default_int_handler)(signal.SIGINT, None)


def comparison_command(compare: Callable[P, bool]) -> Callable[P, None]:
    """A command that ends with FINISHED, or with INEXACT where `compare` returns False."""

    @functools.wraps(compare)
    def command(*args: P.args, **kwargs: P.kwargs) -> None:
        # Like an interrupt from the keyboard: ranks are ended and files removed on the way out.
        signal.signal(signal.SIGTERM, interrupt)
        try:
            same = compare(*args, **kwargs)
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            raise typer.Exit(ExitCode.INTERRUPTED) from None
        raise typer.Exit(ExitCode.FINISHED if same else ExitCode.INEXACT)

    return command
