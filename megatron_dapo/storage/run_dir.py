"""The run directory: one writer at a time, complete checkpoints only, everything in readable files."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from megatron_dapo.monitor.statistics import Accuracy, Answers
from megatron_dapo.storage import durable as files

OWN_NAMES = ("model", "weights", "checkpoints", "references", "rollout", "metrics.jsonl")
"""What a run replaces or removes below its directory. A directory that holds them but no run is refused."""

LEDGER = "ledger.jsonl"
STOP_FILE = "stop"
"""Its appearance stops the run, like a signal. Empty: the user's; else the number of the Slurm job that made it."""


class _Before(BaseModel, strict=True):
    before: dict[str, Answers] = {}
    baseline: dict[str, Answers] | None = None


class _Summary(BaseModel, strict=True):
    rollout_steps: int = 0
    heldout: dict[str, dict[str, Accuracy] | None] | None = None
    examples: list[Any] | None = None
    seconds: dict[str, float] | None = None


class _PromptFile(BaseModel, strict=True):
    sha256: str


class _Trainer(BaseModel, strict=True):
    layout: dict[str, int | bool | None] | None = None
    parameters: int | None = None


class _Manifest(BaseModel, strict=True):
    versions: dict[str, Any] | None = None
    trainer: _Trainer | None = None
    data: dict[str, _PromptFile] | None = None
    command: list[Any] | None = None


SHAPES: dict[str, Any] = {"heldout_before.json": _Before, "summary.json": _Summary, "manifest.json": _Manifest}
"""Shapes of the run's small JSON files: another program, or another version, may have written them."""


class RunDirError(RuntimeError):
    """The run directory cannot be used. The message says why and what to do."""

    exit_code = 2

    def __init__(self, message: str, *overrides: str) -> None:
        """`overrides`: of the command line, with which the same command goes on; none: no command does."""
        self.overrides = overrides
        super().__init__(message)


class RunDirLost(RunDirError):
    """The directory that the run began in is not at its path any more. The message says what to do."""

    exit_code = 1


class CheckpointDamaged(RunDirError):
    """The checkpoint to go on from is damaged; the message names the file and what to do."""

    def __init__(self, reason: str, intact: int | None) -> None:
        """`intact`: rollout steps of the newest intact checkpoint before it; None: there is none."""
        self.intact = intact
        remedy, overrides = "no checkpoint before it is intact; begin anew in another run.dir", list[str]()
        if intact is not None:
            overrides = [f"run.resume_step={intact}"]
            remedy = f"{overrides[0]} continues from the newest intact one before it"
        super().__init__(f"{reason}\n{remedy}", *overrides)


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """One complete checkpoint: `step` rollout steps are done."""

    step: int
    folder: Path


@contextmanager
def usable(path: str | Path) -> Iterator[None]:
    """An OSError of the body becomes a RunDirError that names the run directory and what to do."""
    try:
        yield
    except OSError as error:
        raise RunDirError(f"run.dir = {path}: {error.strerror}; choose a directory that you can write") from None


def has_run(path: Path) -> bool:
    """Whether a run began in this directory. A start that failed leaves an empty ledger, which is no run.

    Raises:
        RunDirError: that cannot be seen.
    """
    with usable(path), suppress(FileNotFoundError, NotADirectoryError):
        return (path / LEDGER).stat().st_size > 0
    return False


def refuse_what_is_there(path: Path) -> None:
    """Raise RunDirError where a new run may not begin: another one did, or files of another kind are there."""
    if has_run(path):
        raise RunDirError(f"run.dir = {path}: holds a run already; set run.resume=true or choose another directory")
    taken = [name for name in OWN_NAMES if (path / name).exists()]
    if taken and not (path / "manifest.json").exists():
        raise RunDirError(f"run.dir = {path}: holds {', '.join(taken)} but no run; choose an empty directory")


class RunDir:
    """Files of one run. Holds the directory's lock until `close`."""

    def __init__(self, path: str | Path, *, resume: bool) -> None:
        self.path = Path(path).resolve()
        self.ledger, self.logs, self.rollout = self.path / LEDGER, self.path / "logs", self.path / "rollout"
        with usable(path):
            self.logs.mkdir(parents=True, exist_ok=True)
            self._lock = files.lock_folder(self.path).lock
        self._identity = _identity(self.path)
        try:
            if not resume:
                refuse_what_is_there(self.path)
            if self.rollout.is_symlink() or self.rollout.is_file():
                raise RunDirError(f"{self.rollout}: is no folder; the run makes and removes one there; move it away")
        except RunDirError:
            self.close()
            raise

    def check_there(self) -> None:
        """Call it before writing what a resume needs: the path of a lost mount may still be a directory, and what is
        written there disappears when the mount is back.

        Raises:
            RunDirLost: another directory, or none, is at the run directory's path.
        """
        if _identity(self.path) != self._identity:
            why = "is not the directory that this run began in (was a mount lost, or the directory moved?)"
            remedy = "bring it back and set run.resume=true"
            raise RunDirLost(f"run.dir = {self.path}: {why}; what was saved stands there: {remedy}")

    def write_text(self, name: str, text: str) -> None:
        """Write a file whole or not at all. It is on disk on return, even if the machine fails."""
        files.replace_file(self.path / name, text)

    def write_json(self, name: str, content: Any) -> None:
        self.write_text(name, json.dumps(content, indent=2) + "\n")

    def read_json(self, name: str, *keys: str) -> dict[str, Any]:
        """An object that `write_json` wrote.

        Args:
            name: one of SHAPES.
            keys: what it must hold.

        Raises:
            RunDirError: the file is missing, damaged or of another shape; names it.
        """
        file = self.path / name
        try:
            text = file.read_text(encoding="utf-8")
            content: dict[str, Any] = json.loads(text)
            if wrong := misshapen(name, text):
                raise ValueError(wrong)
            if missing := [key for key in keys if key not in content]:
                raise ValueError(f"without {', '.join(missing)}")
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else f"damaged ({error})"
            raise RunDirError(f"{file}: {why}; restore it from a copy, or begin anew elsewhere") from None
        return content

    def aside(self, folder: Path) -> Path:
        """An empty folder to write into what is to become `folder`: `rollout`, or a checkpoint, which counts after
        `publish_checkpoint`. One of a kind at a time: what an earlier save or removal left unfinished goes."""
        self.check_there()
        aside = folder.with_name(f".{folder.name}.tmp")
        for left in aside.parent.glob(f".{folder.name.partition('_')[0]}*"):
            shutil.rmtree(left, ignore_errors=True)
        aside.mkdir(parents=True, exist_ok=True)
        return aside

    def publish_checkpoint(self, aside: Path, step: int) -> None:
        """Rename into place, point `latest` at it."""
        self.check_there()
        files.replace_folder(aside, aside.with_name(f"step_{step}"), durable=True)
        self._point_latest_at(step)
        self.drop_rollout()

    def keep_newest(self, count: int) -> None:
        """Remove all checkpoints but the newest `count`: minutes, where a disk is slow to free terabytes."""
        for old in self.checkpoints()[:-count]:
            files.remove_folder(old.folder)

    def drop_rollout(self) -> None:
        """Remove what was saved of a rollout: it belongs to one checkpoint alone."""
        if self.rollout.exists():
            files.remove_folder(self.rollout)

    def _point_latest_at(self, step: int) -> None:
        files.replace_file(self.path / "checkpoints" / "latest", f"step_{step}\n")

    def reference(self, step: int) -> Path:
        """Folder of the weights that became the KL term's reference after rollout step `step`."""
        return self.path / "references" / f"step_{step}"

    def checkpoints(self) -> list[Checkpoint]:
        """Complete checkpoints, oldest first."""
        return _checkpoints(self.path)

    def latest_checkpoint(self) -> Checkpoint | None:
        return next(reversed(self.checkpoints()), None)

    def go_back_to(self, step: int) -> None:
        """Make the checkpoint after rollout step `step` the newest. Later ones, and the summary of a run that ended,
        are kept under another name.

        Raises:
            RunDirError: there is none; says which there are.
        """
        steps = [checkpoint.step for checkpoint in self.checkpoints()]
        if step not in steps:
            there = ", ".join(f"step {found}" for found in steps) or "none"
            raise RunDirError(f"run.resume_step = {step}: {self.path / 'checkpoints'} holds {there}")
        self.set_results_aside(step)
        self._point_latest_at(step)  # first: it must not name what is not there any more
        for later in self.checkpoints():
            if later.step > step:
                os.replace(later.folder, _unused(later.folder.with_name(f"set_aside.{later.folder.name}")))

    def set_results_aside(self, step: int) -> None:
        """The run goes on after rollout step `step`: with a summary it would be taken for finished, its exported model
        for the newest, and evaluations of later steps, which are to come, for its own."""
        numbered = [each for each in self.path.glob("evaluations/step*") if each.name[4:].isdigit()]
        later = [each for each in numbered if int(each.name[4:]) > step]
        for there in (*(self.path / name for name in ("summary.json", "model", "evaluations/after")), *later):
            if there.exists():
                os.replace(there, _unused(self.path / f"set_aside.{there.name}"))

    def close(self) -> None:
        self._lock.release()


def misshapen(name: str, text: str) -> str | None:
    """What is wrong with the JSON of the file `name`, and where in it; None where nothing is, or no shape is known.
    More keys than are known are nothing wrong."""
    if name not in SHAPES:
        return None
    try:
        SHAPES[name].model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        return f"{'.'.join(map(str, first['loc'])) or 'the whole'}: {first['msg'].lower()}"
    return None


def newest_step(path: Path) -> int:
    """Rollout steps that the newest complete checkpoint of a run directory stands for; 0 without one.

    Raises:
        RunDirError: no directory can be at this path.
    """
    with usable(path):
        found = _checkpoints(path)
    return found[-1].step if found else 0


def _checkpoints(path: Path) -> list[Checkpoint]:
    named = ((folder.name.removeprefix("step_"), folder) for folder in (path / "checkpoints").glob("step_*"))
    found = sorted((int(step), folder) for step, folder in named if step.isdigit() and folder.is_dir())
    return [Checkpoint(step=step, folder=folder) for step, folder in found]


def _unused(path: Path) -> Path:
    """`path`, or the first of path.2, path.3, ... that is not there."""
    names = chain([path.name], (f"{path.name}.{number}" for number in count(2)))
    return next(free for name in names if not (free := path.with_name(name)).exists())


def _identity(folder: Path) -> tuple[int, int] | None:
    """Device and inode of the lock file, which is never replaced while a run holds it; None without one."""
    with suppress(OSError):
        found = (folder / files.LOCK_NAME).stat()
        return found.st_dev, found.st_ino
    return None
