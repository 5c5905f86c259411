"""Section `rollout`: the SGLang servers and how responses are sampled."""

from typing import Annotated, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

STRICT = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True, allow_inf_nan=False)
PositiveInt = Annotated[int, Field(gt=0)]
PositiveFloat = Annotated[float, Field(gt=0)]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RolloutConfig:
    """Section `rollout`: the SGLang servers and how responses are sampled."""

    max_new_tokens: PositiveInt = 20480
    """Maximum length of a response in tokens. The soft overlong penalty (eq. 13) reaches its full size here."""

    temperature: PositiveFloat = 1.0
    """Sampling temperature of training responses. The trainer's log-probs use the same temperature."""

    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling of training responses. Below 1, the engine's log-probs are still those of the full distribution,
    not of the one that was sampled from."""

    servers: PositiveInt = 1
    """Number of SGLang servers to start. Not used when `urls` names running servers. With ten or more servers, the run
    begins even if one in ten does not start, and keeps trying to start it; with fewer, all must start."""

    tensor_parallel: PositiveInt = 1
    """GPUs per server (processes, on a CPU)."""

    urls: Annotated[tuple[Annotated[str, Field(pattern=r"^https?://[^/]+/?$")], ...], Field(strict=False)] = ()
    """Addresses (http://host:port) of servers that are already running. Empty: the run starts `servers` of its own. The
    run must be their only user: a weight update ends all their requests. Start them with
    `python -m rollout.server.launch_server`, which takes the arguments of `sglang.launch_server`: then they answer in
    binary arrays, which cost less CPU time to read than JSON."""

    api_key_file: Annotated[str, Field(min_length=1)] | None = None
    """File with the API key of the servers in `urls`. Only its owner may be able to read it. None: they need no key.
    Servers that the run starts always get a key of their own."""

    host: str = "127.0.0.1"
    """Address on which started servers listen. With a Ray cluster that the run joined, a loopback address or 0.0.0.0
    means each node's own address in the cluster."""

    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port of the first started server; the others use the ports after it. 0: free ports."""

    max_running_requests: PositiveInt = 256
    """Maximum number of responses that one server decodes at the same time."""

    kv_cache_tokens: PositiveInt | None = None
    """Size of each server's KV cache in tokens. None: SGLang derives it from `memory_fraction`."""

    memory_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.8
    """Fraction of the device's memory for weights and KV cache (SGLang's mem-fraction-static)."""

    deterministic: bool = False
    """Make each response depend only on its prompt and seed, not on the other requests in its batch (SGLang's
    deterministic inference)."""

    weight_sync: Literal["disk", "tensor", "distributed"] = "disk"
    """How new weights reach the servers. `disk`: a folder that all servers can read. `tensor`: shared memory; all
    servers must run on the machine of trainer rank 0. `distributed`: a process group (NCCL; gloo on a CPU, or where a
    server shares the trainer's GPU). Checksums are compared in every case. If `tensor` or `distributed` fails, the
    servers read a folder."""

    sync_bucket_mb: PositiveInt = 1024
    """MiB of weights that `tensor` and `distributed` send at a time; a larger parameter is sent alone. Trainer rank 0
    and each rank of a server need memory for at most two buckets besides the model."""

    sync_deadline_s: PositiveFloat = 300.0
    """Time limit in seconds for each of these: sending a bucket to all servers, forming the process group, and a
    server's report of its checksums. A server that is late is restarted and reads the weights from disk. Over NCCL all
    servers of the group are restarted, because the others wait for it on their GPUs."""

    stream_every: Annotated[int, Field(ge=0)] = 4096
    """A server sends the tokens of a response in steps of this many. If the server is lost, at most this many tokens
    have to be sampled again. 0: no streaming; the whole response is sampled again. `deterministic` turns streaming off
    too, because a response that continues at another server is computed in another order. Servers of `urls` stream only
    if they run with --incremental-streaming-output, in steps of their own --stream-interval."""

    request_deadline_s: PositiveFloat = 1800.0
    """Time limit in seconds for one request. Then another server continues the response from the tokens it has."""

    max_attempts: PositiveInt = 5
    """Number of failed attempts at one response after which the run stops and shows the server's last error."""

    fleet_deadline_s: PositiveFloat = 300.0
    """Seconds for which all servers may be down before the run stops. The first restart of a server may take longer: up
    to `run.start_deadline_s` and the time to load the weights."""

    extra_args: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """More arguments for `sglang.launch_server`. Not allowed: arguments that a config key stands for, and those with
    which published weights could not be verified (speculative decoding, quantization, LoRA)."""
