"""What one SGLang server is started with: its command line, from the config and what the run knows of its model and
machine, and its API key, which keeps other users of a machine or network away, in a file of its owner."""

import json
import os
import secrets
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from rollout.config import RolloutConfig
from rollout.cpu import DECODE_BACKEND, PREFILL_BACKEND
from rollout.errors import KeyFileError
from rollout.weights import LOADER


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerSpec:
    """What a server needs besides section `rollout`.

    A 32B model on four GPUs of a node: ServerSpec(model_path=Path("/models/Qwen2.5-32B"), device="cuda",
    dtype="bfloat16", context_length=22528, seed=1, log_path=Path("runs/a/server0.log"),
    gpus=("0", "1", "2", "3"))
    """

    model_path: Path
    """Folder in Hugging Face layout; its weights serve until the first publish, unless `rollout.quantization` is set
    and they are not quantized."""
    device: Literal["cpu", "cuda"]
    dtype: str
    """float32 (the CPU's) or bfloat16. Never "auto": SGLang would turn a float32 checkpoint into float16."""
    fp32_head: bool = False
    """Whether the output layer's product is made in float32, from the weights in `dtype`."""
    routed_experts: bool = False
    """Whether it can say which experts each token was sent to."""
    context_length: int
    """Longest prompt and response together, in tokens; at most what the model's config allows."""
    seed: int
    """Of the server's own sampling, for requests without a seed. Each server of a fleet needs another one, or all would
    draw the same noise."""
    log_path: Path
    """Everything that the server prints is appended here."""
    api_key_file: Path | None = None
    """File with the key that the server asks its callers for; None: it answers anybody."""
    draft_model: Path | None = None
    """Folder of `rollout.speculative.draft_model`."""
    weight_version: str = "0"
    """The server's name of the weights in `model_path`."""
    index: int = 0
    """Number of the server; a configured port is counted up from the first server's."""
    shares_memory: bool = False
    """Whether it shares its accelerators' memory with the trainer: it can leave the memory and take it back."""
    gpus: tuple[str, ...] = ()
    """GPUs of this machine that the server sees, as CUDA_VISIBLE_DEVICES names them, as many as
    `rollout.tensor_parallel`; empty: all."""
    nodes: int = 1
    """On how many machines it stands, with a process of its own and an equal part of its ranks on each."""
    node_rank: int = 0
    """Which of these this process is; the first one answers requests."""
    meeting: str = ""
    """host:port on the first one's machine, where they meet; empty with one machine."""

    def starting_with(self, weights: tuple[Path, str] | None) -> "ServerSpec":
        """With other weights, and their name."""
        return self if weights is None else replace(self, model_path=weights[0], weight_version=weights[1])

    def on_nodes(self, nodes: int) -> "list[ServerSpec]":
        """Its processes on so many machines. Each has a log of its own: server0.log, server0.node1.log, ..."""
        logs = [self.log_path, *(self.log_path.with_suffix(f".node{rank}.log") for rank in range(1, nodes))]
        return [replace(self, nodes=nodes, node_rank=rank, log_path=log) for rank, log in enumerate(logs)]


def server_arguments(config: RolloutConfig, spec: ServerSpec, port: int) -> list[str]:
    """Arguments of `rollout.server.launch_server`. `extra_args` come last: SGLang takes the last of two equal flags."""
    arguments = {
        "--model-path": str(spec.model_path),
        "--device": spec.device,
        "--dtype": spec.dtype,
        "--context-length": str(spec.context_length),
        "--tensor-parallel-size": str(config.tensor_parallel),
        "--random-seed": str(spec.seed),
        "--host": config.host,
        "--port": str(port),
        "--max-running-requests": str(config.max_running_requests),
        "--mem-fraction-static": str(config.memory_fraction),
        "--weight-version": spec.weight_version,
        "--sampling-defaults": "openai",  # not those of the model's generation_config.json
        "--log-level-http": "warning",  # else a line for each request
    }
    flags = ["--skip-tokenizer-init", "--skip-server-warmup", "--sleep-on-idle"]
    flags += ["--enable-fp32-lm-head"] if spec.fp32_head else []
    flags += ["--enable-return-routed-experts"] if spec.routed_experts else []
    arguments |= {"--custom-weight-loader": LOADER} if config.weight_sync == "delta" else {}
    kv_cache_tokens = config.kv_cache_tokens
    if config.deterministic:
        flags.append("--enable-deterministic-inference")
    elif config.stream_every:
        flags.append("--incremental-streaming-output")
        arguments["--stream-interval"] = str(config.stream_every)
    if spec.shares_memory and spec.device == "cuda":
        # With the backup they can go on with their old weights, for example after a checkpoint.
        flags += ["--enable-memory-saver", "--enable-weights-cpu-backup"]
        arguments["--cuda-graph-backend-prefill"] = "disabled"  # its default kind cannot leave the memory
    if config.speculates:
        arguments["--speculative-algorithm"] = config.speculative.algorithm.upper()
        tokens = config.speculative.draft_tokens
        arguments |= {"--speculative-num-draft-tokens": str(tokens)} if tokens else {}
        if spec.draft_model is not None:
            arguments["--speculative-draft-model-path"] = str(spec.draft_model)
            arguments |= {"--speculative-num-steps": str(tokens - 1), "--speculative-eagle-topk": "1"} if tokens else {}
            flags += ["--enable-draft-weights-cpu-backup"] if spec.shares_memory else []
    if config.quantization_config is not None:
        # Plain weights are then cast to FP8, without scales: such a server draws nothing before its first publish.
        arguments["--json-model-override-args"] = json.dumps({"quantization_config": config.quantization_config})
    if spec.device == "cuda" and spec.dtype == "float32":
        # FlashAttention 3 and FlashInfer take 16-bit types only, and so does SGLang's RMS norm outside this mode.
        arguments["--attention-backend"] = "triton"
        flags += [] if config.deterministic else ["--enable-deterministic-inference"]
    if spec.device == "cpu":
        arguments["--attention-backend"] = "torch_native"
        arguments |= {"--prefill-attention-backend": PREFILL_BACKEND, "--decode-attention-backend": DECODE_BACKEND}
        # On one core there is nothing to overlap: without it a token takes 15-20 % less work.
        flags.append("--disable-overlap-schedule")
        # SGLang's own choice takes a share of the machine's memory. This much never evicts a running response.
        kv_cache_tokens = kv_cache_tokens or config.max_running_requests * spec.context_length
        if config.deterministic:  # a prompt cut in two would be computed in another order
            # With -1, which is no limit, SGLang makes room for the experts of its running responses' last tokens alone.
            arguments["--chunked-prefill-size"] = str(kv_cache_tokens if spec.routed_experts else -1)
    if spec.nodes > 1:
        arguments |= {"--nnodes": str(spec.nodes), "--node-rank": str(spec.node_rank), "--dist-init-addr": spec.meeting}
    if kv_cache_tokens is not None:
        arguments["--max-total-tokens"] = str(kv_cache_tokens)
    return [word for pair in arguments.items() for word in pair] + flags + list(config.extra_args)


class Secret(str):
    """A text whose repr is hidden: SGLang prints its settings when it starts."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "'***'"


def new_key(path: Path) -> None:
    """Write a fresh key to `path`, readable by its owner only; one that is there is replaced."""
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secrets.token_urlsafe(32))


def read_key(path: Path) -> Secret:
    """The key in a file.

    Raises:
        KeyFileError: it is missing, empty, or others may read it too.
    """
    try:
        mode, key = path.stat().st_mode, path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise KeyFileError(f"{path}: no API key can be read there ({error})") from None
    if mode & 0o077:
        raise KeyFileError(f"{path}: others may read this API key; chmod 600 it")
    if not key.isascii() or len(key.split()) != 1:
        raise KeyFileError(f"{path}: expected one API key: a line of ASCII text without spaces")
    return Secret(key)
