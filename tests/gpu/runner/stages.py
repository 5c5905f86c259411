"""The stages of `make test-gpu`, in their order: what is cheap and tells most comes first.

The planned seconds are guesses: a page that the runner wrote (gpu.md) holds measured ones.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One child process that runs pytest over some files."""

    name: str
    tests: tuple[str, ...]
    """Files below the repository's root, or absolute paths."""
    shows: str
    """What a pass means, in one line."""
    planned_s: int
    deadline_s: int
    """After it every process of the stage is killed."""
    gpus: int = 1
    """Least number of GPUs. A stage that needs several is skipped on fewer."""
    cpu: bool = False
    """Whether it also runs with `--device cpu`, at small sizes."""
    alone: bool = False
    """With `--together`: runs after the others, by itself, since it needs the GPU's memory or measures its speed."""


def _stage(name: str, file: str, shows: str, planned_s: int, deadline_s: int, **more: int | bool) -> Stage:
    return Stage(
        name=name,
        tests=(f"tests/gpu/test_{file}_on_gpu.py",),
        shows=shows,
        planned_s=planned_s,
        deadline_s=deadline_s,
        **more,  # type: ignore[arg-type]
    )


QUIET = {"cpu": True, "alone": True}
STAGES = (
    _stage("environment", "environment", "driver, CUDA and every compiled package load and compute", 75, 150, cpu=True),
    _stage("server", "server", "an SGLang server answers; greedy tokens are transformers'", 120, 260, cpu=True),
    _stage("actor", "actor", "log-probs, gradients by kind of layer and steps are the CPU's", 120, 300, cpu=True),
    _stage(
        "experts", "experts", "grouped experts and SGLang's fused ones are the CPU's; routing; MFU", 60, 300, **QUIET
    ),
    _stage("quickstart", "quickstart", "one step of the quickstart, bfloat16 and float32", 200, 420),
    _stage("publish", "rollout", "weights by disk, memory and group; checksums; log-prob gap", 120, 300, cpu=True),
    _stage("colocated", "colocated", "trainer and server take turns in one GPU's memory", 120, 300, alone=True),
    _stage("checkpoint", "checkpoint", "a CPU's checkpoint resumes on the GPU and back", 60, 150, cpu=True),
    _stage("optimizer", "optimizer", "the step on the CPU and compact state, with TransformerEngine", 40, 180),
    _stage("fp8", "fp8", "FP8 steps and resume with TransformerEngine", 75, 180),
    _stage("log-prob kernel", "logprob", "log-probs against float64; memory and time against naive", 40, 120, **QUIET),
    _stage("hashing", "hashing", "checksums on the GPU and on a CPU thread, GB/s", 20, 60, **QUIET),
    _stage("update speed", "throughput", "tokens/s and MFU of an update at true widths", 240, 360, **QUIET),
    _stage("speculation", "speculative", "drafted tokens are the model's: log-probs and distribution", 60, 240),
    _stage(
        "FP8 rollouts", "quantized", "an FP8 server by every way; checksums; gaps in log-probs", 90, 500, alone=True
    ),
    _stage("two GPUs: layouts", "layouts", "TP2, PP2, DP2 and, with TE, CP2 over NCCL are one GPU", 120, 240, gpus=2),
    _stage("two GPUs: publish", "nccl_publish", "weights by NCCL to a server on another GPU", 100, 240, gpus=2),
)
"""Planned for one GPU: 1440 s, 24 minutes. With two GPUs 220 s more: a limit of 26 minutes then leaves out the last
stage where every stage takes what is planned."""
