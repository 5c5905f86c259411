"""What a check reports, and what the checks know of this machine, each thing asked once."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

from megatron_dapo.config import Config
from megatron_dapo.plan.scenario import share_gpus

ASK_DEADLINE_S = 30.0
IMPORT_DEADLINE_S = 180.0
"""Libraries of gigabytes, perhaps from a network file system."""

IN_A_JOB = "look at one of its nodes by `srun --nodes=1 --gpus-per-node=8 megatron-dapo doctor CONFIG.yaml`; "
IN_A_JOB += "make the first job short (megatron-dapo slurm CONFIG.yaml run.rollout_steps=1)"
"""What to do where the run needs more GPUs than this machine has."""

_REAP_S = 2.0
_GPU_FIELDS = "name,memory.total,memory.used,driver_version"
_TORCH = """
import json, torch
found = dict(version=torch.__version__, cuda=torch.version.cuda, devices=0)
print("", json.dumps(found), sep="\\n", flush=True)
torch.version.cuda and torch.cuda.init()
print("", json.dumps(found | dict(devices=torch.cuda.device_count())), sep="\\n")
"""


class Status(StrEnum):
    PASS = "pass"
    WARNING = "warning"
    FAIL = "fail"


class Finding(NamedTuple):
    """One line of a check: Finding(Status.FAIL, "cannot listen on 127.0.0.1:30000", "set rollout.port=0")."""

    status: Status
    found: str
    fix: str = ""
    """What to do; empty where nothing is wrong."""


passed, warning, failed = (partial(Finding, status) for status in Status)


class Answer(NamedTuple):
    """What became of a command: Answer(1, "", "nvcc fatal: ...")"""

    code: int | None
    """None: it could not be started, or did not end in time; `error` says which."""
    output: str
    error: str

    @property
    def cause(self) -> str:
        """Why it failed, in one line: of a Python traceback, or of a compiler, its last error.

        sgl_kernel's error lists its own causes in lines that begin with a dash: the first of them counts.
        """
        if self.code is not None and self.code < 0:
            return f"ended by signal {-self.code}"
        causes = re.findall(r"^- (\w+(?:Error|Exception): .+)", self.error, re.MULTILINE)
        errors = re.findall(r"^[\w.]+(?:Error|Exception): .+|^\S+ (?:fatal )?error: .+", self.error, re.MULTILINE)
        lines = self.error.strip().splitlines()
        return (causes[:1] or errors[-1:] or lines[-1:] or [f"exit code {self.code}"])[0][:300]


def run(command: Sequence[str], deadline_s: float = ASK_DEADLINE_S) -> Answer:
    """Returns at the deadline also where a hung driver keeps the command from being killed."""
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        return Answer(None, "", f"{command[0]}: {error.strerror}")
    try:
        output, said = process.communicate(timeout=deadline_s)
        return Answer(process.returncode, output, said)
    except subprocess.TimeoutExpired:
        return Answer(None, "", f"no end within {deadline_s:g} s")
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=_REAP_S)


class Gpu(NamedTuple):
    """One that nvidia-smi lists; memory in MiB, 0 where the GPU does not report it."""

    name: str
    memory: float
    used: float
    driver: str


def gpus_of(text: str) -> list[Gpu]:
    """Those of nvidia-smi's rows that are whole."""

    def number(cell: str) -> float:
        return float(cell) if re.fullmatch(r"\d+(\.\d+)?", cell) else 0.0  # "[N/A]"

    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    return [Gpu(row[0], number(row[1]), number(row[2]), row[3]) for row in rows if len(row) == len(Gpu._fields)]


def needed_gpus(config: Config) -> int:
    """Of trainer and own servers together."""
    servers = 0 if config.rollout.urls else config.rollout.servers * config.rollout.tensor_parallel
    return config.actor.layout.world_size + (0 if share_gpus(config) else servers)


@dataclass(frozen=True)
class Facts:
    """This machine, and the config that is to be run on it."""

    config: Config | None = None
    root: Path = Path("/")
    """Of /sys, /dev and /usr/local."""
    python: tuple[str, ...] = (sys.executable,)

    @property
    def given(self) -> Config:
        """The config, in checks that are made only where there is one."""
        assert self.config is not None
        return self.config

    @cached_property
    def nvidia_smi(self) -> Answer | None:
        """None without nvidia-smi, or where the config is to run on the CPU."""
        if shutil.which("nvidia-smi") is None or (self.config is not None and self.config.actor.device == "cpu"):
            return None
        return run(("nvidia-smi", f"--query-gpu={_GPU_FIELDS}", "--format=csv,noheader,nounits"), ASK_DEADLINE_S)

    @cached_property
    def gpus(self) -> list[Gpu]:
        answer = self.nvidia_smi
        return gpus_of(answer.output) if answer is not None and answer.code == 0 else []

    @property
    def on_gpus(self) -> bool:
        """Whether the checks of a GPU node apply: there are GPUs, or the config asks for them."""
        return bool(self.gpus) or (self.config is not None and self.config.actor.device == "cuda")

    @property
    def own_servers(self) -> bool:
        return self.config is None or not self.config.rollout.urls

    @property
    def elsewhere(self) -> int:
        """GPUs that other nodes must bring; without any here all, if its cores are too few for them."""
        if self.config is None or "RAY_ADDRESS" in os.environ:
            return 0
        needed, cores = needed_gpus(self.config), len(os.sched_getaffinity(0))
        return needed - len(self.gpus) if needed > (len(self.gpus) or 2 * cores) else 0

    @property
    def largest_group(self) -> int:
        """GPUs of the run's largest tensor-parallel group, which stands on one node."""
        return max(self.given.actor.layout.tensor, self.given.rollout.tensor_parallel if self.own_servers else 1)

    @property
    def several_nodes(self) -> bool:
        """The run is on more nodes than this one."""
        if "RAY_ADDRESS" in os.environ or os.environ.get("SLURM_NNODES", "") not in ("", "1"):
            return True
        return bool(self.gpus) and self.elsewhere > 0

    @cached_property
    def torch(self) -> dict[str, Any]:
        """As a process of its own finds it: version, cuda (None: a build for the CPU), devices; cause: why it could not
        be imported, if there is nothing else, or why CUDA could not be started."""
        answer = run([*self.python, "-c", _TORCH], IMPORT_DEADLINE_S)
        found = re.findall(r'^{"version".*', answer.output, re.MULTILINE)
        return {"cause": answer.cause, **json.loads(found[-1] if found else "{}")}
