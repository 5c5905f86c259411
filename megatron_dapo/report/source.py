"""A run directory, finished or not, as what the report shows. Nothing in it is trusted to be there or to be whole."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter

from megatron_dapo.monitor.health import HealthLimits
from megatron_dapo.monitor.statistics import Accuracy
from megatron_dapo.monitor.writer import FILE, Line, read_metrics
from megatron_dapo.report.evaluations import Evaluation, read_evaluations
from megatron_dapo.report.outcomes import Outcomes, count_outcomes
from megatron_dapo.storage.run_dir import misshapen

RUN_FILES = ("config.yaml", FILE, "ledger.jsonl", "manifest.json", "summary.json")
"""A folder that holds none of these is no run."""


_HELD_OUT = TypeAdapter(dict[str, dict[str, Accuracy] | None])


class ReportError(ValueError):
    """A folder of which no report can be made. The message says why."""

    exit_code = 2


@dataclass(frozen=True, kw_only=True)
class Run:
    """What is known of one run; empty where its file is missing, with a line in `notes` where it is broken."""

    path: Path
    name: str
    lines: list[Line]
    """metrics.jsonl, without what a resume did again."""
    config: Mapping[str, Any]
    """config.yaml as it is on disk: a report must also be made of runs of another version."""
    summary: Mapping[str, Any]
    """summary.json: only a finished run has it."""
    before: Mapping[str, Mapping[str, Accuracy] | None]
    """Held-out figures before training (`before`, `baseline`), also of a run under way."""
    manifest: Mapping[str, Any]
    samples: list[dict[str, Any]]
    outcomes: Outcomes | None
    evaluations: list[Evaluation] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def steps(self) -> int:
        """Rollout steps done."""
        return int(self.lines[-1]["rollout_step"]) if self.lines else 0

    @property
    def planned(self) -> int | None:
        """Rollout steps that the config asks for."""
        wanted = self.setting("run.rollout_steps")
        return wanted if isinstance(wanted, int) else None

    @property
    def finished(self) -> bool:
        return bool(self.summary)

    @property
    def parameters(self) -> int | None:
        """Parameters of the model, as the trainer counted them."""
        count = look_up(self.manifest, "trainer.parameters")
        return count if isinstance(count, int) else None

    @property
    def health_limits(self) -> HealthLimits:
        """Those that its config sets, else the defaults."""
        asked = ((name, self.setting(f"monitor.{name}")) for name in ("mismatch_warn", "mismatch_stop"))
        bounds: dict[str, Any] = {name: value for name, value in asked if isinstance(value, int | float)}
        return HealthLimits(**bounds)

    def total(self, name: str) -> float:
        """Sum of a metric over the run; 0 where it was never measured."""
        return sum(line.get(name) or 0 for line in self.lines)

    def setting(self, key: str) -> Any:
        """Value of a config key (`algorithm.clip.high`), None if the file lacks it."""
        return look_up(self.config, key)


def look_up(tree: Any, key: str) -> Any:
    """look_up({"a": {"b": 1}}, "a.b") == 1; None where there is no such key."""
    for part in key.split("."):
        tree = tree.get(part) if isinstance(tree, Mapping) else None
    return tree


def read_run(path: str | Path, *, needs_files: bool = True, needs_ledger: bool = True) -> Run:
    """All that is readable in the run directory `path`.

    Args:
        needs_files: whether a folder without any of RUN_FILES is refused; a run that is starting has none yet.
        needs_ledger: whether the ledger is read: of a long run seconds, and a gigabyte for a million prompts' events.

    Raises:
        ReportError: no such folder, or none of a run's files is in it.
        MetricsError: metrics.jsonl is broken in the middle: the curves would lie.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise ReportError(f"{folder}: no such folder; give a run directory (`run.dir` of its config)")
    if needs_files and not any((folder / name).exists() for name in RUN_FILES):
        raise ReportError(f"{folder}: no run directory, it holds none of {', '.join(RUN_FILES)}")
    notes: list[str] = []
    summary = _mapping(folder / "summary.json", notes)
    stored = _mapping(folder / "heldout_before.json", notes)
    begun = {part: stored.get(part) or {} for part in ("before", "baseline")}
    before = {part: {way: answers["figures"] for way, answers in ways.items()} for part, ways in begun.items()}
    lines = read_metrics(folder)
    if needs_files and not (folder / FILE).exists():
        notes.append(f"{FILE} is missing: no rollout step was finished, or the file was removed.")
    return Run(
        path=folder,
        name=folder.resolve().name,
        lines=lines,
        config=_mapping(folder / "config.yaml", notes),
        summary=summary,
        before=_HELD_OUT.validate_python(summary.get("heldout") or before),
        manifest=_mapping(folder / "manifest.json", notes),
        samples=_samples(folder / "samples.jsonl", notes),
        outcomes=count_outcomes(folder / "ledger.jsonl", notes) if needs_ledger else None,
        evaluations=read_evaluations(folder, int(lines[-1]["rollout_step"]) if lines else 0, notes),
        notes=notes,
    )


def _mapping(path: Path, notes: list[str]) -> dict[str, Any]:
    """A JSON or YAML file that holds an object; {} if it is missing, {} and a note if it is something else, or of
    another shape than a run's."""
    if not path.exists():
        return {}
    try:
        text = path.read_text(encoding="utf-8")
        content = yaml.safe_load(text) if path.suffix == ".yaml" else json.loads(text)
    except (OSError, ValueError, yaml.YAMLError) as error:
        notes.append(f"{path.name} cannot be read: {str(error).splitlines()[0]}")
        return {}
    if not isinstance(content, dict):
        notes.append(f"{path.name} holds no object.")
        return {}
    if wrong := misshapen(path.name, text):
        notes.append(f"{path.name} is not as a run writes it and is left out ({wrong}); restore it from a copy.")
        return {}
    return content


def _samples(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    """Responses in the order of their steps; those of steps that a resumed run did again are left out."""
    if not path.exists():
        return []
    samples: list[dict[str, Any]] = []
    broken = 0
    for line in path.read_bytes().splitlines():
        try:
            sample = json.loads(line)
        except ValueError:
            sample = None
        if not isinstance(sample, dict) or not isinstance(sample.get("rollout_step"), int):
            broken += 1
            continue
        while samples and samples[-1]["rollout_step"] > sample["rollout_step"]:
            samples.pop()
        samples.append(sample)
    if broken:
        notes.append(f"{path.name}: {broken} lines cannot be read and are left out.")
    return samples
