"""`megatron-dapo eval`: how many held-out problems a model solves, and how sure that is."""

import asyncio
import json
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from megatron_dapo.cli.command_line import Overrides, comparison_command, config_of, interrupt, model_config
from megatron_dapo.config import Config, ConfigError
from megatron_dapo.data.hub import local_path, with_local_paths


@comparison_command
def evaluate(
    target: Annotated[str, typer.Argument(metavar="CONFIG|RUN|MODEL", help="Config, run, or model, as --model.")],
    overrides: Overrides = None,
    data: Annotated[str | None, typer.Option(help="File of problems, instead of evaluation.path.")] = None,
    model: Annotated[str | None, typer.Option(help="Folder or hf://OWNER/NAME; else the run's newest.")] = None,
    out: Annotated[Path | None, typer.Option(help="Of the results; else evaluations/ in the run, or here.")] = None,
) -> bool:
    """avg@k, pass@k and cons@k of held-out problems, with intervals: of a run, a model, or servers in rollout.urls."""
    from megatron_dapo.cli.train import prepare_environment

    prepare_environment()
    words = [*(overrides or []), *([f"evaluation.path={json.dumps(data)}"] if data else [])]
    weights = Path(local_path(model, "--model")) if model else None
    asyncio.run(_evaluate(Path(local_path(target, "MODEL")), words, weights, out))
    return True


async def _evaluate(target: Path, overrides: Sequence[str], model: Path | None, out: Path | None) -> None:
    """The first signal cancels: servers end, and every answer that was judged is on disk. A second one interrupts
    that."""
    from megatron_dapo.cluster.waits import StopRequested
    from megatron_dapo.diagnostics.evaluation_session import KEPT, evaluate
    from megatron_dapo.monitor.console import Console, text_page
    from megatron_dapo.storage.run_dir import has_run

    if out is not None and has_run(out):
        raise ConfigError(f"--out {out}: holds a run, whose own files would be written over; name another folder")
    config, folder, step = find_target(target, overrides, model)
    # With a handler of its own the loop wakes at every signal, also at one that comes just before it waits.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, interrupt)
    console, out = Console(), out or folder
    weights = Path(config.model.path)
    console.note(f"evaluating {', '.join(config.rollout.urls) or weights}")
    try:
        result = await evaluate(config, out, console, step)
    except asyncio.CancelledError:
        raise StopRequested("stopped; the same command goes on with what is missing") from None
    if weights.parent == target / KEPT:
        shutil.rmtree(weights)
    print(text_page("megatron_dapo.cli", "eval.txt.j2", ways=result["ways"]), end="", flush=True)
    console.note(f"{out}: result.json, problems.jsonl, responses.jsonl")


def find_target(target: Path, overrides: Sequence[str], model: Path | None) -> tuple[Config, Path, int | None]:
    """Which weights are meant: --model, else the servers that `rollout.urls` names, else the run's newest.

    Returns:
        The config, whose `model.path` names the weights unless servers in `rollout.urls` hold them; a folder for the
        results; of a run's weights their version.

    Raises:
        ConfigError: neither a config nor a run; two kinds of weights are named.
        EvaluationError: a run that has no weights yet.
    """
    from megatron_dapo.diagnostics.evaluation_session import evaluated_weights
    from megatron_dapo.diagnostics.local_jobs import with_own_servers
    from megatron_dapo.monitor.statistics import EVALUATIONS

    named = any(word.startswith("rollout.urls=") for word in overrides)
    if model is not None and named:
        raise ConfigError(f"--model {model} and rollout.urls: those servers hold weights of their own; give one")
    alone = (target / "config.json").is_file() and not (target / "config.yaml").is_file()
    config = with_local_paths(model_config(target, overrides)) if alone else config_of(target, overrides)
    run = target.resolve().parent  # of the model that a run ended with
    folder = (run if alone and (run / "config.yaml").is_file() else Path()) / EVALUATIONS
    step, model = None, model or (target if alone else None)
    if model is None and config.rollout.urls and (named or not target.is_dir()):
        return config, folder / "servers", None
    weights = model or Path(config.model.path)
    if model is None and target.is_dir():
        weights, step = evaluated_weights(target)
        folder = target / EVALUATIONS
    return with_own_servers(config, weights), folder / weights.resolve().name, step
