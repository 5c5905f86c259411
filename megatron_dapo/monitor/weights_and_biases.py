"""Metrics to Weights & Biases as well, where `monitor.wandb.mode` asks for it; no code is sent, and text only where
`monitor.wandb.samples` asks for it."""

import importlib.util
import os
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from megatron_dapo.config.base import ConfigError
from megatron_dapo.config.run_config import WandbConfig

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
        raise ConfigError(
            f"monitor.wandb.mode = {config.mode}: the package wandb is not installed; install it (pip install "
            "'megatron-dapo[wandb]') or set monitor.wandb.mode=off"
        )
    # As wandb itself, which brings it, looks for a login.
    from requests.utils import get_netrc_auth

    host = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")
    if config.mode == "online" and not (os.environ.get("WANDB_API_KEY") or get_netrc_auth(host)):
        raise ConfigError(
            "monitor.wandb.mode = online: no key; run `wandb login`, set WANDB_API_KEY, or set "
            "monitor.wandb.mode=offline and send the run later with `wandb sync`"
        )


class WandbMirror:
    """One run on Weights & Biases, over rollout steps. Use as a context: its end says whether the run failed.

    A step that a resumed run does again keeps its first value there: Weights & Biases takes no step twice.
    """

    def __init__(self, config: WandbConfig, run_dir: Path, settings: Mapping[str, Any]) -> None:
        """`settings`: config key -> value, shown beside the curves.

        Raises:
            ConfigError: Weights & Biases refuses, or cannot be reached.
        """
        # Imported here: few runs use it, and it need not be installed.
        import wandb

        self._wandb, self._samples = wandb, config.samples

        file = run_dir / ID_FILE
        if not file.exists():
            file.write_text(uuid.uuid4().hex[:12] + "\n")
        try:
            self._run = wandb.init(
                project=config.project,
                entity=config.entity,
                name=config.name or run_dir.name,
                id=file.read_text().strip(),
                resume="allow",
                mode=config.mode,
                dir=str(run_dir),
                config=dict(settings),
                settings=wandb.Settings(console="off", silent=True, disable_git=True, disable_code=True),
            )
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
        self._run.log(row, step=int(row["rollout_step"]))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._run.finish(exit_code=int(kind is not None))
