"""A real SGLang server on a GPU: weights by memory and by process group, checksums, log-prob gap, and both speeds.

Qwen2.5-0.5B's shape with random weights, in bfloat16. With one GPU, trainer and server share it and the group is
gloo's; with two or more the server has one of its own and the group is NCCL's.
"""

import asyncio
import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_dapo.actor.messages import LogProbs, Responses
from megatron_dapo.actor.packing import plan_for_actor
from megatron_dapo.actor.ranks import RankPlace
from megatron_dapo.config.actor import ActorConfig
from megatron_dapo.config.model import ModelConfig
from rollout.command import ServerSpec
from rollout.config import RolloutConfig
from rollout.fleet import RolloutFleet
from rollout.messages import Generation, GenerationRequest, SamplingParams
from rollout.server import LocalServer
from tests.coordinator.sync_kit import PoolTrainer

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1200)]

VOCABULARY = 151936
CONTEXT = 2048
RESPONSES = 256
TOKENS = 512
MEAN_GAP = 0.05
"""Nats, of two implementations in bfloat16: `monitor.mismatch_warn`."""


def save_model(folder: Path, seed: int) -> Path:
    """Random weights in Hugging Face format; scaled so that the next token is neither certain nor arbitrary."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
        dtype="bfloat16",
    )
    torch.manual_seed(seed)
    with torch.device("cuda"):
        model = Qwen2ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    del model
    gc.collect()
    torch.cuda.empty_cache()
    return folder


def requests(tokens: int, count: int = RESPONSES) -> list[GenerationRequest]:
    draw = np.random.default_rng(2)
    return [
        GenerationRequest(
            request_id=f"r{at}.",
            group_id=f"g{at // 16}",
            prompt_ids=draw.integers(0, VOCABULARY, 64).astype(np.int32),
            sampling=SamplingParams(max_new_tokens=tokens),
            seed=at,
        )
        for at in range(count)
    ]


def trainer_log_probs(place: RankPlace, folder: Path, responses: Responses) -> LogProbs:
    from megatron_dapo.actor.actor import MegatronActor

    config = ActorConfig(device="cuda")
    actor = MegatronActor(
        config,
        ModelConfig(path=str(folder), context_length=CONTEXT, dtype="bfloat16"),
        rank=0,
        world_size=1,
        rendezvous=place.rendezvous,
        steps_per_rollout=1,
        seed=1,
        timeout_s=300,
    )
    plan = plan_for_actor(responses.sequence_lengths, config, hidden_size=actor.hf.hidden_size)
    found = actor.log_probs(responses, plan, 1.0)
    assert found is not None
    return found


def as_responses(asked: list[GenerationRequest], drawn: list[Generation]) -> Responses:
    pairs = [(one.prompt_ids, answer.token_ids) for one, answer in zip(asked, drawn, strict=True)]
    return Responses(
        token_ids=np.concatenate([ids for pair in pairs for ids in pair]).astype(np.int32),
        sequence_lengths=np.array([prompt.size + answer.size for prompt, answer in pairs], np.int32),
        prompt_lengths=np.array([prompt.size for prompt, _ in pairs], np.int32),
    )


def test_weights_reach_a_real_server_and_it_agrees_with_the_trainer(
    cuda: Callable[..., Any], record: Callable[[str, Any], None], tmp_path: Path
) -> None:
    gpus = torch.cuda.device_count()
    folders = {name: save_model(tmp_path / name, seed) for seed, name in enumerate(("start", "tensor", "distributed"))}
    config = RolloutConfig(max_running_requests=RESPONSES, memory_fraction=0.3 if gpus == 1 else 0.8)
    spec = ServerSpec(
        model_path=folders["start"],
        device="cuda",
        dtype="bfloat16",
        context_length=CONTEXT,
        seed=1,
        log_path=tmp_path / "server.log",
        gpus=(str(gpus - 1),),
    )
    fleet = RolloutFleet(config, [LocalServer(config, spec)], vocab_size=VOCABULARY, report=print)

    def one_rank(_: int, function: Callable[..., Any], *args: Any, timeout_s: float) -> list[Any]:
        return [cuda(function, *args, timeout_s=timeout_s)]

    async def work() -> None:
        await fleet.start(600)
        await asyncio.gather(*map(fleet.generate, requests(16)))  # kernels are made
        for version, transport in enumerate(("tensor", "distributed"), 1):
            for _ in range(2):  # the second time without the first's start-up
                stream = PoolTrainer(
                    one_rank,
                    folders[transport],
                    transport,
                    ranks=1,
                    bucket_bytes=256 << 20,
                    device="cuda",
                    dtype="bfloat16",
                    backend="gloo" if gpus == 1 else "nccl",
                )
                report = await fleet.publish_stream(stream, version)
                assert report.by_disk == {}, report.by_disk
                assert stream.written == 0
                assert report.servers[0].tensors > 24 * 6  # every checksum was compared
            assert stream.sent is not None
            record(f"sync {transport} GB/s", stream.sent.bytes / 1e9 / stream.sent.seconds)
            started = time.monotonic()
            asked = requests(TOKENS)
            drawn = await asyncio.gather(*map(fleet.generate, asked))
            tokens = sum(answer.token_ids.size for answer in drawn)
            record(f"rollout tokens/s after {transport}", tokens / (time.monotonic() - started))
            responses = as_responses(asked, drawn)
            trainer = await asyncio.to_thread(cuda, trainer_log_probs, folders[transport], responses)
            gap = np.abs(trainer.log_probs - np.concatenate([answer.log_probs for answer in drawn]))
            record(f"log-prob gap {transport}, mean and max", [float(gap.mean()), float(gap.max())])
            assert gap.mean() < MEAN_GAP

    try:
        asyncio.run(_and_close(work(), fleet))
    finally:
        print(fleet.engines[0].log_tail())


async def _and_close(work: Any, fleet: RolloutFleet) -> None:
    try:
        await work
    finally:
        await fleet.close()
