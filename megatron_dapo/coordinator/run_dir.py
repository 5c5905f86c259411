"""The run directory: one writer at a time, complete checkpoints only, everything in readable files."""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

OWN_NAMES = ("model", "weights", "checkpoints", "metrics.jsonl")
"""What a run replaces or removes below its directory: nothing of that may be somebody else's."""


class RunDirError(RuntimeError):
    """The run directory cannot be used. The message says why and what to do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """One complete checkpoint: `step` rollout steps are done."""

    step: int
    folder: Path


class RunDir:
    """Files of one run. Holds the directory's lock until `close`."""

    def __init__(self, path: str | Path, *, resume: bool) -> None:
        self.path = Path(path).resolve()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            (self.path / "logs").mkdir(exist_ok=True)
        except OSError as error:
            raise RunDirError(f"run.dir = {path}: {error.strerror}; choose a directory that can be written") from None
        self._lock = FileLock(str(self.path / ".lock"))
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            holder = _read_or(self.path / ".holder", "another process")
            raise RunDirError(
                f"run.dir = {self.path}: a live run holds it ({holder}); wait for it or choose another"
            ) from None
        except OSError as error:
            raise RunDirError(f"run.dir = {path}: {error.strerror}; choose a directory of your own") from None
        (self.path / ".holder").write_text(f"process {os.getpid()}")
        if not resume and not self._has_run():
            taken = [name for name in OWN_NAMES if (self.path / name).exists()]
            if taken:
                self.close()
                raise RunDirError(
                    f"run.dir = {self.path}: holds {', '.join(taken)} but no run; choose an empty directory"
                )
        if self._has_run() and not resume:
            self.close()
            raise RunDirError(
                f"run.dir = {self.path}: holds a run already; set run.resume=true or choose another directory"
            )

    def _has_run(self) -> bool:
        """A start that failed leaves an empty ledger, which is no run."""
        return self.ledger.exists() and self.ledger.stat().st_size > 0

    @property
    def ledger(self) -> Path:
        return self.path / "ledger.jsonl"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def write_text(self, name: str, text: str) -> None:
        """Write a file whole or not at all."""
        aside = self.path / f".{name}.tmp"
        aside.write_text(text, encoding="utf-8")
        os.replace(aside, self.path / name)

    def write_json(self, name: str, content: Any) -> None:
        self.write_text(name, json.dumps(content, indent=2) + "\n")

    def checkpoint_aside(self, step: int) -> Path:
        """An empty folder to write a checkpoint into before `publish_checkpoint` makes it count."""
        aside = self.path / "checkpoints" / f".step_{step}.tmp"
        if aside.exists():
            shutil.rmtree(aside)
        aside.mkdir(parents=True)
        return aside

    def publish_checkpoint(self, aside: Path, step: int, keep: int) -> Checkpoint:
        """Rename into place, point `latest` at it, remove all but the newest `keep`."""
        folder = self.path / "checkpoints" / f"step_{step}"
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(aside, folder)
        latest = self.path / "checkpoints" / ".latest.tmp"
        latest.write_text(folder.name + "\n")
        os.replace(latest, self.path / "checkpoints" / "latest")
        _sync_folder(self.path / "checkpoints")
        for old in self.checkpoints()[:-keep]:
            shutil.rmtree(old.folder)
        return Checkpoint(step=step, folder=folder)

    def checkpoints(self) -> list[Checkpoint]:
        """Complete checkpoints, oldest first."""
        found = [
            Checkpoint(step=int(folder.name.removeprefix("step_")), folder=folder)
            for folder in (self.path / "checkpoints").glob("step_*")
            if folder.is_dir() and folder.name.removeprefix("step_").isdigit()
        ]
        return sorted(found, key=lambda checkpoint: checkpoint.step)

    def latest_checkpoint(self) -> Checkpoint | None:
        found = self.checkpoints()
        return found[-1] if found else None

    def close(self) -> None:
        (self.path / ".holder").unlink(missing_ok=True)
        self._lock.release()


def _read_or(path: Path, otherwise: str) -> str:
    return path.read_text().strip() if path.exists() else otherwise


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
