"""What a config names: run directory, disk, model, tokenizer, data, host memory; and a rollout step of its own. At the
end all checks, in the order in which they are printed."""

import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from megatron_dapo.actor.model.hf_config import HFModelConfig
from megatron_dapo.config import Config
from megatron_dapo.doctor import machine_checks as machine
from megatron_dapo.doctor.probing import FIX, NO_CONFIG, Facts, Finding, failed, passed, run, warning
from megatron_dapo.plan.memory import disk_bytes, node_memory
from megatron_dapo.plan.rank_state import model_parameters
from megatron_dapo.plan.scenario import Scenario, load_calibration, share_gpus
from megatron_dapo.storage.run_dir import RunDirError, has_run, refuse_what_is_there
from rollout.errors import ServerStartError

_DRY_RUN_TOKENS = 32
_LAST_LINES = 6


def check_run_dir(facts: Facts) -> Iterator[Finding]:
    """Raise RunDirError for a directory that `train` refuses."""
    folder, resume = Path(facts.config.run.dir), facts.config.run.resume
    if has_run(folder) and not resume:  # as after any run: the machine can still train
        yield warning(f"{folder} holds a run", FIX["run there"])
    elif not resume:
        refuse_what_is_there(folder)
    yield passed(f"{folder} {'goes on' if has_run(folder) else 'is free'}")


def check_model(facts: Facts) -> Iterator[Finding]:
    """The model's shape, and whether its weights are all there and none is cut.

    Raises:
        ConfigError: a config.json that is not supported.
        WeightsError: a file of weights is missing or damaged, or holds another model.
    """
    from megatron_dapo.actor.weights.hf_files import SafetensorsReader
    from megatron_dapo.actor.weights.model_tensors import check_weights

    folder = Path(facts.config.model.path)
    hf = HFModelConfig.load(folder)
    with SafetensorsReader(folder) as reader:
        check_weights(reader, hf)
    yield passed(f"{model_parameters(hf) / 1e6:.1f} million parameters")


def check_inputs(facts: Facts) -> Iterator[Finding]:
    """What `train` reads before it starts anything: layout and context length fit the model, the tokenizer knows where
    a response ends, prompts and held-out problems can be read, and each verifier can use its ground truths.

    Raises:
        TokenizerError, DataError, VerifierError, ConfigError: what is wrong.
    """
    from megatron_dapo.coordinator.inputs import read_inputs, remarks

    inputs = read_inputs(facts.config)
    stops = ", ".join(f"{stop} {inputs.text.tokenizer.decode([stop])!r}" for stop in inputs.text.stop_token_ids)
    yield passed(f"{type(inputs.text.tokenizer).__name__}; a response ends at {stops}")
    yield passed(f"prompts: {inputs.prompts.summary()}; held out: {inputs.heldout.summary()}")
    yield from (warning(note, FIX["note"]) for note in remarks(facts.config, inputs.prompts, inputs.heldout))


def check_disk(facts: Facts) -> Iterator[Finding]:
    """Room where the run will write.

    Raises:
        OSError: it cannot be written to.
    """
    path, needed = Path(facts.config.run.dir).resolve(), disk_bytes(_scenario(facts.config))
    folder = next(folder for folder in (path, *path.parents) if folder.is_dir())
    free = shutil.disk_usage(folder).free
    room = f"{free / 1e9:.0f} GB free in {folder}; weights and checkpoints need {needed / 1e9:.1f} GB"
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".doctor-"):
        yield passed(room) if free >= needed else failed(room, FIX["disk"])
    shared = len(facts.gpus) == 1 and share_gpus(facts.config)
    way = facts.config.way_of_weights(on_gpus=facts.on_gpus, shared=shared)
    yield passed(f"new weights reach the servers by: {way}")


def _scenario(config: Config) -> Scenario:
    return Scenario(config, HFModelConfig.load(Path(config.model.path)), load_calibration())


def check_host_memory(facts: Facts) -> Iterator[Finding]:
    """What the processes of this machine need, by the plan, against what it can give."""
    case, available = _scenario(facts.config), psutil.virtual_memory().available
    processes = min(facts.needed_gpus, len(facts.gpus))
    needed = node_memory(case, processes)
    shown = f"{available / 1e9:.1f} GB available, about {needed / 1e9:.1f} GB planned for {processes} processes"
    yield passed(shown) if needed <= available else warning(shown, FIX["host memory"])


def dry_run(path: Path, overrides: Sequence[str], config: Config) -> Iterator[Finding]:
    """Start trainer and servers, write and judge a few responses, update, publish; in a folder that is removed again.

    The folder lies beside `run.dir`, since all nodes must see it, and holds a checkpoint of the model meanwhile.
    """
    beside = Path(config.run.dir).resolve().parent
    beside.mkdir(parents=True, exist_ok=True)
    tokens, group = min(_DRY_RUN_TOKENS, config.rollout.max_new_tokens), min(4, config.algorithm.group_size)
    budget = config.rollout.thinking_budget
    keys = f"""
        run.rollout_steps=1 run.resume=false run.resume_step=null run.max_restarts=0 run.export_at_end=false
        algorithm.prompts_per_step=2 algorithm.group_size={group} algorithm.mini_batch_responses={group}
        algorithm.overlong.buffer={max(1, tokens // 2)} algorithm.dynamic_sampling.filter=off
        rollout.max_new_tokens={tokens} rollout.stages=[] rollout.thinking_budget={budget and min(budget, tokens // 2)}
        evaluation.limit=1 evaluation.samples=1 evaluation.every=0 monitor.wandb.mode=off
    """.replace("=None", "=null")
    with tempfile.TemporaryDirectory(dir=beside, prefix=".doctor-") as folder:
        arguments = ["train", str(path), *overrides, f"run.dir={Path(folder) / 'run'}", *keys.split()]
        command = shlex.join([sys.executable, "-m", "megatron_dapo.cli.main", *arguments])
        answer = run(["sh", "-c", f"exec {command} 2>&1"], config.run.start_deadline_s + config.run.step_deadline_s)
    if answer.returncode:
        last = "\n".join(answer.stdout.strip().splitlines()[-_LAST_LINES:]) or answer.stderr
        by_hand = shlex.join(["megatron-dapo", *arguments])
        yield failed(f"exit code {answer.returncode}:\n{last}", FIX["dry run"].format(by_hand))
    yield passed("one rollout step: responses, verdicts, updates, new weights on every server")


ANYWHERE = (machine.check_versions, machine.check_gpus, machine.check_limits)
ON_GPUS = (machine.check_torch, machine.check_compilers, machine.check_network, machine.check_infiniband)
OF_A_CONFIG = (machine.check_ports, check_run_dir, check_model, check_disk, check_inputs)


def examine(facts: Facts) -> Iterator[tuple[str, Finding]]:
    """(name of the check, what it found) of all checks but the dry run; without a config, those of the machine. What
    stops two checks is told once."""
    given = facts.config is not NO_CONFIG
    checks = [*ANYWHERE, *(ON_GPUS if facts.on_gpus else ()), *(OF_A_CONFIG if given else ())]
    if facts.gpus:  # kernels are imported with a driver only, and the plan knows machines with GPUs only
        checks += [machine.check_imports, *([check_host_memory] if given else [])]
    told: set[Finding] = set()
    for check in checks:
        for finding in findings_of(check(facts)):
            if finding not in told:
                told.add(finding)
                yield check.__name__.removeprefix("check_").replace("_", " "), finding


def findings_of(check: Iterator[Finding]) -> list[Finding]:
    """What is wrong, or, where nothing is, what passes."""
    found: list[Finding] = []
    try:
        found.extend(check)
    # Their messages say what is wrong and what to do; those of config, model and data are ValueErrors.
    except (ValueError, RunDirError, ServerStartError, OSError, ImportError) as error:
        found.append(failed(str(error)))
    return [finding for finding in found if finding.status != "pass"] or found
