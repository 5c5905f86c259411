"""Where the GPU tests run, and what several of them share: a small model, and a real server that answers.

GPU_TESTS_DEVICE=cpu runs those that can on the CPU, at small sizes: it checks the tests, not the GPU path.
"""

import asyncio
import importlib.util
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np

from rollout.config import RolloutConfig
from rollout.fleet.fleet import RolloutFleet
from rollout.generation import Generation, GenerationRequest, SamplingParams
from rollout.server.engine import LocalServer
from rollout.server.server_command import ServerSpec
from tests.actor.tiny import save_tiny

DEVICE: Literal["cpu", "cuda"] = "cpu" if os.environ.get("GPU_TESTS_DEVICE") == "cpu" else "cuda"
ON_CPU = DEVICE == "cpu"
DTYPES = ["float32"] if ON_CPU else ["bfloat16", "float32"]
START_S = 300.0
VOCABULARY = 4096
T = TypeVar("T")


def save_small(folder: Path, family: str = "qwen2", *, tied: bool = True, seed: int = 0, **changes: Any) -> Path:
    """Four layers of width 256 with heads of 64: a size that FlashAttention, FlashInfer and TransformerEngine take.

    Small random weights, so that bfloat16's rounding stays small beside the values themselves.
    """
    shape = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": VOCABULARY, "max_position_embeddings": 512}
    heads = {"head_dim": 64} if family == "qwen3" else {}
    return save_tiny(folder, family, tied=tied, seed=seed, **(shape | heads | changes))


def kernel_arguments() -> tuple[str, ...]:
    """For servers whose sglang-kernel came without FlashAttention 3, as it does where an install must be small:
    SGLang takes FlashAttention 3 and FlashInfer on Hopper unasked."""
    found = importlib.util.find_spec("sgl_kernel")
    places = [Path(place) for place in (found.submodule_search_locations or [])] if found else []
    if ON_CPU or any(file for place in places for file in place.glob("flash_ops*.so")):
        return ()
    return ("--attention-backend", "triton", "--sampling-backend", "pytorch")


def serve(
    folder: Path,
    log: Path,
    dtype: str,
    work: Callable[[RolloutFleet], Awaitable[T]],
    *,
    vocabulary: int = VOCABULARY,
    context: int = 512,
    gpus: tuple[str, ...] = (),
    shares_memory: bool = False,
    routed_experts: bool = False,
    draft_model: Path | None = None,
    report: Callable[[str], None] = print,
    **fields: Any,
) -> T:
    """The result of `work` on a fleet of one real server of the model in `folder`; its log is printed on failure."""
    sizes = {"kv_cache_tokens": 16384, "memory_fraction": 0.5 if ON_CPU else 0.3, "max_running_requests": 64}
    config = RolloutConfig(**(sizes | {"extra_args": kernel_arguments()} | fields))
    spec = ServerSpec(
        model_path=folder,
        device=DEVICE,
        dtype=dtype,
        context_length=context,
        seed=1,
        log_path=log,
        gpus=gpus,
        shares_memory=shares_memory,
        routed_experts=routed_experts,
        draft_model=draft_model,
    )
    told = {"report": report, "routed_experts": routed_experts}
    fleet = RolloutFleet(config, [LocalServer(config, spec)], vocab_size=vocabulary, **told)  # type: ignore[arg-type]

    async def whole() -> T:
        try:
            await fleet.start(START_S)
            return await work(fleet)
        except BaseException:
            print(fleet.engines[0].log_tail())
            raise
        finally:
            await fleet.close()

    return asyncio.run(whole())


def requests(count: int, tokens: int, *, temperature: float = 1.0, vocabulary: int = VOCABULARY, prompt: int = 64):
    """Random prompts in groups of sixteen."""
    draw = np.random.default_rng(2)
    return [
        GenerationRequest(
            request_id=f"r{at}.",
            group_id=f"g{at // 16}",
            prompt_ids=draw.integers(0, vocabulary, prompt).astype(np.int32),
            sampling=SamplingParams(max_new_tokens=tokens, temperature=temperature),
            seed=at,
        )
        for at in range(count)
    ]


async def answers(fleet: RolloutFleet, asked: list[GenerationRequest]) -> list[Generation]:
    return await asyncio.gather(*map(fleet.generate, asked))
