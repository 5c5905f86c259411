"""`python -m tests.ray_nodes CPUS CPUS ...`: a Ray cluster on this machine with one node for each number.

Prints its address once it stands and ends with its standard input. A process of its own: Ray reads how it authenticates
when it is imported.
"""

import sys

from ray.cluster_utils import Cluster

STORE_BYTES = 128 << 20


def main() -> None:
    first, *others = (int(cpus) for cpus in sys.argv[1:])
    head = {"num_cpus": first, "object_store_memory": STORE_BYTES, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        for cpus in others:
            cluster.add_node(num_cpus=cpus, object_store_memory=STORE_BYTES)
        print(f"address {cluster.address}", flush=True)
        sys.stdin.read()
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main()
