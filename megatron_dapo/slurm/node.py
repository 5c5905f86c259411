"""What the batch script starts on every node: `python -m megatron_dapo.slurm.node RUN_DIR SECONDS train ...`; all nodes
must have joined after so many seconds.

On one node it only runs `megatron-dapo ARGUMENTS`. On several the first starts Ray's head, writes its address below the
run directory, waits until every node has joined, runs `megatron-dapo ARGUMENTS` and says when it is done. The others
join at that address and leave when it is done, or when the first node's Ray is gone. Everything that is waited for has
a deadline and a name, and what this program starts ends with it, however it ends.
"""

import errno
import json
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megatron_dapo.cli.exit_codes import ExitCode
from megatron_dapo.storage.durable import replace_file
from rollout.server import end_with
from rollout.server.engine import free_port

LOOK_S = 0.5
LEAVE_S = 20.0
"""For Ray to end its processes."""
SILENT_S = 15.0
"""After so long without an answer the first node counts as gone; a port that refuses says so at once."""


class NodeError(RuntimeError):
    """The nodes did not come together. The message says who is missing and where to look."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """This node's part in the job."""

    rank: int
    nodes: int
    folder: Path
    """Where the nodes of this attempt meet: address, token, the run's exit code, end, Ray's output."""
    deadline_s: float

    @classmethod
    def of(cls, run_dir: Path, deadline_s: float, environment: Mapping[str, str]) -> "Job":
        """From the variables that srun gives every task."""
        attempt = f"{environment['SLURM_JOB_ID']}.{environment.get('SLURM_RESTART_COUNT', '0')}"
        rank, nodes = int(environment["SLURM_NODEID"]), int(environment["SLURM_NNODES"])
        return cls(rank=rank, nodes=nodes, folder=run_dir / "slurm" / attempt, deadline_s=deadline_s)


def main() -> int:
    """The node's life; its exit code is the run's on the first node."""
    run_dir, deadline_s, *arguments = sys.argv[1:]
    try:
        job = Job.of(Path(run_dir).resolve(), float(deadline_s), os.environ)
        # Ray's own niceness is 15; here its workers are the trainer, as urgent as the servers beside them. Its memory
        # monitor would kill a rank when the node's memory is nearly full, also when another job has filled it.
        off = ("RAY_USAGE_STATS_ENABLED", "RAY_worker_niceness", "RAY_memory_monitor_refresh_ms")
        os.environ |= dict.fromkeys(off, "0")
        if (bound := len(os.sched_getaffinity(0))) < _cores():
            print(f"node {job.rank}: {_cores()} cores were asked for, and this step may use {bound}", file=sys.stderr)
        if job.nodes == 1:  # the run starts its own Ray, as on any machine; trainer and server may then share one GPU
            for name in ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
                os.environ.pop(name, None)  # of the shell that submitted the job
            return _run(job, arguments)
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(job.folder / "token")}
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "1"  # 0 keeps Ray to one machine: `train` sets it for its own
        return lead(job, arguments) if job.rank == 0 else follow(job)
    except NodeError as error:
        print(f"node {os.environ.get('SLURM_NODEID', '?')} ({socket.gethostname()}): {error}", file=sys.stderr)
        return ExitCode.STALLED


def lead(job: Job, arguments: list[str]) -> int:
    """Ray's head and the run."""
    job.folder.mkdir(parents=True, exist_ok=True)
    replace_file(job.folder / "token", secrets.token_hex(32), private=True)
    host, port = _head_host(), free_port("0.0.0.0")
    address = f"{host}:{port}"
    # Ray tries the dashboard's port also when there is to be none, and its own choice may be another job's.
    dashboard = ("--include-dashboard=false", f"--dashboard-port={free_port('0.0.0.0')}")
    ray = _start_ray(job, "--head", f"--node-ip-address={host}", f"--port={port}", *dashboard)
    try:
        _until(job, "Ray's head", lambda: address if _asked(address) == 0 else None, ray)
        replace_file(job.folder / "address", address, private=True)
        _until(job, f"{job.nodes} nodes to join", lambda: _all_joined(job, address), ray)
        print(f"{job.nodes} node(s) have joined Ray at {address}", flush=True)
        code = _run(job, arguments, RAY_ADDRESS=address)
        # srun ends the others at once where this one's code is not 0, and then tells their signal instead of it.
        with suppress(OSError):
            (job.folder / "code").write_text(str(code % 256))
        return code
    finally:
        (job.folder / "done").touch()
        _end(ray)


def _run(job: Job, arguments: list[str], **variables: str) -> int:
    """Exit code of `megatron-dapo ARGUMENTS`, which ends with this process."""
    if (stop := job.folder.parents[1] / "stop").exists():
        print(f"{stop} is there: told to stop before the run began", flush=True)
        return ExitCode.CONTINUE
    command = [sys.executable, "-m", "megatron_dapo.cli.main", *arguments]
    ending, environment = partial(end_with, os.getpid()), os.environ | variables
    return subprocess.run(command, env=environment, preexec_fn=ending, check=False).returncode


def follow(job: Job) -> int:
    """Join, and leave when the run is done or the first node is gone; how the run ended is the first node's to say."""
    place, done = job.folder / "address", job.folder / "done"
    address = _until(job, "the head node", lambda: place.read_text() if place.exists() else None)
    heard = time.monotonic()
    while _asked(address) and not done.exists():
        if time.monotonic() - heard > SILENT_S:
            raise NodeError(f"Ray's head is at {address}, and from here nothing answers there; see docs/slurm.md")
        time.sleep(LOOK_S)
    ray = _start_ray(job, f"--address={address}")
    heard = time.monotonic()
    try:
        while not done.exists():
            if ray.poll() is not None:
                print(f"node {job.rank}: Ray ended with code {ray.returncode}: {_output(job)}", file=sys.stderr)
                return ExitCode.TRAINER
            error = _asked(address)
            if error == 0:
                heard = time.monotonic()
            elif error == errno.ECONNREFUSED or time.monotonic() - heard > SILENT_S:
                if not done.exists():
                    print(f"node {job.rank}: Ray's head at {address} is gone; leaving", file=sys.stderr)
                    ray.kill()  # asked to end, it would first look for its head
                return 0
            time.sleep(LOOK_S)
        return 0
    finally:
        _end(ray)


def _cores() -> int:
    """Of this node, for the job."""
    return int(os.environ.get("SLURM_CPUS_PER_TASK") or len(os.sched_getaffinity(0)))


def _start_ray(job: Job, *options: str) -> subprocess.Popen[bytes]:
    """`ray start` in the foreground, its output below the job's folder."""
    limits = [f"--num-cpus={_cores()}", f"--num-gpus={os.environ.get('SLURM_GPUS_ON_NODE', 0)}"]
    # Fixed ports of Ray's own would meet those of another job on a shared node.
    limits += ["--dashboard-agent-listen-port=0", "--min-worker-port=0", "--max-worker-port=0"]
    with _output(job).open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *options, *limits],
            env=os.environ | {"RAY_START_HOOK": "megatron_dapo.slurm.ray_hook.without_client_server"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            # Ray's own processes then end with this one: it asks the kernel for it.
            preexec_fn=partial(end_with, os.getpid()),
        )


def _output(job: Job) -> Path:
    return job.folder / f"ray-{job.rank}.log"


def _until(job: Job, what: str, condition: Callable[[], str | None], ray: subprocess.Popen[bytes] | None = None) -> str:
    """What `condition` returns in the end.

    Raises:
        NodeError: it still returns None at the deadline, or Ray has ended.
    """
    deadline = time.monotonic() + job.deadline_s
    while not (found := condition()):
        if ray is not None and ray.poll() is not None:
            raise NodeError(f"Ray ended with code {ray.returncode} while {what} was awaited; see {_output(job)}")
        if time.monotonic() > deadline:
            joined = job.folder / "joined.json"
            so_far = f"; joined so far: {', '.join(json.loads(joined.read_text()))}" if joined.exists() else ""
            raise NodeError(f"waited {job.deadline_s:g} s for {what}{so_far}; see {job.folder}")
        time.sleep(LOOK_S)
    return found


def _head_host() -> str:
    """This node's, as the others reach it: the one that srun, which runs here, started the tasks from. Ray's own choice
    is the way to the internet; without one it is often 127.0.0.1."""
    from ray.util import get_node_ip_address

    told = os.environ.get("SLURM_LAUNCH_NODE_IPADDR", "127.")
    with suppress(OSError), socket.socket() as probe:
        probe.bind((told, 0))  # no other node's: srun was started elsewhere
        if not told.startswith("127."):
            return told
    return str(get_node_ip_address())


def _asked(address: str) -> int:
    """0 if HOST:PORT takes a connection, else the system's number of the error."""
    host, _, port = address.rpartition(":")
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex((host, int(port)))


def _all_joined(job: Job, address: str) -> str | None:
    """In a process of its own: Ray reads its token when it is imported, and a driver that ends leaves nothing."""
    code = (
        "import json, sys, ray; ray.init(address=sys.argv[1], log_to_driver=False, logging_level='ERROR');"
        "print(json.dumps([n['NodeManagerAddress'] for n in ray.nodes() if n['Alive']]))"
    )
    command = [sys.executable, "-c", code, address]
    with suppress(subprocess.SubprocessError, IndexError, ValueError):  # the latter: nothing, or more, was printed
        asked = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        joined = asked.stdout.strip().splitlines()[-1]
        count = len(json.loads(joined))
        (job.folder / "joined.json").write_text(joined)
        return joined if count >= job.nodes else None
    return None


def _end(ray: subprocess.Popen[bytes]) -> None:
    """`ray start --block` ends its processes when it is told to end."""
    ray.terminate()
    with suppress(subprocess.TimeoutExpired):
        ray.wait(LEAVE_S)
    ray.kill()
    ray.wait()


if __name__ == "__main__":
    sys.exit(main())
