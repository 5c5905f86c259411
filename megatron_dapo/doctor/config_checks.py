"""What a config names: run directory, disk, model, tokenizer, data, host memory; and a rollout step of its own.

At the end the table of all checks, in the order in which they are printed.
"""

import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil

from megatron_dapo.actor.model.hf_config import HFModelConfig
from megatron_dapo.config import Config
from megatron_dapo.doctor import machine_checks as machine
from megatron_dapo.doctor.probing import Facts, Finding, Status, failed, needed_gpus, passed, run, warning
from megatron_dapo.plan.memory import CHECKPOINT_STATE, CHECKPOINT_WEIGHTS, batch_responses, host_memory, routing_bytes
from megatron_dapo.plan.rank_state import DTYPE_BYTES, model_parameters, trained_parameters
from megatron_dapo.plan.scenario import Scenario, load_calibration
from megatron_dapo.storage.run_dir import RunDirError, has_run, refuse_what_is_there
from rollout.errors import ServerStartError

_OPTIMIZER_BYTES = 12

_DRY_RUN_TOKENS = 32
_LAST_LINES = 6


def check_run_dir(facts: Facts) -> Iterator[Finding]:
    """Raise RunDirError for a directory that `train` refuses."""
    folder = Path(facts.given.run.dir)
    if has_run(folder) and not facts.given.run.resume:  # as after any run: the machine can still train
        yield warning(f"{folder} holds a run", "run.resume=true continues it; a new one needs another run.dir")
        return
    if not facts.given.run.resume:
        refuse_what_is_there(folder)
    yield passed(f"{folder} {'goes on' if has_run(folder) else 'is free'}")


def check_model(facts: Facts) -> Iterator[Finding]:
    """The model's shape, and whether its weights are all there and none is cut.

    Raises:
        ConfigError: a config.json that is not supported.
        WeightsError: a file of weights is missing or damaged.
    """
    from megatron_dapo.actor.weights.hf_files import SafetensorsReader

    folder = Path(facts.given.model.path)
    hf = HFModelConfig.load(folder)
    with SafetensorsReader(folder):
        pass
    yield passed(f"{model_parameters(hf) / 1e6:.1f} million parameters")


def check_inputs(facts: Facts) -> Iterator[Finding]:
    """What `train` reads before it starts anything: layout and context length fit the model, the tokenizer knows where
    a response ends, prompts and held-out problems can be read, and each verifier can use its ground truths.

    Raises:
        TokenizerError, DataError, VerifierError, ConfigError: what is wrong.
    """
    from megatron_dapo.coordinator.inputs import read_inputs, remarks

    inputs = read_inputs(facts.given)
    stops = ", ".join(f"{stop} {inputs.text.tokenizer.decode([stop])!r}" for stop in inputs.text.stop_token_ids)
    yield passed(f"{type(inputs.text.tokenizer).__name__}; a response ends at {stops}")
    yield passed(f"prompts: {inputs.prompts.summary()}; held out: {inputs.heldout.summary()}")
    notes = remarks(facts.given, inputs.prompts, inputs.heldout)
    yield from (warning(note, "change it, if it is not meant") for note in notes)


def bytes_on_disk(config: Config, hf: HFModelConfig) -> float:
    """All that the run keeps at once: weight versions, one more being written, checkpoints, export."""
    parameters, size = model_parameters(hf), DTYPE_BYTES[config.model.dtype]
    versions = 3 if config.run.export_at_end else 2
    checkpoints = config.run.keep_checkpoints + 1
    # Groups that a checkpoint carries, at most about a batch.
    carried = routing_of_batch(config, hf) if config.algorithm.dynamic_sampling.max_staleness else 0
    trained = trained_parameters(hf, config.actor.lora)
    return parameters * versions * size + checkpoints * (trained * (size + _OPTIMIZER_BYTES) + carried)


def routing_of_batch(config: Config, hf: HFModelConfig) -> float:
    """Bytes of the experts of a batch's tokens, at most; 0 without `actor.routing_replay`."""
    return batch_responses(config) * config.model.context_length * routing_bytes(config, hf)


def check_disk(facts: Facts) -> Iterator[Finding]:
    """Room where the run will write.

    Raises:
        OSError: it cannot be written to.
    """
    config = facts.given
    needed = bytes_on_disk(config, HFModelConfig.load(Path(config.model.path)))
    path = Path(config.run.dir).resolve()
    folder = next(folder for folder in (path, *path.parents) if folder.is_dir())
    free = shutil.disk_usage(folder).free
    room = f"{free / 1e9:.0f} GB free in {folder}; weights and checkpoints need {needed / 1e9:.1f} GB"
    if free < needed:
        yield failed(room, "set run.dir to a larger disk, or lower run.keep_checkpoints")
        return
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".doctor-"):
        yield passed(room)


def needed_host_memory(config: Config, hf: HFModelConfig, processes: int) -> float:
    """Bytes of a machine on whose GPUs `processes` of trainer and servers run."""
    parts = host_memory(Scenario(config, hf, load_calibration()), float(config.model.context_length))
    needed = sum(value for name, value in parts.items() if not name.startswith(("a ", "page cache")))
    layout = config.actor.layout
    first = min(processes, layout.tensor * layout.pipeline)  # data-parallel ranks; they write what all hold
    writing = min(processes, layout.world_size) if config.actor.optimizer.distributed else first
    needed += processes * max(parts["a trainer process"], parts["a server process"])
    return needed + writing * parts[CHECKPOINT_STATE] + first * parts[CHECKPOINT_WEIGHTS]


def check_host_memory(facts: Facts) -> Iterator[Finding]:
    """What the processes of this machine need, by the plan, against what it can give."""
    if not facts.gpus:
        yield passed("not looked at: the plan knows machines with GPUs only")
        return
    config, available = facts.given, psutil.virtual_memory().available
    hf = HFModelConfig.load(Path(config.model.path))
    processes = min(needed_gpus(config), len(facts.gpus))
    needed = needed_host_memory(config, hf, processes)
    if routing := routing_of_batch(config, hf):
        yield passed(f"routing: {routing_bytes(config, hf)} bytes a token, at most {routing / 1e9:.1f} GB a batch")
    shown = f"{available / 1e9:.1f} GB available, about {needed / 1e9:.1f} GB planned for {processes} processes"
    if needed > available:
        yield warning(shown, "run fewer processes on this machine, or free some memory")
    yield passed(shown)


def dry_run(path: Path, overrides: Sequence[str], config: Config) -> Iterator[Finding]:
    """Start trainer and servers, write and judge a few responses, update, publish; in a folder that is removed again.

    The folder lies beside `run.dir`, since all nodes must see it, and holds a checkpoint of the model meanwhile.
    """
    beside = Path(config.run.dir).resolve().parent
    beside.mkdir(parents=True, exist_ok=True)
    tokens, group = min(_DRY_RUN_TOKENS, config.rollout.max_new_tokens), min(4, config.algorithm.group_size)
    budget = config.rollout.thinking_budget
    thinking = "" if budget is None else f"rollout.thinking_budget={min(budget, tokens // 2)}"
    keys = f"""
        run.rollout_steps=1 run.resume=false run.resume_step=null run.max_restarts=0
        run.export_at_end=false algorithm.prompts_per_step=2 algorithm.group_size={group}
        algorithm.mini_batch_responses={group} algorithm.overlong.buffer={max(1, tokens // 2)}
        algorithm.dynamic_sampling.filter=off rollout.max_new_tokens={tokens} rollout.stages=[]
        {thinking}
        evaluation.limit=1 evaluation.samples=1 evaluation.every=0
    """
    with tempfile.TemporaryDirectory(dir=beside, prefix=".doctor-") as folder:
        arguments = ["train", str(path), *overrides, f"run.dir={Path(folder) / 'run'}", *keys.split()]
        command = shlex.join([sys.executable, "-m", "megatron_dapo.cli.main", *arguments])
        deadline_s = config.run.start_deadline_s + config.run.step_deadline_s
        answer = run(["sh", "-c", f"exec {command} 2>&1"], deadline_s)
    if answer.code == 0:
        yield passed("one rollout step: responses, verdicts, updates, new weights on every server")
        return
    last = "\n".join(answer.output.strip().splitlines()[-_LAST_LINES:]) or answer.error
    yield failed(f"exit code {answer.code}:\n{last}", f"run it yourself: {shlex.join(['megatron-dapo', *arguments])}")


_SAID = (ValueError, RunDirError, ServerStartError, OSError, ImportError)
"""Errors whose message says what is wrong and what to do: those of config, model and data are ValueErrors."""


def _named(*checks: Callable[[Facts], Iterator[Finding]]) -> dict[str, Callable[[Facts], Iterator[Finding]]]:
    return {check.__name__.removeprefix("check_").replace("_", " "): check for check in checks}


ANYWHERE = _named(machine.check_versions, machine.check_gpus, machine.check_limits)
ON_GPUS = _named(
    machine.check_torch, machine.check_imports, machine.check_compilers, machine.check_network, machine.check_infiniband
)
OF_A_CONFIG = _named(machine.check_ports, check_run_dir, check_model)
OF_A_CONFIG |= _named(check_disk, check_host_memory, check_inputs)


def examine(facts: Facts) -> Iterator[tuple[str, Finding]]:
    """(name of the check, what it found) of all checks but the dry run; without a config, those of the machine. What
    stops two checks is told once."""
    told: set[Finding] = set()
    for name, check in (ANYWHERE | (ON_GPUS if facts.on_gpus else {}) | (OF_A_CONFIG if facts.config else {})).items():
        for finding in findings_of(check(facts)):
            if finding not in told:
                told.add(finding)
                yield name, finding


def findings_of(check: Iterator[Finding]) -> list[Finding]:
    """What is wrong, or, where nothing is, what passes."""
    found = []
    try:
        for finding in check:
            found.append(finding)
    except _SAID as error:
        found.append(failed(str(error), "correct it as the message says"))
    return [finding for finding in found if finding.status is not Status.PASS] or found
