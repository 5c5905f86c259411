"""Section `rollout`: the SGLang servers and how responses are sampled."""

from dataclasses import replace
from operator import attrgetter
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

# SGLang leaves a few tokens of its context empty (7 in 0.5.17): a longest response may be cut by up to this many.
CONTEXT_RESERVE = 8

STRICT = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True, allow_inf_nan=False)

WeightWay = Literal["disk", "tensor", "distributed", "delta"]

QUANTIZATION = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
"""What config.json says of FP8 weights as a trainer makes them (megatron_dapo.actor.weights.quantize)."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class StageConfig:
    """Sampling of training responses from a rollout step on."""

    from_step: PositiveInt
    """Its first rollout step, from 1 on."""

    max_new_tokens: PositiveInt | None = None
    """None: as before."""

    temperature: PositiveFloat | None = None
    """None: as before."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SpeculativeConfig:
    """Section `rollout.speculative`: servers on GPUs check several drafted tokens in one forward pass."""

    algorithm: Literal["off", "ngram", "eagle", "eagle3", "standalone"] = "off"
    """SGLang's `--speculative-algorithm` (docs/run_modes.md)."""

    draft_model: Annotated[str, Field(min_length=1)] | None = None
    """Folder in Hugging Face layout."""

    draft_tokens: Annotated[int, Field(ge=2)] | None = None
    """Checked in a forward pass. None: SGLang's choice."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RolloutConfig:
    """Section `rollout`: the SGLang servers and how responses are sampled."""

    max_new_tokens: PositiveInt = 20480
    """Longest response in tokens; the soft overlong penalty (eq. 13) reaches its full size here."""

    temperature: PositiveFloat = 1.0
    """Sampling temperature of training responses, and of the trainer's log-probs."""

    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling of training responses. Below 1, the engine's log-probs are still those of the full
    distribution."""

    stages: Annotated[tuple[StageConfig, ...], Field(strict=False)] = ()
    """Other `max_new_tokens` (as DeepScaleR and Skywork-OR1) and `temperature` (Polaris) from a step on. What
    was sent before is generated again. Evaluations allow the longest."""

    thinking_budget: PositiveInt | None = None
    """Sampled tokens after which a response that still thinks is given `thinking_end`; it goes on up to
    `max_new_tokens` (ScaleRL, arXiv 2510.13786). Also in evaluations. None: never."""

    thinking_end: Annotated[str, Field(pattern=r"\S")] | None = None
    """Text that ends the thinking. Its tokens are context alone: no loss, statistic or length counts them."""

    thinking_mark: Annotated[str, Field(min_length=1)] | None = None
    """A response with this text in its first `thinking_budget` tokens has ended its thinking by itself. None:
    `thinking_end` without the space around it."""

    max_turns: PositiveInt = 8
    """Responses of an episode, at most (docs/environments.md); `max_new_tokens` limits them together."""

    max_observation_tokens: PositiveInt = 512
    """Given between two turns, at most; a longer observation loses its middle."""

    turn_end: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(strict=False)] = ()
    """Texts of one token each that end a turn too, as `</tool_call>`."""

    servers: PositiveInt = 1
    """SGLang servers to start, unless `urls` names running ones."""

    start_quorum: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Share of the servers, rounded up, with which the run begins once the others take twice as long. These join later,
    with the weights of that time."""

    tensor_parallel: PositiveInt = 1
    """GPUs per server (processes, on a CPU). More than a node has come in equal parts from several of a joined Ray
    cluster."""

    urls: Annotated[tuple[Annotated[str, Field(pattern=r"^https?://[^/]+/?$")], ...], Field(strict=False)] = ()
    """Addresses (http://host:port) of running servers, instead of `servers`. The run must be their only user.
    `python -m rollout.server.launch_server`, with SGLang's arguments, starts one whose answers are faster to read."""

    api_key_file: Annotated[str, Field(min_length=1)] | None = None
    """File with the API key of the servers in `urls`, readable by its owner only. None: they need no key."""

    host: str = "127.0.0.1"
    """Address on which started servers listen. In a Ray cluster that the run joined, a loopback address or 0.0.0.0
    means each node's own."""

    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port of the first started server; the others use the ports after it. 0: free ports, of 20000 to 32767."""

    max_running_requests: PositiveInt = 256
    """Responses that one server decodes at a time."""

    quantization: Literal["none", "fp8"] = "none"
    """`fp8`: servers hold the layers' weights in FP8 and multiply in it (docs/weight_sync.md). Needs GPUs and
    `algorithm.importance.mode`. The trainer's is `actor.fp8`."""

    kv_cache_tokens: PositiveInt | None = None
    """Size of each server's KV cache in tokens. None: SGLang derives it from `memory_fraction`."""

    memory_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.8
    """Fraction of the device's memory for weights and KV cache."""

    deterministic: bool = False
    """Make each response depend only on its prompt and seed (SGLang's deterministic inference)."""

    on_publish: Literal["restart", "recompute", "keep"] = "restart"
    """How running responses go on with new weights: `restart` once the fleet has them, `recompute` and `keep` each at
    its server once that has them; `keep` on its old keys and values (PipelineRL, arXiv 2509.19128)."""

    weight_sync: Literal["auto", WeightWay] = "auto"
    """How new weights reach the servers (docs/weight_sync.md, also which one `auto` takes). `disk`: a folder that all
    can read; also where another way fails. `tensor`: GPUs that both use in turn (`run.mode: colocated`).
    `distributed`: a process group. `delta`: the same, only values that changed."""

    sync_bucket_mb: PositiveInt = 1024
    """MiB of weights that `tensor`, `distributed` and `delta` send at a time; a larger parameter is sent alone."""

    sync_deadline_s: PositiveFloat = 300.0
    """Seconds for a bucket to all servers, for the process group to form, and for a server's checksums."""

    stream_every: Annotated[int, Field(ge=0)] = 4096
    """A server sends a response in steps of this many tokens; about so many are lost with it. 0, and with
    `deterministic`: all at once. Servers of `urls` stream only with
    --incremental-streaming-output, in steps of their own --stream-interval."""

    request_deadline_s: PositiveFloat = 1800.0
    """Seconds for one request; then another server continues the response."""

    max_attempts: PositiveInt = 5
    """Failed attempts at one response that stop the run, with the server's last error."""

    fleet_deadline_s: PositiveFloat = 300.0
    """Seconds for which all servers may be down before the run stops; for a first restart `run.start_deadline_s` and a
    load more."""

    client_processes: Annotated[int, Field(ge=0)] = 0
    """Processes that play for the coordinator (docs/environments.md)."""

    speculative: SpeculativeConfig = SpeculativeConfig()

    extra_args: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """More arguments for `sglang.launch_server`; none that a key stands for, nor with which weights could not be
    verified (quantization, LoRA)."""

    @property
    def speculates(self) -> bool:
        """Whether servers draft tokens. SGLang 0.5.17 then reads no folder of new weights: it would read it into the
        draft model too, or, without one, crash."""
        return self.speculative.algorithm != "off"

    @property
    def quantization_config(self) -> dict[str, Any] | None:
        """What config.json says of weights like the servers'; None: they are not quantized."""
        return None if self.quantization == "none" else QUANTIZATION

    @property
    def longest_response(self) -> int:
        """`max_new_tokens` of the stage that allows most."""
        return max([self.max_new_tokens, *(stage.max_new_tokens or 0 for stage in self.stages)])

    @property
    def shortest_limit(self) -> int:
        """`max_new_tokens` of the stage that allows least."""
        return min(self.at_step(step).max_new_tokens for step in (1, *(stage.from_step for stage in self.stages)))

    @property
    def longest_continuation(self) -> int:
        """Tokens behind a prompt, at most: `longest_response`, and those of `thinking_end`, which have a byte or more
        each."""
        return self.longest_response + len((self.thinking_end or "").encode())

    def at_step(self, step: int) -> "RolloutConfig":
        """With the values that hold in rollout step `step`."""
        begun = sorted((stage for stage in self.stages if stage.from_step <= step), key=attrgetter("from_step"))
        limits = [self.max_new_tokens, *(stage.max_new_tokens for stage in begun if stage.max_new_tokens)]
        temperatures = [self.temperature, *(stage.temperature for stage in begun if stage.temperature)]
        return replace(self, max_new_tokens=limits[-1], temperature=temperatures[-1])
