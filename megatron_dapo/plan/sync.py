"""New weights on their way to the servers, in seconds and bytes, by `rollout.weight_sync` (docs/weight_sync.md)."""

import math

from megatron_dapo.plan.rank_state import expert_parameters
from megatron_dapo.plan.scenario import Calibration, Scenario

EXPORT_FILE_BYTES = 5 * 10**9
"""Of a weight file (`actor.weights.hf_weights.EXPORT_FILE_BYTES`; a test compares)."""


def sync_seconds(case: Scenario) -> float:
    """Of one publish to all servers; a bucket (all but `disk`) is gathered while the one before is sent. Half of the
    servers after the other, all of it is done twice.

    What runs on a GPU at its memory's speed (a server's copies; checksums there, where a broadcast takes longer) is not
    counted.
    """
    model, constants, way = case.model_bytes, case.constants, case.weight_sync
    if way == "disk":
        # Rank 0 gathers and writes; then the servers of every node read. The first on a node fills
        # its page cache; all wait for the same disk.
        readers = readers_of_a_node(case.servers, case.server_gpus, constants)
        read = max(model / constants.disk_read, model * readers / constants.gather_bandwidth)
        return model / constants.gather_bandwidth + model / constants.disk_write + read
    layout = case.config.actor.layout
    experts, split = expert_parameters(case.hf) * case.dtype_bytes, layout.expert * layout.expert_tensor
    # Each stage gathers and sends its own part, or rank 0 all.
    senders = 1 if way == "tensor" else layout.pipeline
    stages = layout.pipeline // senders
    parts = ((model - experts, layout.tensor * stages), (experts, split * stages))
    gather = sum(size / senders * (1 - 1 / shards) / constants.link(shards) for size, shards in parts)
    if way == "tensor":  # from GPU memory of the trainer to servers on the same GPUs
        gather += model / constants.link(layout.world_size)  # by a broadcast to every rank, beside which a server's is
        send = model / constants.load_bandwidth
    else:
        # A broadcast is a pipeline through all ranks: each passes on what it receives.
        ranks = layout.world_size + case.server_gpus
        link = constants.link(ranks)
        send = model / (link if ranks <= constants.gpus_per_node else min(link, constants.send_bandwidth))
        if way == "delta":  # what is held comes from the host while the bucket before is hashed and sent
            send *= constants.changed_share + 1 / 8 / case.dtype_bytes  # a bit for each value
            send = max(send, model / senders / min(constants.hash_bandwidth, constants.host_bandwidth))
    first = min(1, senders * bucket_bytes(case) / model)
    return sends(case) * max(gather + first * send, send + first * gather)


def sends(case: Scenario) -> int:
    """Of a publish, one after the other: to each half of the servers by `rollout.on_publish`."""
    rolling = case.config.rollout.on_publish != "restart" and case.weight_sync in ("distributed", "delta")
    return 2 if rolling and case.servers > 1 else 1


def readers_of_a_node(servers: float, gpus: int, constants: Calibration) -> float:
    """Servers that read on the same node."""
    return max(1.0, servers / -(-gpus // constants.gpus_per_node))


def largest_parameter(case: Scenario) -> float:
    """Bytes of the embedding, or of the fused gate and up projection: never cut, so the least that a bucket takes."""
    ffn = case.hf.ffn_hidden_size if case.hf.experts is None else case.hf.experts.ffn_hidden_size
    return float(max(case.hf.vocab_size, 2 * ffn) * case.hf.hidden_size * case.dtype_bytes)


def bucket_bytes(case: Scenario) -> float:
    """Of a bucket (all but `disk`), at most the whole model."""
    return min(max(float(case.config.rollout.sync_bucket_mb << 20), largest_parameter(case)), case.model_bytes)


def rank_bytes(case: Scenario, stage: int) -> dict[str, float]:
    """On a trainer rank's GPU, by what holds them. On the first rank of each stage, or rank 0, the whole of one
    parameter is gathered, and joined once more, in a copy (`disk`) or in its bucket, while the bucket before is sent.
    By `tensor` every rank has the buckets."""
    way, largest = case.weight_sync, largest_parameter(case)
    beside = {"servers' weights": case.served_bytes / case.config.rollout.tensor_parallel} if way == "tensor" else {}
    joined = largest if way == "disk" else min(2 * bucket_bytes(case), case.model_bytes)
    joined += 2 * bucket_bytes(case) if way == "delta" else 0  # what is held of one, and its changes
    if stage > 0 and way in ("disk", "tensor"):
        return beside and {"sync bucket": joined} | beside
    # A layer's gate and up projections, which servers fuse: they are kept to be hashed.
    fused = 2 / 3 * expert_parameters(case.hf) / case.hf.num_layers * case.dtype_bytes
    return {"sync bucket": largest + joined + fused} | beside


def server_bytes(case: Scenario) -> float:
    """On each GPU of a server, outside `memory_fraction`: in a process group, one for each pipeline stage, SGLang
    receives the tensors of a bucket and joins them."""
    groups = (case.config.actor.layout.pipeline - 1) * case.constants.communicator_memory
    return 2 * bucket_bytes(case) + groups if case.weight_sync in ("distributed", "delta") else 0.0


def host_bytes(case: Scenario) -> dict[str, float]:
    """In host memory of the trainer's first node, and of all nodes that read a weight version, by what holds them."""
    if case.weight_sync == "delta":
        layout = case.config.actor.layout
        share = min(1, case.constants.gpus_per_node / layout.world_size)
        here = math.ceil(layout.pipeline * share) / layout.pipeline
        return {"first ranks of stages: the weights that servers hold": case.model_bytes * here}
    if case.weight_sync != "disk":
        return {}
    file, whole = min(case.model_bytes, EXPORT_FILE_BYTES) + 2 * largest_parameter(case), case.model_bytes
    return {"rank 0: one file of an export and one tensor": file, "page cache that one weight version fills": whole}
