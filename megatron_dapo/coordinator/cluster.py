"""Ray: a cluster of this run's own on one machine, or the one that RAY_ADDRESS names."""

import os
import shutil
import signal
import tempfile
from pathlib import Path

import ray

LOCAL_OBJECT_STORE_BYTES = 256 << 20
"""A laptop's run keeps a few MB of arrays there; Ray's own default would take 30 % of the memory."""


class Cluster:
    """Connection to Ray. A local cluster lives and dies with this process."""

    def __init__(self, *, processes: int, use_gpu: bool) -> None:
        """Start or join.

        Args:
            processes: trainer processes that must fit; a local CPU cluster offers at least so many slots.
        """
        self._folder: Path | None = None
        # ray.init takes SIGTERM for itself; the run has a handler of its own, which closes every part.
        handler = signal.getsignal(signal.SIGTERM)
        try:
            self._connect(processes=processes, use_gpu=use_gpu)
        finally:
            signal.signal(signal.SIGTERM, handler)

    def _connect(self, *, processes: int, use_gpu: bool) -> None:
        address = os.environ.get("RAY_ADDRESS")
        if address:
            ray.init(address=address, log_to_driver=False, logging_level="ERROR")
            return
        # Unix sockets lie below this folder: its path must be short.
        self._folder = Path(tempfile.mkdtemp(prefix="dapo-ray-"))
        ray.init(
            address="local",
            num_cpus=max(os.cpu_count() or 1, processes),
            num_gpus=processes if use_gpu else 0,  # the first ones: the servers take those after them
            object_store_memory=None if use_gpu else LOCAL_OBJECT_STORE_BYTES,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            _temp_dir=str(self._folder),
            _node_ip_address="127.0.0.1",
        )

    @property
    def host(self) -> str:
        """Address of this node inside the cluster."""
        return ray.util.get_node_ip_address()

    def close(self) -> None:
        ray.shutdown()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
