"""Ray: a cluster of this run's own on one machine, or the one that RAY_ADDRESS names."""

import os
import signal
import socket
from typing import Literal

import grpc
import psutil
import ray
import torch
from ray._private.services import canonicalize_bootstrap_address

from megatron_dapo.cluster.placement import PlacementError
from megatron_dapo.cluster.ray_sweeper import RaySweeper, new_temp_dir
from megatron_dapo.cluster.waits import StopRequested

LOCAL_OBJECT_STORE_BYTES = 256 << 20
"""A laptop's run keeps a few MB of arrays there; Ray's own default would take 30 % of the memory."""

CONNECT_DEADLINE_S = 10.0

RANK_BYTES = 400_000_000
"""Less than any trainer process on the CPU takes before it holds a model."""

GCS = "gcs_server"
"""Ray's process without which no actor can be called. Ray notices its loss after 60 s, and ends the whole run then."""


class ClusterError(RuntimeError):
    """Ray could not be started or joined. The message says where and what to do."""

    exit_code = 6


class Cluster:
    """Connection to Ray. A local cluster lives and dies with this process."""

    use_gpu: bool
    """Whether the run is on GPUs: those of this machine, or of the cluster that was joined."""

    def __init__(self, *, processes: int, device: Literal["auto", "cpu", "cuda"], tries: int = 2) -> None:
        """Start or join.

        Args:
            processes: trainer processes that must fit; a local CPU cluster offers at least so many slots.
            device: `actor.device`.
            tries: Ray gives its own node 30 s to start, however busy the machine is.

        Raises:
            ClusterError: with Ray's own words, or why the device cannot be had.
            StopRequested: SIGTERM came meanwhile.
        """
        self._sweeper: RaySweeper | None = None
        self._gcs: psutil.Process | None = None
        # ray.init takes SIGTERM for itself and exits; the run has a handler of its own, which closes everything.
        handler = signal.getsignal(signal.SIGTERM)
        try:
            self.use_gpu = self._connect(processes, device)
        except BaseException as error:  # ray.init raises anything, also Exception itself when its node is slow
            self.close()
            if isinstance(error, SystemExit):
                raise StopRequested from None
            if tries > 1 and "timed out during startup" in str(error):
                Cluster.__init__(self, processes=processes, device=device, tries=tries - 1)
                return
            if isinstance(error, ClusterError | PlacementError) or not isinstance(error, Exception):
                raise
            raise ClusterError(f"Ray could not be {'joined' if joins_cluster() else 'started'}: {error}") from None
        finally:
            signal.signal(signal.SIGTERM, handler)

    def _connect(self, processes: int, device: Literal["auto", "cpu", "cuda"]) -> bool:
        """Returns `use_gpu`."""
        address = os.environ.get("RAY_ADDRESS")
        if address:
            _check_reachable(address)
            ray.init(address=address, log_to_driver=False, logging_level="ERROR")
            return _decide(device, ray.cluster_resources().get("GPU", 0) > 0, f"the cluster at {address}")
        use_gpu = gpu_here(device)
        if not use_gpu:
            check_memory(processes, psutil.virtual_memory().total)
        elif processes > (there := torch.cuda.device_count()):
            raise PlacementError(f"actor.layout needs {processes} GPUs; this machine offers {there}; make it smaller")
        self._sweeper = RaySweeper(new_temp_dir())
        ray.init(
            address="local",
            num_cpus=max(os.cpu_count() or 1, processes),
            num_gpus=processes if use_gpu else 0,  # the first ones: the servers take those after them
            object_store_memory=None if use_gpu else LOCAL_OBJECT_STORE_BYTES,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            # Ray runs its workers at niceness 15; here they are the trainer, as urgent as the servers beside them.
            _system_config={"worker_niceness": 0},
            _temp_dir=self._sweeper.rays,
            _plasma_directory=None if os.access("/dev/shm", os.W_OK) else self._sweeper.rays,
            _node_ip_address="127.0.0.1",
        )
        mine = (child for child in psutil.Process().children() if child.name() == GCS and _lives(child))
        self._gcs = next(mine, None)
        return use_gpu

    def lost(self) -> bool:
        """Whether this run's own cluster has lost its GCS. Of a cluster that was joined nothing is known here."""
        return self._gcs is not None and not _lives(self._gcs)

    def close(self) -> None:
        ray.shutdown()
        if self._sweeper is not None:
            self._sweeper.close()


def check_memory(processes: int, total: int) -> None:
    """PlacementError if so many trainer processes cannot fit into `total` bytes of memory, whatever the model."""
    if processes * RANK_BYTES > total:
        each = f"each takes at least {RANK_BYTES / 1e9:g} GB, and there are {total / 1e9:.0f} GB; lower actor.layout"
        raise PlacementError(f"actor.layout asks for {processes} trainer processes on this machine's CPUs: {each}")


def _lives(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def joins_cluster() -> bool:
    """Whether a run joins somebody else's cluster, perhaps of several nodes."""
    return bool(os.environ.get("RAY_ADDRESS"))


def gpu_here(device: Literal["auto", "cpu", "cuda"]) -> bool:
    """Whether a run on this machine alone is on GPUs."""
    return _decide(device, torch.cuda.is_available(), "this machine")


def _decide(device: Literal["auto", "cpu", "cuda"], has_gpu: bool, where: str) -> bool:
    if device == "cuda" and not has_gpu:
        raise ClusterError(f"actor.device = cuda: {where} has no GPU; set actor.device=auto")
    return has_gpu and device != "cpu"


def _check_reachable(address: str) -> None:
    """ClusterError unless something listens there and speaks Ray's protocol, gRPC: ray.init would try for minutes, and
    let no signal through meanwhile.

    Only for HOST:PORT, also where `auto` finds it; other forms (`ray://...`) are Ray's to look up.
    """
    # Ray finds it in a file, which stays when the cluster is gone.
    found = canonicalize_bootstrap_address(address) or "" if address == "auto" else address
    host, colon, port = found.rpartition(":")
    if not colon or not port.isdigit() or "/" in host:
        return
    try:
        socket.create_connection((host, int(port)), CONNECT_DEADLINE_S).close()
        if os.environ.get("RAY_USE_TLS") != "1":
            # As Ray's own channels: not through a proxy that `http_proxy` names.
            with grpc.insecure_channel(found, options=[("grpc.enable_http_proxy", 0)]) as channel:
                grpc.channel_ready_future(channel).result(CONNECT_DEADLINE_S)
    except (OSError, grpc.FutureTimeoutError) as error:
        why = error if isinstance(error, OSError) else "something else listens"
        remedy = "start Ray's head, or unset RAY_ADDRESS for a cluster of this run's own"
        raise ClusterError(f"RAY_ADDRESS = {address}: no Ray answers at {found} ({why}); {remedy}") from None
