"""New weights on their way to the servers, in seconds and bytes, by `rollout.weight_sync` (docs/weight_sync.md)."""

from megatron_dapo.actor.model.hf_config import HFModelConfig
from megatron_dapo.config import Config
from megatron_dapo.plan.calibration import Calibration
from megatron_dapo.plan.state import DTYPE_BYTES, model_parameters

EXPORT_FILE_BYTES = 5 * 10**9
"""Of a weight file (`actor.weights.EXPORT_FILE_BYTES`; a test compares)."""


def sync_seconds(config: Config, hf: HFModelConfig, constants: Calibration, *, server_gpus: int) -> float:
    """Of one publish to all servers; a bucket (`tensor`, `distributed`) is gathered, sent, and then comes the next.

    What runs on a GPU at its memory's speed (checksums of tensors there, a server's copies) is not counted.
    """
    model = float(model_parameters(hf) * DTYPE_BYTES[config.model.dtype])
    tensor_parallel = config.rollout.tensor_parallel
    if config.rollout.weight_sync == "disk":
        return _disk_seconds(model, constants, servers=server_gpus / tensor_parallel, gpus=server_gpus)
    layout = config.actor.layout
    shards = layout.tensor * layout.pipeline
    gather = model * (1 - 1 / shards) / constants.link(shards)
    if config.rollout.weight_sync == "tensor":
        # To the host once; then every rank of every server takes its share, each over a link of its own.
        return gather + model / constants.host_bandwidth + model / tensor_parallel / constants.host_bandwidth
    # A broadcast is a pipeline through all ranks: each passes on what it receives.
    return gather + model / constants.link(layout.world_size + server_gpus)


def _disk_seconds(model: float, constants: Calibration, *, servers: float, gpus: int) -> float:
    """Rank 0 gathers, and writes while it hashes; then the servers of every node read."""
    # The first on a node fills its page cache; all wait for the same disk.
    readers = readers_of_a_node(servers, gpus, constants)
    read = max(model / constants.disk_read, model * readers / constants.gather_bandwidth)
    return (
        model / constants.gather_bandwidth
        + max(model / constants.disk_write, model / constants.checksum_bandwidth)
        + read
    )


def readers_of_a_node(servers: float, gpus: int, constants: Calibration) -> float:
    """Servers that read on the same node."""
    return max(1.0, servers / -(-gpus // constants.gpus_per_node))


def largest_parameter(config: Config, hf: HFModelConfig) -> float:
    """Bytes of the embedding, or of the fused gate and up projection: never cut, so the least that a bucket takes."""
    return float(max(hf.vocab_size, 2 * hf.ffn_hidden_size) * hf.hidden_size * DTYPE_BYTES[config.model.dtype])


def bucket_bytes(config: Config, hf: HFModelConfig) -> float:
    """Of a bucket (`tensor`, `distributed`)."""
    return max(float(config.rollout.sync_bucket_mb << 20), largest_parameter(config, hf))


def rank_bytes(config: Config, hf: HFModelConfig) -> float:
    """On the GPU of trainer rank 0: the whole of one parameter is gathered there, and joined once more, in a copy
    (`disk`) or in its bucket."""
    largest = largest_parameter(config, hf)
    return largest + (largest if config.rollout.weight_sync == "disk" else bucket_bytes(config, hf))


def server_bytes(config: Config, hf: HFModelConfig) -> float:
    """On each GPU of a server, outside `memory_fraction`: in a process group SGLang receives the tensors of a bucket
    and joins them."""
    return 2 * bucket_bytes(config, hf) if config.rollout.weight_sync == "distributed" else 0.0


def host_bytes(config: Config, hf: HFModelConfig) -> dict[str, float]:
    """In host memory of trainer rank 0, and of all nodes that read a weight version, by what holds them."""
    model = float(model_parameters(hf) * DTYPE_BYTES[config.model.dtype])
    if config.rollout.weight_sync == "tensor":
        return {"rank 0: one bucket": bucket_bytes(config, hf)}
    if config.rollout.weight_sync == "distributed":
        return {}
    return {
        "rank 0: one file of an export and one tensor": min(model, EXPORT_FILE_BYTES)
        + 2 * largest_parameter(config, hf),
        "page cache that one weight version fills": model,
    }
