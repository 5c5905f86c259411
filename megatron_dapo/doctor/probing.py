"""What a check reports, and what the checks know of this machine, each thing asked once."""

import os
import re
import shutil
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from subprocess import DEVNULL, PIPE, CompletedProcess, Popen, TimeoutExpired
from typing import Any, Literal, NamedTuple, get_args

import yaml
from pydantic import TypeAdapter

from megatron_dapo.config import Config
from megatron_dapo.plan.scenario import share_gpus

ASK_DEADLINE_S = 30.0
IMPORT_DEADLINE_S = 180.0
"""Libraries of gigabytes, perhaps from a network file system."""

_TABLES = yaml.safe_load(Path(__file__).with_name("tables.yaml").read_text(encoding="utf-8"))
FIX: dict[str, str] = _TABLES["fixes"]
"""What to do, by what is wrong."""
LOST: dict[str, str] = _TABLES["lost"]
"""What a run does without a module; it does not start without another one."""

_LEAST = '{"run": {"dir": ".", "rollout_steps": 1}, "model": {"path": ".", "context_length": 1}, "data": {"path": "."}}'
NO_CONFIG = TypeAdapter(Config).validate_json(_LEAST)
"""With every key's default: what the checks of the machine alone take for the config."""

_REAP_S = 2.0
_GPU_FIELDS = "name,memory.total,memory.used,driver_version"
_SAID = "print('\\ntorch', torch.__version__, torch.version.cuda or '', {}, sep='|', flush=True)"
_TORCH = f"import torch; {_SAID}; torch.version.cuda and torch.cuda.init(); {_SAID}"


Status = Literal["pass", "warning", "fail"]


class Finding(NamedTuple):
    """One line of a check: Finding("fail", "cannot listen on 127.0.0.1:30000", "set rollout.port=0")."""

    status: Status
    found: str
    fix: str = ""
    """What to do; empty where nothing is wrong."""


Answer = CompletedProcess[str]
"""What became of a command. As in a shell its `returncode` is 127 if it could not be started, 124 if it did not end in
time; `stderr` says which."""

passed, warning, failed = (partial(Finding, status) for status in get_args(Status))


def cause(answer: Answer) -> str:
    """Why a command failed, in one line: of a Python traceback, or of a compiler, its last error.

    sgl_kernel's error lists its own causes in lines that begin with a dash: the first of them counts.
    """
    if answer.returncode < 0:
        return f"ended by signal {-answer.returncode}"
    causes = re.findall(r"^- (\w+(?:Error|Exception): .+)", answer.stderr, re.MULTILINE)
    errors = re.findall(r"^[\w.]+(?:Error|Exception): .+|^\S+ (?:fatal )?error: .+", answer.stderr, re.MULTILINE)
    last = answer.stderr.strip().splitlines()[-1:] or [f"exit code {answer.returncode}"]
    return (causes[:1] or errors[-1:] or last)[0][:300]


def run(command: Sequence[str], deadline_s: float = ASK_DEADLINE_S) -> Answer:
    """Returns at the deadline also where a hung driver keeps the command from being killed."""
    try:
        streams: dict[str, Any] = {"stdin": DEVNULL, "stdout": PIPE, "stderr": PIPE}
        process = Popen(command, text=True, errors="replace", start_new_session=True, **streams)
    except OSError as error:
        return Answer(command, 127, "", f"{command[0]}: {error.strerror}")
    try:
        output, said = process.communicate(timeout=deadline_s)
        return Answer(command, process.returncode, output, said)
    except TimeoutExpired:
        return Answer(command, 124, "", f"no end within {deadline_s:g} s")
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError, TimeoutExpired):
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate(timeout=_REAP_S)


class Gpu(NamedTuple):
    """One that nvidia-smi lists; memory in MiB, 0 where the GPU does not report it."""

    name: str
    memory: float
    used: float
    driver: str


def gpus_of(text: str) -> list[Gpu]:
    """Those of nvidia-smi's rows that are whole."""
    rows = re.findall(r"^(.+), (?:(\d+)|.+), (?:(\d+)|.+), (.+)$", text, re.MULTILINE)  # "[N/A]" is no number
    return [Gpu(name, float(memory or 0), float(used or 0), driver) for name, memory, used, driver in rows]


@dataclass(frozen=True)
class Facts:
    """This machine, and the config that is to be run on it."""

    config: Config = NO_CONFIG
    root: Path = Path("/")
    """Of /sys, /dev and /usr/local."""
    python: tuple[str, ...] = (sys.executable,)

    @cached_property
    def nvidia_smi(self) -> Answer | None:
        """None without nvidia-smi, or where the config is to run on the CPU."""
        if shutil.which("nvidia-smi") is None or self.config.actor.device == "cpu":
            return None
        return run(("nvidia-smi", f"--query-gpu={_GPU_FIELDS}", "--format=csv,noheader,nounits"), ASK_DEADLINE_S)

    @cached_property
    def gpus(self) -> list[Gpu]:
        answer = self.nvidia_smi
        return gpus_of(answer.stdout) if answer is not None and answer.returncode == 0 else []

    @property
    def on_gpus(self) -> bool:
        """Whether the checks of a GPU node apply: there are GPUs, or the config asks for them."""
        return bool(self.gpus) or self.config.actor.device == "cuda"

    @property
    def needed_gpus(self) -> int:
        """Of trainer and own servers together."""
        rollout = self.config.rollout
        servers = 0 if share_gpus(self.config) or rollout.urls else rollout.servers * rollout.tensor_parallel
        return self.config.actor.layout.world_size + servers

    @property
    def elsewhere(self) -> int:
        """GPUs that other nodes must bring; without any here all, if its cores are too few for them."""
        needed, here = self.needed_gpus, len(self.gpus)
        enough = needed <= (here or 2 * len(os.sched_getaffinity(0))) or "RAY_ADDRESS" in os.environ
        return 0 if enough else needed - here

    def run_python(self, code: str) -> Answer:
        """In a process of its own."""
        return run([*self.python, "-c", code], IMPORT_DEADLINE_S)

    @cached_property
    def torch(self) -> tuple[str, str, int, str]:
        """As a process of its own finds it: version, CUDA ("": a build for the CPU), GPUs that it sees; and why it
        could not be imported, if there is nothing else, or why CUDA could not be started."""
        answer = self.run_python(_TORCH.format(0, "torch.cuda.device_count()"))
        found = re.findall(r"^torch\|(.*)\|(.*)\|(\d+)$", answer.stdout, re.MULTILINE)
        version, cuda, devices = found[-1] if found else ("", "", "0")
        return version, cuda, int(devices), cause(answer)
