"""results.json of `run_stages`: written after every stage, with the page for a person."""

import json
import os
import shutil
import tarfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.gpu.runner.gpu_page import page, table
from tests.gpu.runner.stages import Stage

UNFINISHED = ("interrupted", "not run")


class Results:
    """results.json: what each stage found, over all commands that ran stages on this machine."""

    def __init__(self, folder: Path, device: str) -> None:
        """
        Raises:
            ValueError: the folder cannot be used, or its results.json is damaged or of another device type.
        """
        self.folder = folder
        self.file = folder / "results.json"
        self.all: dict[str, Any] = {"device": device, "commands": [], "stages": {}}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if self.file.exists():
                self.all = json.loads(self.file.read_text())
                if not (isinstance(self.all["commands"], list) and isinstance(self.all["stages"], dict)):
                    raise TypeError("commands must be a list, and stages an object")
                page(self.all), table(self.all)  # they read every field
        except OSError as error:
            raise ValueError(f"--folder {folder} cannot be used: {error}; name another one") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            why = f"{type(error).__name__}: {error}"
            raise ValueError(f"{self.file} is damaged ({why}): remove it, or name another --folder") from error
        if self.all["device"] != device:
            raise ValueError(f"{self.file} is of device {self.all['device']}, not {device}: name another --folder")

    def finished(self, stage: Stage) -> bool:
        found = self.all["stages"].get(stage.name)
        return found is not None and found["outcome"] not in UNFINISHED

    def put(self, stage: Stage, **found: Any) -> None:
        """Replaces what is known of a stage and writes everything."""
        plan = {"shows": stage.shows, "planned_s": stage.planned_s}
        self.all["stages"][stage.name] = plan | {"at": now(), "seconds": 0.0, "reason": "", "tests": {}} | found
        self.write()

    def put_unmeasured(self, stage: Stage, outcome: str, reason: str) -> None:
        """Like `put`, but a result that a run has measured stays."""
        if not self.finished(stage):
            self.put(stage, outcome=outcome, reason=reason)

    def write(self) -> None:
        beside = self.file.with_suffix(".part")
        beside.write_text(json.dumps(self.all, indent=1))
        beside.replace(self.file)
        (self.folder / "gpu.md").write_text(page(self.all))
        if out := os.environ.get("OUT"):
            Path(out).mkdir(parents=True, exist_ok=True)
            for name in ("results.json", "gpu.md"):
                shutil.copyfile(self.folder / name, Path(out) / name)
            with tarfile.open(Path(out) / "logs.tar.gz", "w:gz") as archive:
                for log in sorted(self.folder.rglob("*.log")):
                    archive.add(log, log.name)


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
