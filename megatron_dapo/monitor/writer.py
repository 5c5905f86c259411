"""metrics.jsonl and TensorBoard: one line a rollout step, on disk before the next step begins. TensorBoard also gets
the held-out accuracy before and after, the config, histograms and responses with their verdicts.

To Weights & Biases as well, where `monitor.wandb.mode` asks for it; no code is sent, and text only where
`monitor.wandb.samples` asks for it.
"""

import importlib.util
import json
import math
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from textwrap import indent
from typing import Any

import numpy as np

from megatron_dapo.config.base import ConfigError
from megatron_dapo.config.run_config import WandbConfig
from megatron_dapo.storage.durable import append_lines, naming, whole_lines

Row = Mapping[str, Any]
Histograms = Mapping[str, Sequence[float]]
"""Name -> the values counted."""

ID_FILE = "wandb_id"
"""In the run directory: a resumed run goes on in the same place."""


def check_wandb(config: WandbConfig) -> None:
    """Whether it could be used, before anything is started.

    Raises:
        ConfigError: the package is not installed, or `online` has no key.
    """
    if config.mode == "off":
        return
    if importlib.util.find_spec("wandb") is None:
        remedy = "install it (pip install 'megatron-dapo[wandb]') or set monitor.wandb.mode=off"
        raise ConfigError(f"monitor.wandb.mode = {config.mode}: the package wandb is not installed; {remedy}")
    # As wandb itself, which brings it, looks for a login.
    from requests.utils import get_netrc_auth

    host = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")
    if config.mode == "online" and not (os.environ.get("WANDB_API_KEY") or get_netrc_auth(host)):
        remedy = "run `wandb login`, set WANDB_API_KEY, or set monitor.wandb.mode=offline"
        raise ConfigError(f"monitor.wandb.mode = online: no key; {remedy} and send the run later with `wandb sync`")


class WandbMirror(AbstractContextManager["WandbMirror"]):
    """One run on Weights & Biases, over rollout steps. Use as a context: its end says whether the run failed.

    A step that a resumed run does again keeps its first value there: Weights & Biases takes no step twice.
    """

    def __init__(self, config: WandbConfig, run_dir: Path, settings: Row, report: Callable[[str], None]) -> None:
        """`settings`: config key -> value, shown beside the curves. `report`: gets what could not be shown.

        Raises:
            ConfigError: Weights & Biases refuses, or cannot be reached.
        """
        # Imported here: few runs use it, and it need not be installed.
        import wandb

        self._wandb, self._samples, self._report = wandb, config.samples, report
        quiet = wandb.Settings(silent=True, disable_git=True, disable_code=True, finish_timeout=60, console="off")
        file = run_dir / ID_FILE
        if not file.exists():
            file.write_text(uuid.uuid4().hex[:12] + "\n")
        try:
            named = {"project": config.project, "entity": config.entity, "name": config.name or run_dir.name}
            place = {"id": file.read_text().strip(), "resume": "allow", "mode": config.mode, "dir": str(run_dir)}
            self._run = wandb.init(**named, **place, config=dict(settings), settings=quiet)
        except wandb.errors.Error as error:
            raise ConfigError(f"monitor.wandb: {error}; set monitor.wandb.mode=offline to go on without it") from None
        self._run.define_metric("rollout_step")
        self._run.define_metric("*", step_metric="rollout_step")

    def write(self, values: Row, histograms: Histograms, samples: Sequence[Row]) -> None:
        """As `MetricsWriter.show`; `values` has the rollout step. Calls for one step become one row."""
        row: dict[str, Any] = {name: value for name, value in values.items() if value is not None}
        row |= {name: self._wandb.Histogram(numbers) for name, numbers in histograms.items()}
        if samples and self._samples:
            columns = list(dict.fromkeys(key for line in samples for key in line))
            cells = [[str(line.get(key, "")) for key in columns] for line in samples]
            row["responses"] = self._wandb.Table(columns, cells)
        try:
            self._run.log(row, step=int(row["rollout_step"]))
        except Exception as error:  # its service is a process of its own, and may die
            self._report(f"monitor.wandb: step {row['rollout_step']} is not shown ({type(error).__name__}: {error})")

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with suppress(Exception):  # the run's own end counts
            self._run.finish(exit_code=int(kind is not None))


FILE = "metrics.jsonl"
NON_FINITE = "non_finite"
"""Key of a line that lists the metrics whose value was NaN or infinite; absent where there were none."""

AXES = ("rollout_step", "optimizer_step")
HEADLINES = ("evaluation/sampled", "evaluation/greedy", "accuracy/mean")
"""Metrics that TensorBoard shows beside the hyperparameters."""

LONG_TEXT = 8000
"""Characters of a response above which its middle is left out of TensorBoard: its files would grow by gigabytes."""

Line = dict[str, Any]
"""One rollout step: metric name -> number or None, and perhaps `non_finite` -> list of names."""


class MetricsError(ValueError):
    """A metrics file that cannot be read. The message says where and why."""

    exit_code = 2


@dataclass
class MetricsWriter:
    """Appends to `<run_dir>/metrics.jsonl` and, if asked, to `<run_dir>/tensorboard/by_{rollout,optimizer}_step`.

    A resumed run goes on in the same file: lines of steps beyond its checkpoint stay, superseded (see `read_metrics`).
    """

    run_dir: Path
    _: KW_ONLY
    tensorboard: bool
    mirror: WandbMirror | None = None
    """Gets every line too, with NaN as what it is."""
    done: Row = field(default_factory=dict)
    """Rollout and optimizer steps after which a resumed run goes on."""
    settings: Row = field(default_factory=dict)
    """Config key -> value, shown by TensorBoard as hyperparameters."""

    def __post_init__(self) -> None:
        self._boards: dict[str, Any] = {}

    def write(self, values: Mapping[str, float | None]) -> Line:
        """One rollout step. Returns the line as `read_metrics` gives it: what was not finite is None and is named in
        `non_finite`."""
        broken = [name for name, value in values.items() if value is not None and not math.isfinite(value)]
        line: Line = {name: None if name in broken else value for name, value in values.items()}
        if broken:
            line[NON_FINITE] = broken
        text = json.dumps(line, allow_nan=False, default=lambda number: number.item())
        append_lines(self.run_dir / FILE, [text], durable=True)
        self.show(values, values)
        return line

    def show(self, at: Row, values: Row, histograms: Histograms | None = None, samples: Sequence[Row] = ()) -> None:
        """To TensorBoard and Weights & Biases alone.

        Args:
            at: has the rollout and the optimizer step.
            samples: responses as in samples.jsonl.
        """
        if self.tensorboard:
            with naming(self.run_dir / "tensorboard"):
                self._write_boards(at, values, histograms or {}, samples)
        if self.mirror is not None:
            self.mirror.write({name: at[name] for name in AXES} | dict(values), histograms or {}, samples)

    def close(self) -> None:
        """Close all files; harmless when called again."""
        for board in self._boards.values():
            board.close()

    def _write_boards(self, at: Row, values: Row, histograms: Histograms, samples: Sequence[Row]) -> None:
        # Imported here: it takes seconds, and a run without TensorBoard need not have it installed.
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        for axis in AXES:
            if axis not in self._boards:
                folder, done = self.run_dir / "tensorboard" / f"by_{axis}", self.done.get(axis, 0)
                # What a resumed run does again is hidden; step 0 is what was measured before training.
                self._boards[axis] = SummaryWriter(str(folder), purge_step=done + 1 if done else 0)
                if axis == "rollout_step" and self.settings:
                    settings = self.settings.items()
                    plain = {key: each if type(each) in (int, float) else str(each) for key, each in settings}
                    for summary in hparams(plain, dict.fromkeys(HEADLINES, 0.0)):
                        self._boards[axis].file_writer.add_summary(summary)
            for name, value in values.items():
                if value is not None:  # NaN is drawn by TensorBoard as what it is
                    self._boards[axis].add_scalar(name, value, at[axis])
            self._boards[axis].flush()
        board, step = self._boards["rollout_step"], at["rollout_step"]
        for name, numbers in histograms.items():
            board.add_histogram(name, np.asarray(numbers), step)
        for number, sample in enumerate(samples, start=1):
            board.add_text(f"responses/{number}", sample_text(sample), step)
        board.flush()


def sample_text(sample: Row) -> str:
    """A response with its verdict in Markdown; its own text indented, so that nothing in it is Markdown. Of a long one
    the beginning and the end."""
    shown = [(key, sample[key]) for key in ("reward_shaped", "extracted", "answer", "prompt_text")]
    for turn in sample.get("earlier", ()):
        shown += [("response", turn["response"]), (turn["role"], turn["observation"])]
    text = "\n".join(f"{key}: {said}" for key, said in (*shown, ("response", sample["response"])))
    text = text if len(text) <= LONG_TEXT else f"{text[: LONG_TEXT // 2]}\n[...]\n{text[-LONG_TEXT // 2 :]}"
    return f"**{'right' if sample['accuracy'] else 'wrong'}**\n\n{indent(text, '    ')}"


def read_metrics(run_dir: str | Path) -> list[Line]:
    """Lines of a run in order of rollout step, without what a resume did again.

    A line of step s supersedes all earlier lines of steps >= s: a run that was resumed from an older checkpoint did
    them again. A torn last line (the run was killed while writing) is left out.

    Raises:
        MetricsError: a line other than a torn last one is no JSON object with a `rollout_step`, or holds a value that
            is no number.
    """
    file = Path(run_dir) / FILE
    if not file.exists():
        return []
    lines: list[Line] = []
    for place, text in whole_lines(file):
        try:
            line: Line = json.loads(text)
            if not isinstance(line["rollout_step"], int):
                raise TypeError("rollout_step is no integer")
            for name, value in line.items():
                finite = isinstance(value, int | float) and math.isfinite(value)
                if name != NON_FINITE and value is not None and not finite:
                    raise ValueError(f"{name} = {json.dumps(value)}")
        except (ValueError, TypeError, KeyError) as error:
            wanted = "an object in JSON with an integer rollout_step, whose metrics are finite numbers or null"
            raise MetricsError(f"{place}: {error}; a line is {wanted}: fix or remove it") from None
        while lines and lines[-1]["rollout_step"] >= line["rollout_step"]:
            lines.pop()
        lines.append(line)
    return lines
