"""What the publish tests on one GPU and on two share: a model of a real shape, a trainer that sends it, comparisons."""

import asyncio
import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from megatron_dapo.actor.packing import plan_for_actor
from megatron_dapo.actor.step_data import LogProbs, Responses
from megatron_dapo.config.actor_config import ActorConfig
from megatron_dapo.config.run_config import ModelConfig
from rollout.fleet.fleet import RolloutFleet
from rollout.generation import Generation, GenerationRequest
from tests.coordinator.sync_kit import PoolTrainer
from tests.gpu.place import DEVICE, ON_CPU, answers, requests
from tools.rank_pool import RankPlace

if TYPE_CHECKING:
    from megatron_dapo.actor.actor import MegatronActor

DTYPE = "float32" if ON_CPU else "bfloat16"
VOCABULARY = 1000 if ON_CPU else 151936
CONTEXT = 512 if ON_CPU else 2048
RESPONSES, TOKENS = (8, 16) if ON_CPU else (256, 512)
BUCKET = 1 << 18 if ON_CPU else 256 << 20
MEAN_GAP = 1e-4 if ON_CPU else 0.05
"""Nats, of two implementations: in bfloat16 what `monitor.mismatch_warn` warns at."""

QWEN_05B: dict[str, Any] = {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
}
TINY: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 1024,
}


def save_qwen(folder: Path, seed: int = 0, **shape: Any) -> Path:
    """Random weights of Qwen2.5-0.5B's shape, or of `shape`, in Hugging Face format, drawn on the device."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    defaults = (TINY if ON_CPU else QWEN_05B) | {"vocab_size": VOCABULARY, "tie_word_embeddings": True}
    torch.manual_seed(seed)
    with torch.device(DEVICE):
        model = Qwen2ForCausalLM(Qwen2Config(**(defaults | {"dtype": DTYPE} | shape))).to(getattr(torch, DTYPE))
    model.save_pretrained(folder)
    del model
    gc.collect()
    if not ON_CPU:
        torch.cuda.empty_cache()
    return folder


def trainer_of(
    on_device: Callable[..., Any],
    folder: Path,
    transport: str,
    backend: str,
    quantization: dict[str, Any] | None = None,
) -> PoolTrainer:
    """A trainer of one rank on the device that holds the weights of `folder`, and sends them as `quantization` says."""

    def run(_: int, function: Callable[..., Any], *args: Any, timeout_s: float) -> list[Any]:
        return [on_device(function, *args, timeout_s=timeout_s)]

    place: dict[str, Any] = {"ranks": 1, "bucket_bytes": BUCKET, "device": DEVICE, "dtype": DTYPE, "backend": backend}
    return PoolTrainer(run, folder, transport, quantization=quantization, **place)


async def publish_twice(
    fleet: RolloutFleet,
    on_device: Callable[..., Any],
    folders: tuple[Path, Path],
    transport: str,
    backend: str,
    quantization: dict[str, Any] | None = None,
) -> dict[str, float]:
    """Two publishes in a row, of other weights: the second is without the first's start-up. Checksums are compared by
    the fleet, which reads the disk instead where they differ: that is an error here."""
    seconds: list[float] = []
    stream = None
    for version, folder in enumerate(folders, 1):
        stream = trainer_of(on_device, folder, transport, backend, quantization)
        began = time.monotonic()
        report = await fleet.publish_stream(stream, version)
        seconds.append(time.monotonic() - began)
        assert report.by_disk == {}, report.by_disk
        assert stream.written == 0
        assert min(report.servers.values()) > 6, "every checksum was compared"
        assert stream.sent is not None
    assert stream is not None
    assert stream.sent is not None
    gigabytes = stream.sent.bytes / 1e9
    return {"GB": gigabytes, "first, s": seconds[0], "second, s": seconds[1], "GB/s": gigabytes / seconds[1]}


def actor_of(place: RankPlace, folder: Path) -> "MegatronActor":
    """One rank, in the tests' type."""
    from megatron_dapo.actor.actor import MegatronActor

    return MegatronActor(
        ActorConfig(device=DEVICE),
        ModelConfig(path=str(folder), context_length=CONTEXT, dtype=DTYPE),
        rank=0,
        world_size=1,
        rendezvous=place.rendezvous,
        steps_per_rollout=1,
        seed=1,
        timeout_s=120,
    )


def log_probs_of(place: RankPlace, folder: Path, responses: Responses) -> LogProbs:
    """By the actor."""
    actor = actor_of(place, folder)
    plan = plan_for_actor(responses.sequence_lengths, actor.config, hidden_size=actor.hf.hidden_size)
    found = actor.log_probs(responses, plan, 1.0)
    assert found is not None
    return found


async def drawn_and_compared(fleet: RolloutFleet, on_device: Callable[..., Any], folder: Path) -> dict[str, float]:
    """Tokens a second of the server, and how far its log-probs are from the trainer's under the same weights."""
    asked = requests(RESPONSES, TOKENS, vocabulary=VOCABULARY)
    began = time.monotonic()
    drawn = await answers(fleet, asked)
    seconds = time.monotonic() - began
    trainer = await asyncio.to_thread(on_device, log_probs_of, folder, _as_responses(asked, drawn))
    gap = np.abs(trainer.log_probs - np.concatenate([answer.log_probs for answer in drawn]))
    tokens = sum(answer.token_ids.size for answer in drawn)
    return {"tokens/s": tokens / seconds, "mean gap": float(gap.mean()), "largest gap": float(gap.max())}


def _as_responses(asked: list[GenerationRequest], drawn: list[Generation]) -> Responses:
    pairs = [(one.prompt_ids, answer.token_ids) for one, answer in zip(asked, drawn, strict=True)]
    return Responses(
        token_ids=np.concatenate([ids for pair in pairs for ids in pair]).astype(np.int32),
        sequence_lengths=np.array([prompt.size + answer.size for prompt, answer in pairs], np.int32),
        prompt_lengths=np.array([prompt.size for prompt, _ in pairs], np.int32),
    )
