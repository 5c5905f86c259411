"""Is the gradient of this config the same on every layout?

    python -m tools.certify CONFIG.yaml [section.key=value ...]

Each rank's process imports this file before it knows its device, so that torch is imported in functions alone.
"""

import math
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from megatron_dapo.cli.command_line import ConfigFile, Overrides, comparison_command, config_of
from megatron_dapo.cli.main import main
from megatron_dapo.config import Config, ConfigError

if TYPE_CHECKING:
    from tools.certificate import Difference

Dtype = Literal["float32", "bfloat16"]

BOUNDS: dict[Dtype, tuple[float, float]] = {"float32": (1e-6, 2e-5), "bfloat16": (2e-2, 4e-1)}
"""Of the loss, and of the gradient: of a parameter's in float32; in bfloat16, where a small one may be all rounding, of
that of all parameters together. Float32 alone is up to 6e-6 of a parameter away from float64 on the quickstart's
experts (transformers, in both types), and two layouts round apart; an error of the reduction is far larger."""

ROUNDING = 2.5
"""In bfloat16 a layout's gradient may be so many times as far from the float32 reference as that of one process in
bfloat16: that is rounding, whose size depends on the model. Two draws of it differ by up to 1.8 on the quickstart."""

LONGEST = 256
"""Tokens of the longest response, prompt included, unless the context is shorter or the command line says more."""

ROW = "{:<22} {:<8} {:<13} {:<21} {:<9} {:<9} {:<9} {:<5} {}"
HEADER = ROW.format(
    *["layout", "budget", "micro-batches", "aggregation", "loss", "gradient", "worst"], "", "worst parameter"
)


@comparison_command
def certify(
    config: ConfigFile,
    overrides: Overrides = None,
    processes: Annotated[int | None, typer.Option(min=1, help="Most ranks of a layout; else as many as fit.")] = None,
    layouts: Annotated[int, typer.Option(min=1, help="Layouts to try, the config's own first.")] = 8,
    responses: Annotated[int, typer.Option(min=8, help="Responses of the mini-batch.")] = 16,
    longest: Annotated[int | None, typer.Option(min=8, help="Tokens of the longest, prompt included.")] = None,
    dtype: Annotated[Dtype | None, typer.Option(help="Of the layouts; float32 on the CPU, else bfloat16.")] = None,
    deadline: Annotated[float, typer.Option(min=1, help="Seconds that each layout may take.")] = 300.0,
) -> bool:
    """Compare loss and gradients of random layouts with one process in float32. Needs no Ray and no server."""
    loaded = config_of(config, overrides or [])
    from megatron_dapo.actor.model.hf_config import HFModelConfig, check_actor
    from tools.certificate import label, measure_layouts

    check_actor(HFModelConfig.load(Path(loaded.model.path)), loaded.actor)
    here, processes = _on_this_machine(loaded, processes, dtype)
    limits = Limits(here.model.dtype, *BOUNDS[here.model.dtype])
    print(f"{here.model.path} in {here.model.dtype} on {here.actor.device}, up to {processes} ranks", flush=True)
    if here.actor.layout.world_size > processes:
        print(f"not tried: the config's own layout, of {here.actor.layout.world_size} ranks; see --processes")
    verdicts = []
    for case, difference in measure_layouts(
        here,
        processes=processes,
        layouts=layouts,
        responses=responses,
        longest=longest or min(here.model.context_length, LONGEST),
        deadline_s=deadline,
        say=lambda text: print(f"{text}\n\n{HEADER}", flush=True),
    ):
        verdicts.append(limits.hold(case.aggregation, difference))
        figures = [f"{value:.1e}" for value in (difference.loss, difference.gradient, difference.worst)]
        cells = (label(case.layout), case.budget, len(case.mini_batch.plan.micro_batches[0]), case.aggregation)
        verdict = "ok" if verdicts[-1] else "FAIL"
        print(ROW.format(*cells, *figures, verdict, difference.parameter), flush=True)
    wrong = verdicts.count(False)
    counted = f"{wrong} of {len(verdicts)} are not" if wrong else f"all {len(verdicts)} are"
    bound = f" and {ROUNDING:g} x that of one process" if limits.dtype == "bfloat16" else " for each parameter"
    bounds = f"relative difference of the loss {limits.loss:g}, of the gradient {limits.gradient:g}{bound}"
    print(f"{counted} within the bounds: {bounds}")
    return not wrong


@dataclass(frozen=True)
class Limits:
    """What may be rounding. One process comes before the layouts that are compared with it."""

    dtype: Dtype
    loss: float
    gradient: float
    _of_one_process: dict[str, float] = field(default_factory=dict)
    """By aggregation, in bfloat16."""

    def hold(self, aggregation: str, found: "Difference") -> bool:
        """Whether a difference is within them; never for a number that is not finite."""
        gradient, parameter = self.gradient, self.gradient
        if self.dtype == "bfloat16":
            of_one_process = self._of_one_process.setdefault(aggregation, found.gradient)
            gradient, parameter = min(gradient, ROUNDING * of_one_process), math.inf
        return found.loss <= self.loss and found.gradient <= gradient and found.worst <= parameter


def _on_this_machine(config: Config, processes: int | None, dtype: Dtype | None) -> tuple[Config, int]:
    """The config with the device and type that are measured, and most ranks of a layout."""
    import torch

    from megatron_dapo.diagnostics.local_jobs import local_device

    device = local_device(config)
    if config.actor.device == "cuda" and device == "cpu":
        raise ConfigError("actor.device = cuda: no CUDA device is visible; use auto or cpu")
    here = torch.cuda.device_count() if device == "cuda" else max(os.cpu_count() or 1, config.actor.layout.world_size)
    if device == "cuda" and (processes or 0) > here:
        raise ConfigError(f"--processes {processes}: each rank needs a GPU of its own and {here} are visible; lower it")
    dtype = dtype or ("bfloat16" if device == "cuda" else "float32")
    actor, model = replace(config.actor, device=device), replace(config.model, dtype=dtype)
    return replace(config, actor=actor, model=model), processes or here


if __name__ == "__main__":
    main(lambda: typer.run(certify))
