"""Engines: a server process that the run starts, or the address of a server that somebody else runs."""

import asyncio
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Protocol

import psutil

from rollout.config import RolloutConfig
from rollout.errors import ServerStartError
from rollout.server import KEY_FILE, PARENT
from rollout.server.server_command import ServerSpec, server_arguments

TAIL_LINES = 40
GRACE_S = 8.0
"""Seconds for a GPU server to release its devices after SIGTERM. On a CPU there is nothing to release."""

LONGEST_TMPDIR = 68
"""Characters: the server's sockets stand in a folder there, and the path of one may have 107."""

_REAP_S = 10.0
_PORTS = range(20000, 32768)
"""Below those that the kernel gives to outgoing connections."""
_PORT_ATTEMPTS = 50


class Engine(Protocol):
    """One server, whose life the fleet looks after. `url` may change with a restart. The methods here are those of a
    server that nobody here can start or end."""

    ours: bool = False
    """Whether the run started it: then nobody else has requests there, and its /health draws no token."""

    @property
    def url(self) -> str:
        """http://host:port"""

    async def start(self) -> None:
        """Begins the start; the fleet waits for readiness."""
        return None

    def alive(self) -> bool:
        """False when the process is known to have ended."""
        return True

    def log_tail(self) -> str:
        """The last lines of the log, for errors."""

    async def restart(self, weights: tuple[Path, str] | None = None) -> None:
        """Ends what is left of it and begins a new start, with the weights of this folder and name if given."""
        return None

    async def close(self) -> None:
        """Ends it in order."""
        return None


class RemoteServer(Engine):
    """A server that somebody else runs and restarts. The fleet checks it, balances over it and sends it weights."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")

    @property
    def url(self) -> str:
        return self._url

    def log_tail(self) -> str:
        return f"{self._url} was started by somebody else; see its log there"


def group_environment(config: RolloutConfig, *, own_gpus: bool) -> dict[str, str]:
    """Variables that both ends of a process group over NCCL need, trainer ranks and servers, where nobody has set them.

    SGLang sets them for itself. A trainer with NCCL's defaults would exchange memory handles of another kind.
    `own_gpus`: whether trainer and servers have GPUs, and share none.
    """
    if config.weight_sync not in ("distributed", "delta", "auto" if own_gpus else ""):
        return {}
    symmetric = "--enable-symm-mem" in config.extra_args
    sharp = symmetric or "--enable-nccl-nvls" in config.extra_args
    return {"NCCL_CUMEM_ENABLE": str(int(symmetric)), "NCCL_NVLS_ENABLE": str(int(sharp))}


class LocalServer:
    """A server as a child process with a process group of its own. It ends with this process, however that ends.

    `start` must be called from a thread that lives as long as the server: the kernel ties a child to the thread.
    """

    ours = True

    def __init__(self, config: RolloutConfig, spec: ServerSpec) -> None:
        self.config, self.spec = config, spec
        self.process: subprocess.Popen[bytes] | None = None
        self._port = config.port + spec.index if config.port else 0
        self._held = ExitStack()
        self._folder = usual if len(usual := tempfile.gettempdir()) <= LONGEST_TMPDIR else "/tmp"

    @property
    def url(self) -> str:
        return f"http://{self.config.host}:{self._port}"

    async def start(self) -> None:
        """Starts the process.

        Raises:
            ServerStartError: the configured port is taken; nothing was started.
        """
        self._held.close()
        self._port = self._held.enter_context(hold_port(self.config, self.spec.index)).getsockname()[1]
        files = tempfile.TemporaryDirectory("", "dapo-server_", self._folder, ignore_cleanup_errors=True)
        environment = self._environment() | {"TMPDIR": self._held.enter_context(files)}  # SGLang removes none
        arguments = server_arguments(self.config, self.spec, self._port)
        self.spec.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.spec.log_path.open("ab") as log:
            log.write(f"\n=== {time.strftime('%F %T')} {' '.join(arguments)}\n".encode())
            log.flush()
            command = [sys.executable, "-m", "rollout.server.launch_server", *arguments]
            streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": subprocess.STDOUT}
            self.process = subprocess.Popen(command, env=environment, start_new_session=True, **streams)

    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def log_tail(self) -> str:
        return tail(self.spec.log_path)

    async def restart(self, weights: tuple[Path, str] | None = None) -> None:
        await asyncio.to_thread(self.kill)
        self.spec = self.spec.starting_with(weights)
        await self.start()

    def kill(self, grace_s: float = 0.0) -> None:
        """SIGKILL to the whole group, after `grace_s` from a SIGTERM to the server; returns when no process of it is
        left, at the latest 10 s later."""
        if self.process is None:
            return
        group = self.process.pid
        members = _group_members(group)
        shared = {path for one in members for path in _shared_memory(one.pid)}
        if grace_s:
            self.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(grace_s)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
        self.process.wait(_REAP_S)
        psutil.wait_procs(members, _REAP_S)
        for path in shared:
            path.unlink(missing_ok=True)
        self.process = None

    async def close(self) -> None:
        """SIGTERM to the server, time to release its GPUs, then `kill`."""
        await asyncio.to_thread(self.kill, GRACE_S if self.spec.device == "cuda" else 0.0)
        self._held.close()

    def _environment(self) -> dict[str, str]:
        # A checkout that is not installed must be importable in the child too.
        package = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH", "")]))
        # Kernels that are compiled at their first use call `ninja`, which an environment that is not activated hides.
        programs = os.pathsep.join(filter(None, [str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
        key = {KEY_FILE: str(self.spec.api_key_file)} if self.spec.api_key_file else {}
        gpus = {"CUDA_VISIBLE_DEVICES": ",".join(self.spec.gpus)} if self.spec.gpus else {}
        # Else torch would compile anew for each server, in its own folder of temporary files.
        compiled = {"TORCHINDUCTOR_CACHE_DIR": f"{self._folder}/torchinductor_{os.getuid()}"}
        ours = {"PYTHONPATH": path, "PATH": programs, PARENT: str(os.getpid())}
        own_gpus = self.spec.device == "cuda" and not self.spec.shares_memory
        return group_environment(self.config, own_gpus=own_gpus) | compiled | os.environ | ours | key | gpus


def hold_port(config: RolloutConfig, index: int) -> socket.socket:
    """A socket bound to the configured port of server `index`, or to a free one: while it is open, no other run draws
    the port. On a busy machine a server listens only after a minute; it can, as it reuses addresses like this socket.

    A free port is one that nobody listens on or holds, outside the range that the kernel uses for outgoing connections,
    so that it is not given away until something opens it.

    Raises:
        ServerStartError: the configured port is taken, or no port of the host can be had.
    """
    problem, port = OSError(), 0
    drawn = random.SystemRandom().sample(_PORTS, _PORT_ATTEMPTS)  # independent of the run's own random numbers
    for port in [config.port + index] if config.port else drawn:
        held = socket.socket()
        # A configured port may have connections left of the server before; a free one must be nobody's.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(config.port > 0))
        try:
            held.bind((config.host, port))
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            return held
        except OSError as error:
            held.close()
            problem = error
    raise ServerStartError(
        f"rollout.host = {config.host}, rollout.port = {config.port}: server {index} cannot listen on port {port} "
        f"({problem.strerror or problem}); choose another host or port, or port 0 for free ones"
    )


def free_port(host: str) -> int:
    """A free port as `hold_port` finds it, not held.

    Raises:
        ServerStartError: there is none.
    """
    with hold_port(RolloutConfig(host=host), 0) as held:
        return int(held.getsockname()[1])


def tail(path: Path, lines: int = TAIL_LINES, size: int = 16384) -> str:
    """The last `lines` of a log, at most `size` bytes; a note if there is none."""
    if not path.exists():
        return f"(no log at {path})"
    with path.open("rb") as log:
        log.seek(max(0, log.seek(0, os.SEEK_END) - size))
        return "\n".join(log.read().decode(errors="replace").splitlines()[-lines:])


def _group_members(group: int) -> list[psutil.Process]:
    """Processes of a process group. SGLang's children stay in their parent's."""
    members = []
    for process in psutil.process_iter():
        with suppress(ProcessLookupError, PermissionError):
            if os.getpgid(process.pid) == group:
                members.append(process)
    return members


def _shared_memory(pid: int) -> set[Path]:
    """SGLang's files in /dev/shm that the process has mapped; it removes none of them."""
    with suppress(OSError):  # gone meanwhile
        lines = Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()
        return {Path(line.split()[-1]) for line in lines if "/dev/shm/sgl" in line}
    return set()
