"""Section `rollout`: the SGLang servers and how responses are drawn."""

from typing import Annotated, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

STRICT = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True, allow_inf_nan=False)
PositiveInt = Annotated[int, Field(gt=0)]
PositiveFloat = Annotated[float, Field(gt=0)]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RolloutConfig:
    max_new_tokens: PositiveInt = 20480
    """Longest response in tokens; the upper end of the soft overlong punishment (eq. 13)."""

    temperature: PositiveFloat = 1.0
    """Sampling temperature of training responses; the trainer's log-probs use the same."""

    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus of training responses. Below 1 the engine's log-probs are not those of the distribution sampled from."""

    servers: PositiveInt = 1
    """SGLang servers to start; not read when `urls` names running ones. The run begins without one of ten that cannot
    be started, and goes on starting it; a smaller fleet must be whole."""

    tensor_parallel: PositiveInt = 1
    """GPUs (CPU: processes) of one server."""

    urls: Annotated[tuple[Annotated[str, Field(pattern=r"^https?://[^/]+/?$")], ...], Field(strict=False)] = ()
    """Servers that someone else runs, as http://host:port; empty: the run starts `servers` of its own. A training run
    wants them to itself: new weights end every request there. Started by `python -m rollout.server.launch_server`,
    with the arguments of `sglang.launch_server`, they answer in arrays, which cost the coordinator less than JSON."""

    api_key_file: Annotated[str, Field(min_length=1)] | None = None
    """File with the API key that the servers of `urls` ask for, readable by its owner only; none: they ask for none.
    Servers that the run starts always ask for a key of the run's own."""

    host: str = "127.0.0.1"
    """Address that started servers listen on. On a Ray cluster that was joined, loopback and 0.0.0.0 mean each node's
    own address in the cluster."""

    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port of the first started server, the next ones follow; 0 takes free ones."""

    max_running_requests: PositiveInt = 256
    """Responses that one server decodes at the same time."""

    kv_cache_tokens: PositiveInt | None = None
    """Tokens of KV cache a server; none: SGLang's own choice from `memory_fraction`."""

    memory_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.8
    """Share of the device's memory for weights and KV cache (SGLang's mem-fraction-static)."""

    deterministic: bool = False
    """Each response depends on its seed alone, not on what shares its batch (SGLang's deterministic inference)."""

    weight_sync: Literal["disk", "tensor", "distributed"] = "disk"
    """How new weights reach the servers: `disk`, a folder that all of them read; `tensor`, the memory of the machine
    that trainer rank 0 shares with all servers; `distributed`, a process group (NCCL; gloo on a CPU, or where a server
    shares the trainer's GPU). Every way ends with the checksums, and where the last two fail a folder is read."""

    sync_bucket_mb: PositiveInt = 1024
    """MiB of weights that travel together by `tensor` and `distributed`; a parameter that is larger travels alone. The
    trainer's rank 0 and each rank of a server hold at most two buckets besides the model."""

    sync_deadline_s: PositiveFloat = 300.0
    """Seconds for a bucket to reach every server, for the servers to meet in a process group, and for a server to
    report the checksums of what it got. One that is late is restarted and reads the weights from disk; over NCCL all
    servers of the group are, since the others wait for it on their GPUs."""

    stream_every: Annotated[int, Field(ge=0)] = 4096
    """Tokens after which a server passes on what it has drawn of a response: when the server is lost, at most so many
    are drawn again. 0: it answers with whole responses, and they are drawn again. So it is with `deterministic` too,
    where a response that goes on elsewhere would be computed in another order, and at servers of `urls` that do not run
    with --incremental-streaming-output (their own --stream-interval holds)."""

    request_deadline_s: PositiveFloat = 1800.0
    """Seconds until a response without an answer is given to another server, with the tokens that it has by then."""

    max_attempts: PositiveInt = 5
    """Attempts at one response before the run stops with the server's last words."""

    fleet_deadline_s: PositiveFloat = 300.0
    """Seconds that the run waits while every server is down; the first restart of a server may take longer, up to
    `run.start_deadline_s` and the loading of weights."""

    extra_args: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Further arguments of `sglang.launch_server`, as they are. Refused are those that a key stands for, and those with
    which published weights could not be verified (speculative decoding, quantization, LoRA)."""
