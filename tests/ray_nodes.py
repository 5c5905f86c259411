"""`python -m tests.ray_nodes CPUS CPUS@ADDRESS ...`: a Ray cluster on this machine with one node for each number, on an
address of its own if there is one.

Prints its address once it stands and ends with its standard input. A process of its own: Ray reads how it authenticates
when it is imported.
"""

import sys
from typing import Any

from ray.cluster_utils import Cluster

STORE_BYTES = 128 << 20


def node(text: str) -> dict[str, Any]:
    """Ray's options for `CPUS` or `CPUS@ADDRESS`."""
    cpus, _, address = text.partition("@")
    at = {"node_ip_address": address} if address else {}
    return {"num_cpus": int(cpus), "object_store_memory": STORE_BYTES, **at}


def main() -> None:
    first, *others = map(node, sys.argv[1:])
    cluster = Cluster(initialize_head=True, head_node_args=first | {"include_dashboard": False})
    try:
        for each in others:
            cluster.add_node(**each)
        print(f"address {cluster.address}", flush=True)
        sys.stdin.read()
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main()
