"""A run directory, finished or not, as what the report shows. Nothing in it is trusted to be there or to be whole."""

import json
import re
from collections.abc import Iterator, Mapping
from operator import index
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from megatron_dapo.monitor.statistics import EVALUATIONS, Estimate, by_way
from megatron_dapo.monitor.writer import FILE, read_metrics
from megatron_dapo.storage.run_dir import misshapen

RUN_FILES = ("config.yaml", FILE, "ledger.jsonl", "manifest.json", "summary.json", "status.json")
"""A folder that holds none of these is no run."""


INSIDE, BESIDE = "inside the run", "beside it"
_STEPS = re.compile(r"(?:step|v)(\d+)")


class ReportError(ValueError):
    """A folder of which no report can be made. The message says why."""

    exit_code = 2


class Evaluation(NamedTuple):
    """One way of answering in one folder of `evaluations/`: ("v12", 12, BESIDE, "sampled", 30, 8, {"avg@8": ...})."""

    name: str
    step: int | None
    """Rollout steps that the weights had behind them; None where the name does not say it."""
    where: str
    way: str
    problems: int
    samples: int
    figures: Mapping[str, Estimate]
    """avg@n, and with several answers a problem pass@n and cons@n."""


class Run:
    """What is known of one run; empty where its file is missing, with a line in `notes` where it is broken."""

    def __init__(self, path: str | Path) -> None:
        """`path`: the run directory.

        Raises:
            ReportError: none of a run's files is there.
            MetricsError: metrics.jsonl is broken in the middle: the curves would lie.
        """
        self.path = Path(path)
        if not any((self.path / name).exists() for name in RUN_FILES):
            raise ReportError(f"{path}: no run directory (`run.dir` of a config), holds none of {', '.join(RUN_FILES)}")
        self.name = self.path.resolve().name
        self.notes: list[str] = []
        self.summary = self._mapping("summary.json")
        """Only a finished run has it."""
        stored = self._mapping("heldout_before.json")
        begun = {stage: stored.get(stage) or {} for stage in ("before", "baseline")}
        before = {stage: {way: answers["figures"] for way, answers in ways.items()} for stage, ways in begun.items()}
        self.held_out = by_way(self.summary.get("heldout") or before)
        """Way of answering -> stage -> figures; of a run under way those before training."""
        self.lines = read_metrics(self.path)
        """metrics.jsonl, without what a resume did again."""
        if not (self.path / FILE).exists():
            self.notes.append(f"{FILE} is missing: no rollout step was finished, or the file was removed.")
        self.steps = int(self.lines[-1]["rollout_step"]) if self.lines else 0
        """Rollout steps done."""
        self.config = self._mapping("config.yaml")
        """As it is on disk: a report must also be made of runs of another version."""
        wanted = self.setting("run.rollout_steps")
        self.planned: int | None = wanted if isinstance(wanted, int) else None
        """Rollout steps that the config asks for."""
        self.manifest = self._mapping("manifest.json")
        self.parameters: int | None = look_up(self.manifest, "trainer.parameters")
        """Parameters of the model, as the trainer counted them."""
        self.samples = self._samples(self.path / "samples.jsonl")
        """Responses in the order of their steps; those that a resumed run made again are left out, but its first."""
        self.evaluations = read_evaluations(self.path, self.steps, self.notes)

    @property
    def alarm_bounds(self) -> dict[str, Any]:
        """Arguments of HealthMonitor that its config decides, where the file has them."""
        warn = self.setting("monitor.mismatch_warn")
        told = {"mismatch_warn": float(warn)} if isinstance(warn, int | float) else {}
        return told | {"filter": str(self.setting("algorithm.dynamic_sampling.filter"))}

    def total(self, name: str) -> float:
        """Sum of a metric over the run; 0 where it was never measured."""
        return sum(line.get(name) or 0 for line in self.lines)

    def setting(self, key: str) -> Any:
        """Value of a config key (`algorithm.clip.high`), None if the file lacks it."""
        return look_up(self.config, key)

    def _mapping(self, name: str) -> dict[str, Any]:
        """A JSON or YAML file that holds an object; {} if it is missing, {} and a note if it cannot be read or is of
        another shape than a run's."""
        try:
            text = (self.path / name).read_text(encoding="utf-8")
            content = yaml.safe_load(text) if name.endswith(".yaml") else json.loads(text)
            wrong = "no object" if not isinstance(content, dict) else misshapen(name, text)
        except FileNotFoundError:
            return {}
        except OSError as error:
            self.notes.append(f"{name} cannot be read and is left out: {error.strerror}.")
            return {}
        except (ValueError, yaml.YAMLError) as error:
            content, wrong = {}, str(error).splitlines()[0]
        if wrong:
            self.notes.append(f"{name} is not as a run writes it and is left out ({wrong}); restore it from a copy.")
        return {} if wrong else content

    def _samples(self, file: Path) -> list[dict[str, Any]]:
        samples: list[dict[str, Any]] = []
        broken = 0
        for line in file.read_bytes().splitlines() if file.exists() else ():
            try:
                sample = json.loads(line)
                step = index(sample["rollout_step"])
            except (ValueError, TypeError, KeyError):
                broken += 1
                continue
            while samples and samples[-1]["rollout_step"] > step:
                samples.pop()
            samples.append(sample)
        if broken:
            self.notes.append(f"{file.name}: {broken} lines cannot be read and are left out.")
        return samples


def look_up(tree: Any, key: str) -> Any:
    """look_up({"a": {"b": 1}}, "a.b") == 1; None where there is no such key."""
    for part in key.split("."):
        tree = tree.get(part) if isinstance(tree, Mapping) else None
    return tree


def read_evaluations(run: Path, last_step: int, notes: list[str]) -> list[Evaluation]:
    """In the order of their steps. One that cannot be read is left out, with a line in `notes`."""
    found: list[Evaluation] = []
    for file in (run / EVALUATIONS).glob("*/result.json"):
        name = file.parent.name
        try:
            found += [*_ways(name, last_step, json.loads(file.read_text(encoding="utf-8"))["ways"])]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            notes.append(f"{EVALUATIONS}/{name}/{file.name} cannot be read ({type(error).__name__}: {error}).")
    return sorted(found, key=lambda each: (each.step is None, each.step or 0, each.name))


def _ways(name: str, last_step: int, ways: Mapping[str, Any]) -> Iterator[Evaluation]:
    numbered = _STEPS.fullmatch(name)
    step = int(numbered[1]) if numbered else {"before": 0, "after": last_step}.get(name)
    where = INSIDE if name.startswith("step") or name in ("before", "baseline", "after") else BESIDE
    for way, about in ways.items():
        problems, samples = about["problems"], about["samples"]
        names = [f"{figure}@{samples}" for figure in ("avg", *(("pass", "cons") if samples > 1 else ()))]
        ends = {each: {end: float(about["figures"][each][end]) for end in ("value", "low", "high")} for each in names}
        figures = {each: Estimate(**interval) for each, interval in ends.items()}
        yield Evaluation(name, step, where, way, problems, samples, figures)
