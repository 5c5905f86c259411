"""`megatron-dapo certify`: is the gradient of this config the same on every layout?"""

import dataclasses
import math
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from megatron_dapo.cli.exit_codes import ExitCode
from megatron_dapo.config import Config, ConfigError, load_config

if TYPE_CHECKING:
    from megatron_dapo.diagnostics.certificate.certificate import Measured, Plan

Dtype = Literal["float32", "bfloat16"]

LOSS_BOUNDS: dict[Dtype, float] = {"float32": 1e-6, "bfloat16": 2e-2}
GRADIENT_BOUNDS: dict[Dtype, float] = {"float32": 1e-5, "bfloat16": 4e-1}
"""Of a parameter in float32; in bfloat16, where a small one may be all rounding, of all parameters together."""

ROUNDING = 2.5
"""In bfloat16 a layout's gradient may be so many times as far from the float32 reference as that of one process in
bfloat16: that is rounding, whose size depends on the model. Two draws of it differ by up to 1.8 on the quickstart."""

LONGEST = 256
"""Tokens of the longest response, prompt included, unless the context is shorter or the command line says more."""

HEADER = ("layout", "budget", "micro-batches", "aggregation", "loss", "gradient", "worst", "", "worst parameter")
WIDTHS = (22, 8, 13, 21, 9, 9, 9, 5, 0)


@dataclass(frozen=True, kw_only=True)
class CertifyOptions:
    """What the command line says beside the config; None: chosen from the device or the config."""

    processes: int | None
    layouts: int
    responses: int
    longest: int | None
    dtype: Dtype | None
    loss_bound: float | None
    gradient_bound: float | None
    deadline_s: float


def certify_command(path: Path, overrides: Sequence[str], options: CertifyOptions) -> ExitCode:
    """Print a table of layouts and say whether all of them are within the bounds."""
    from megatron_dapo.actor.ranks import RankError, RankTimeout

    # Like an interrupt from the keyboard: ranks are ended and files removed on the way out.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return _certify(load_config(path, overrides), options)
    except ConfigError as error:
        return _fail(error, ExitCode.CONFIG)
    except RankTimeout as error:
        return _fail(error, ExitCode.STALLED)
    except RankError as error:
        return _fail(error, ExitCode.TRAINER)
    except KeyboardInterrupt:
        return _fail("interrupted", ExitCode.INTERRUPTED)


def _certify(config: Config, options: CertifyOptions) -> ExitCode:
    from megatron_dapo.actor.model.hf_config import HFModelConfig, check_layout
    from megatron_dapo.diagnostics.certificate.certificate import certify

    hf = HFModelConfig.load(Path(config.model.path))
    check_layout(hf, config.actor.layout)
    plan = _plan(config, options)
    dtype: Dtype = plan.job.model.dtype
    loss = LOSS_BOUNDS[dtype] if options.loss_bound is None else options.loss_bound
    gradient = GRADIENT_BOUNDS[dtype] if options.gradient_bound is None else options.gradient_bound
    limits = Limits(dtype, loss=loss, gradient=gradient)
    print(f"{config.model.path} in {dtype} on {plan.device}, up to {plan.processes} ranks", flush=True)
    if config.actor.layout.world_size > plan.processes:
        print(f"not tried: the config's own layout, of {config.actor.layout.world_size} ranks; see --processes")
    verdicts = []
    for result in certify(plan, hf, say=_start_table):
        good = limits.hold(result)
        verdicts.append(good)
        print(_row(result, "ok" if good else "FAIL"), flush=True)
    text = f"relative difference of the loss {loss:g}, {limits.of_gradient}"
    if not all(verdicts):
        print(f"{verdicts.count(False)} of {len(verdicts)} are not within the bounds: {text}")
        return ExitCode.INEXACT
    print(f"all {len(verdicts)} are within the bounds: {text}")
    return ExitCode.FINISHED


class Limits:
    """What may be rounding. One process comes before the layouts that are compared with it."""

    def __init__(self, dtype: Dtype, *, loss: float, gradient: float) -> None:
        self._dtype, self._loss, self._gradient = dtype, loss, gradient
        self._of_one_process: dict[str, float] = {}
        """By aggregation, in bfloat16."""

    @property
    def of_gradient(self) -> str:
        """The gradient's limit in words."""
        if self._dtype == "float32":
            return f"of a parameter's gradient {self._gradient:g}"
        return f"of the gradient {self._gradient:g} and {ROUNDING:g} x that of one process"

    def hold(self, result: "Measured") -> bool:
        """Whether a result is within them."""
        from megatron_dapo.diagnostics.certificate.measure import Bounds

        gradient, aggregation = self._gradient, result.case.aggregation
        if self._dtype == "float32":
            return result.difference.within(Bounds(loss=self._loss, gradient=gradient, parameter=gradient))
        if aggregation in self._of_one_process:
            gradient = min(gradient, ROUNDING * self._of_one_process[aggregation])
        else:
            self._of_one_process[aggregation] = result.difference.gradient
        return result.difference.within(Bounds(loss=self._loss, gradient=gradient, parameter=math.inf))


def _plan(config: Config, options: CertifyOptions) -> "Plan":
    import torch

    from megatron_dapo.coordinator.batch import objective_of
    from megatron_dapo.diagnostics.certificate.certificate import Plan
    from megatron_dapo.diagnostics.certificate.measure import Job

    cuda = config.actor.device != "cpu" and torch.cuda.is_available()
    if config.actor.device == "cuda" and not cuda:
        raise ConfigError("actor.device = cuda: no CUDA device is visible; use auto or cpu")
    here = torch.cuda.device_count() if cuda else max(os.cpu_count() or 1, config.actor.layout.world_size)
    processes = options.processes or here
    if cuda and processes > here:
        raise ConfigError(f"--processes {processes}: each rank needs a GPU of its own and {here} are visible; lower it")
    device: Literal["cpu", "cuda"] = "cuda" if cuda else "cpu"
    dtype = options.dtype or ("bfloat16" if cuda else "float32")
    job = Job(
        actor=dataclasses.replace(config.actor, device=device),
        model=dataclasses.replace(config.model, dtype=dtype),
        objective=objective_of(config.algorithm),
        temperature=config.rollout.temperature,
        seed=config.run.seed,
        timeout_s=options.deadline_s,
    )
    return Plan(
        job=job,
        device=device,
        processes=processes,
        layouts=options.layouts,
        responses=options.responses,
        longest=options.longest or min(config.model.context_length, LONGEST),
        correction=config.algorithm.importance.mode != "none",
        constant_length=config.rollout.max_new_tokens,
        deadline_s=options.deadline_s,
    )


def _start_table(text: str) -> None:
    print(f"{text}\n\n{_line(HEADER)}", flush=True)


def _row(result: "Measured", verdict: str) -> str:
    from megatron_dapo.diagnostics.certificate.layouts import label

    case, difference = result.case, result.difference
    micro_batches = str(case.mini_batch.plan.micro_batches_per_rank)
    figures = [f"{value:.1e}" for value in (difference.loss, difference.gradient, difference.worst)]
    return _line(
        (label(case.layout), str(case.budget), micro_batches, case.aggregation, *figures, verdict, difference.parameter)
    )


def _line(cells: Sequence[str]) -> str:
    return " ".join(f"{cell:<{width}}" for cell, width in zip(cells, WIDTHS, strict=True)).rstrip()


def _fail(reason: object, code: ExitCode) -> ExitCode:
    print(reason, file=sys.stderr)
    return code
