"""metrics.jsonl and TensorBoard: one line a rollout step, on disk before the next step begins. TensorBoard also gets
the held-out accuracy before and after, the config, histograms and responses with their verdicts."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import indent
from typing import Any

import numpy as np

from megatron_dapo.monitor.catalog import check_declared
from megatron_dapo.monitor.weights_and_biases import Histograms, Row, WandbMirror
from megatron_dapo.storage.durable import drop_torn_line, naming, whole_lines

FILE = "metrics.jsonl"
NON_FINITE = "non_finite"
"""Key of a line that lists the metrics whose value was NaN or infinite; absent where there were none."""

AXES = ("rollout_step", "optimizer_step")
HEADLINES = ("evaluation/sampled", "evaluation/greedy", "accuracy/mean")
"""Metrics that TensorBoard shows beside the hyperparameters."""

LONG_TEXT = 8000
"""Characters of a response above which its middle is left out of TensorBoard: its files would grow by gigabytes."""

Value = float | int | None
Line = dict[str, Any]
"""One rollout step: metric name -> number or None, and perhaps `non_finite` -> list of names."""


class MetricsError(ValueError):
    """A metrics file that cannot be read. The message says where and why."""

    exit_code = 2


class MetricsWriter:
    """Appends to `<run_dir>/metrics.jsonl` and, if asked, to `<run_dir>/tensorboard/by_{rollout,optimizer}_step`.

    A resumed run goes on in the same file: lines of steps beyond its checkpoint stay, superseded (see `read_metrics`).
    """

    def __init__(
        self,
        run_dir: str | Path,
        *,
        tensorboard: bool,
        mirror: WandbMirror | None = None,
        done: Row | None = None,
        settings: Row | None = None,
    ) -> None:
        """
        Args:
            mirror: gets every line too, with NaN as what it is.
            done: rollout and optimizer steps after which a resumed run goes on.
            settings: config key -> value, shown by TensorBoard as hyperparameters.
        """
        self._path = Path(run_dir) / FILE
        drop_torn_line(self._path)
        self._file = self._path.open("ab")
        self._tensorboard, self._mirror = tensorboard, mirror
        self._done, self._settings = done or {}, settings or {}
        self._boards: dict[str, Any] = {}

    def write(self, values: Mapping[str, Value]) -> Line:
        """One rollout step. Returns the line as `read_metrics` gives it: what was not finite is None and is named in
        `non_finite`.

        Raises:
            UndeclaredMetricError: a name that the catalog does not hold.
        """
        check_declared(values)
        broken = [name for name, value in values.items() if value is not None and not math.isfinite(value)]
        line: Line = {name: None if name in broken else value for name, value in values.items()}
        if broken:
            line[NON_FINITE] = broken
        with naming(self._path):
            self._file.write(json.dumps(line, allow_nan=False, default=lambda number: number.item()).encode() + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        self.show(values, values)
        return line

    def show(self, at: Row, values: Row, histograms: Histograms | None = None, samples: Sequence[Row] = ()) -> None:
        """To TensorBoard and Weights & Biases alone.

        Args:
            at: has the rollout and the optimizer step.
            samples: responses as in samples.jsonl.
        """
        if self._tensorboard:
            self._write_boards(at, values)
            board, step = self._boards["rollout_step"], at["rollout_step"]
            for name, numbers in (histograms or {}).items():
                board.add_histogram(name, np.asarray(numbers), step)
            for number, sample in enumerate(samples, start=1):
                board.add_text(f"responses/{number}", sample_text(sample), step)
            board.flush()
        if self._mirror is not None:
            self._mirror.write({name: at[name] for name in AXES} | dict(values), histograms or {}, samples)

    def close(self) -> None:
        """Close all files; harmless when called again."""
        self._file.close()
        for board in self._boards.values():
            board.close()

    def _write_boards(self, at: Row, values: Row) -> None:
        # Imported here: it takes seconds, and a run without TensorBoard need not have it installed.
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        for axis in AXES:
            if axis not in self._boards:
                folder, done = self._path.parent / "tensorboard" / f"by_{axis}", self._done.get(axis, 0)
                # What a resumed run does again is hidden; step 0 is what was measured before training.
                self._boards[axis] = SummaryWriter(str(folder), purge_step=done + 1 if done else 0)
                if axis == "rollout_step" and self._settings:
                    settings = self._settings.items()
                    plain = {key: each if type(each) in (int, float) else str(each) for key, each in settings}
                    for summary in hparams(plain, dict.fromkeys(HEADLINES, 0.0)):
                        self._boards[axis].file_writer.add_summary(summary)
            for name, value in values.items():
                if value is not None:  # NaN is drawn by TensorBoard as what it is
                    self._boards[axis].add_scalar(name, value, at[axis])
            self._boards[axis].flush()


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
