"""What a config names: model, tokenizer, layout, data, memory of this machine; and a rollout step of its own."""

import json
import shlex
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_dapo.actor.model.hf_config import HFModelConfig, check_layout
from megatron_dapo.config import Config, ConfigError
from megatron_dapo.data.records import DataError
from megatron_dapo.data.tokenizer import TokenizerError
from megatron_dapo.doctor.machine import GB, check_disk, check_run_dir
from megatron_dapo.doctor.probing import Finding, Node, failed, passed, warning, warning_if
from megatron_dapo.plan.calibration import load_calibration
from megatron_dapo.plan.memory import CHECKPOINT_STATE, CHECKPOINT_WEIGHTS, host_memory
from megatron_dapo.plan.rank_state import DTYPE_BYTES, model_parameters
from megatron_dapo.plan.scenario import Scenario

_OPTIMIZER_BYTES = 12
_CPU_PROCESS_BYTES = 1.6e9
"""On CPUs a trainer rank takes 0.4 to 0.6 GB, a server's three processes 1.4 to 2.0 GB."""

_DRY_RUN_TOKENS = 32
_LAST_LINES = 6


def check_config(config: Config, available: float, *, processes: int, on_gpu: bool) -> Iterator[Finding]:
    """All of these but the dry run; arguments as of `check_host_memory`."""
    yield check_run_dir(Path(config.run.dir), resume=config.run.resume)
    hf, finding = check_model(config)
    yield from check_disk(Path(config.run.dir), *((0.0, 0.0) if hf is None else bytes_on_disk(config, hf)))
    yield finding
    if hf is not None:
        yield check_host_memory(config, hf, available, processes=processes, on_gpu=on_gpu)
    yield check_tokenizer(config)
    yield check_data(config)


def check_model(config: Config) -> tuple[HFModelConfig | None, Finding]:
    """The model's shape, whether the layout divides it, whether its weights are all there."""
    folder = Path(config.model.path)
    give = "set model.path to a folder in Hugging Face format"
    if not (folder / "config.json").is_file():
        return None, failed("model", f"{folder / 'config.json'} is not there", give)
    try:
        hf = HFModelConfig.load(folder)
        check_layout(hf, config.actor.layout)
    except (ConfigError, ValueError) as error:
        return None, failed("model", str(error), "take a model and a layout that go together")
    if config.model.context_length > hf.max_position_embeddings:
        longest = f"model.context_length = {config.model.context_length}, the model knows {hf.max_position_embeddings}"
        return hf, failed("model", longest, "lower model.context_length")
    away = _missing_weights(folder)
    if away:
        return hf, failed("model", f"{folder}: {away[0]} is not there ({len(away)} in all)", "get the files anew")
    return hf, passed("model", f"{model_parameters(hf) / 1e6:.1f} million parameters; the layout divides it")


def _missing_weights(folder: Path) -> list[str]:
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return [] if (folder / "model.safetensors").is_file() else ["model.safetensors"]
    try:
        files = set(json.loads(index.read_text())["weight_map"].values())
    except (ValueError, KeyError, AttributeError):
        return [f"{index.name} in readable form"]
    return sorted(file for file in files if not (folder / file).is_file())


def bytes_on_disk(config: Config, hf: HFModelConfig) -> tuple[float, float]:
    """(all that the run keeps at once, one weight version): versions, one more being written, checkpoints, export."""
    parameters, size = model_parameters(hf), DTYPE_BYTES[config.model.dtype]
    weights = float(parameters * size)
    checkpoints = (config.run.keep_checkpoints + 1) * parameters * (size + _OPTIMIZER_BYTES)
    return 2 * weights + checkpoints + (weights if config.run.export_at_end else 0), weights


def check_host_memory(config: Config, hf: HFModelConfig, available: float, *, processes: int, on_gpu: bool) -> Finding:
    """`available`: bytes that this machine can give. `processes`: of trainer and servers, on this machine."""
    parts = host_memory(Scenario(config, hf, load_calibration()), float(config.model.context_length))
    each = max(parts["a trainer process"], parts["a server process"]) if on_gpu else _CPU_PROCESS_BYTES
    if not on_gpu:
        each += model_parameters(hf) * 20  # weights, gradients, master weights, moments, and the server's
    needed = processes * each
    if on_gpu:
        layout = config.actor.layout
        first = min(processes, layout.tensor * layout.pipeline)  # data-parallel ranks; they write what all hold
        writing = min(processes, layout.world_size) if config.actor.optimizer.distributed else first
        needed += writing * parts[CHECKPOINT_STATE] + first * parts[CHECKPOINT_WEIGHTS]
    needed += sum(value for name, value in parts.items() if not name.startswith(("a ", "page cache")))
    shown = f"{available / GB:.1f} GB available, about {needed / GB:.1f} GB planned for {processes} processes"
    fix = "run fewer processes on this machine, or free some memory"
    return warning_if(needed > available, "host memory", shown, fix)


def check_tokenizer(config: Config) -> Finding:
    """It loads as the class that its file means, and knows where a response ends."""
    from megatron_dapo.data.tokenizer import load_text_tools

    try:
        text = load_text_tools(config.model.path, config.model.stop_token_ids)
    except TokenizerError as error:
        return failed("tokenizer", str(error), "correct the model's tokenizer files, or get them anew")
    except ImportError as error:
        return failed("tokenizer", f"cannot be loaded: {error}", "make install")
    stops = ", ".join(f"{stop} {text.tokenizer.decode([stop])!r}" for stop in text.stop_token_ids)
    return passed("tokenizer", f"{type(text.tokenizer).__name__}; a response ends at {stops}")


def check_data(config: Config) -> Finding:
    """Prompts and held-out problems can be read, and each verifier can use its ground truths."""
    from megatron_dapo.coordinator.inputs import read_problems
    from megatron_dapo.data.tokenizer import load_text_tools

    try:
        prompts, heldout = read_problems(config, load_text_tools(config.model.path, config.model.stop_token_ids))
    except (DataError, ConfigError, OSError) as error:
        return failed("data", str(error), "correct it as the message says; megatron-dapo preview shows what is read")
    except (TokenizerError, ImportError):
        return warning("data", "not looked at: prompts are counted in tokens", "fix the tokenizer first")
    return passed("data", f"prompts: {prompts.summary()}; held out: {heldout.summary()}")


def dry_run_overrides(config: Config, folder: Path) -> list[str]:
    """Keys of a run of one rollout step with two prompts, two optimizer steps and short responses."""
    tokens = min(_DRY_RUN_TOKENS, config.rollout.max_new_tokens)
    group = min(4, config.algorithm.group_size)
    keys = f"""
        run.rollout_steps=1 run.resume=false run.resume_step=null run.max_restarts=0
        run.export_at_end=false algorithm.prompts_per_step=2 algorithm.group_size={group}
        algorithm.mini_batch_responses={group} algorithm.overlong.buffer={max(1, tokens // 2)}
        algorithm.dynamic_sampling.enabled=false rollout.max_new_tokens={tokens}
        evaluation.limit=1 evaluation.samples=1 evaluation.every=0
    """
    return [f"run.dir={folder / 'run'}", *keys.split()]


def dry_run(path: Path, overrides: Sequence[str], config: Config, node: Node) -> Finding:
    """Start trainer and servers, write and judge a few responses, update, publish; in a folder that is removed again.

    The folder lies beside `run.dir`, since all nodes must see it, and holds a checkpoint of the model meanwhile.
    """
    beside = Path(config.run.dir).resolve().parent
    beside.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=beside, prefix=".doctor-") as folder:
        keys = [*overrides, *dry_run_overrides(config, Path(folder))]
        command = shlex.join([sys.executable, "-m", "megatron_dapo.cli.main", "train", str(path), *keys])
        answer = node.run(
            ["sh", "-c", f"exec {command} 2>&1"], config.run.start_deadline_s + config.run.step_deadline_s
        )
    if answer.code is None:
        return failed(
            "dry run", answer.error, f"run it yourself: {command.partition(' -m megatron_dapo.cli.main ')[2]}"
        )
    if answer.code:
        last = "\n".join(answer.output.strip().splitlines()[-_LAST_LINES:])
        again = shlex.join(["megatron-dapo", "train", str(path), *overrides])
        return failed("dry run", f"exit code {answer.code}:\n{last}", f"the lines say it; then {again}")
    return passed("dry run", "one rollout step: responses, verdicts, updates, new weights on every server")
