"""One real SGLang server on the CPU with a tiny random model, and what tests of it share."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import psutil
import pytest
import torch
from transformers import DynamicCache

from rollout.config import RolloutConfig
from rollout.fleet.fleet import RolloutFleet
from rollout.generation import Generation, GenerationRequest, SamplingParams
from rollout.server.engine import LocalServer
from rollout.server.server_command import ServerSpec, new_key, read_key
from tests.rollout.folders import CONTEXT, VOCABULARY, save_model

T = TypeVar("T")
START_S = 300.0
# An MLP width that SGLang fills up, and an embedding that is the head.
SHAPES: dict[str, dict[str, object]] = {"qwen3": {}, "qwen2": {"tie_word_embeddings": True, "intermediate_size": 100}}


@dataclass(frozen=True, kw_only=True)
class Place:
    """A fleet of one real server, in a loop that each test runs for a while."""

    loop: asyncio.AbstractEventLoop
    fleet: RolloutFleet
    server: LocalServer
    folder: Path
    model: torch.nn.Module
    reports: list[str]

    def run(self, work: Awaitable[T], seconds: float = START_S) -> T:
        return self.loop.run_until_complete(asyncio.wait_for(work, seconds))


def make_place(
    loop: asyncio.AbstractEventLoop,
    root: Path,
    kind: str,
    *,
    deterministic: bool,
    routed_experts: bool = False,
    settings: Mapping[str, Any] = {},
    **changes: object,
) -> Place:
    folder, reports, key_file = root / kind, list[str](), root / f"{kind}.key"
    new_key(key_file)
    model = save_model(folder, kind, seed=1, **changes)
    given: dict[str, Any] = {"max_running_requests": 64, "kv_cache_tokens": 32768, "stream_every": 16}
    config = RolloutConfig(deterministic=deterministic, memory_fraction=0.5, **given | dict(settings))
    spec = ServerSpec(
        model_path=folder,
        device="cpu",
        dtype="float32",
        context_length=CONTEXT,
        seed=3,
        log_path=root / f"{kind}.log",
        api_key_file=key_file,
        routed_experts=routed_experts,
    )
    server = LocalServer(config, spec)
    options = {"report": reports.append, "api_key": read_key(key_file), "routed_experts": routed_experts}
    fleet = RolloutFleet(config, [server], vocab_size=VOCABULARY, **options)  # type: ignore[arg-type]
    return Place(loop=loop, fleet=fleet, server=server, folder=folder, model=model, reports=reports)


@pytest.fixture(scope="module", name="places")
def places_fixture(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Place]]:
    root, loop = tmp_path_factory.mktemp("servers"), asyncio.new_event_loop()
    made = {
        "qwen3": make_place(loop, root, "qwen3", deterministic=True, **SHAPES["qwen3"]),
        "qwen2": make_place(loop, root, "qwen2", deterministic=False, **SHAPES["qwen2"]),
    }

    async def each(action: Callable[[RolloutFleet], Awaitable[object]]) -> None:
        await asyncio.gather(*(action(place.fleet) for place in made.values()))

    try:
        loop.run_until_complete(each(lambda fleet: fleet.start(START_S)))
        groups = [place.server.process.pid for place in made.values() if place.server.process is not None]
        yield made
    finally:
        loop.run_until_complete(each(lambda fleet: fleet.close()))
        loop.close()
    assert not [process for process in psutil.process_iter() if _group(process.pid) in groups], "servers left behind"


def _group(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return -1


def requests_of(count: int, seed: int, tokens: int = 40, **sampling: object) -> list[GenerationRequest]:
    """Prompts of 1 to 300 tokens, in groups of four."""
    draw = np.random.default_rng(seed)
    lengths = draw.choice([1, 2, 9, 40, 130, 300], -(-count // 4))
    prompts = [draw.integers(0, VOCABULARY, length).astype(np.int32) for length in lengths]
    made = []
    for index in range(count):
        params = SamplingParams(max_new_tokens=int(draw.integers(1, tokens + 1)), **sampling)  # type: ignore[arg-type]
        made.append(
            GenerationRequest(
                request_id=f"{seed}/{index}",
                group_id=f"{seed}/{index // 4}",
                prompt_ids=prompts[index // 4],
                sampling=params,
                seed=int(draw.integers(2**62)),
            )
        )
    return made


async def all_of(fleet: RolloutFleet, asked: list[GenerationRequest]) -> list[Generation]:
    return await asyncio.gather(*map(fleet.generate, asked))


def reference(model: torch.nn.Module, prompt: np.ndarray, response: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """Log-probs [T] by Hugging Face's forward over prompt and response."""
    ids = torch.from_numpy(np.concatenate([prompt, response])).long()[None]
    with torch.no_grad():
        logits = model(ids).logits[0, prompt.size - 1 : -1].double() / temperature
    return logits.log_softmax(-1).gather(1, ids[0, prompt.size :, None])[:, 0].numpy()


def read_in_turn(
    models: Mapping[int, torch.nn.Module],
    one: GenerationRequest,
    drawn: Generation,
    read: Callable[[torch.nn.Module, torch.Tensor, DynamicCache], np.ndarray],
) -> np.ndarray:
    """[P + T - 1, ...]: what `read` makes of each token of prompt and response but the last, where the version that
    drew the next token reads it, on top of the keys and values that older versions have left."""
    ids = torch.from_numpy(np.concatenate([one.prompt_ids, drawn.token_ids])).long()[None]
    by = np.concatenate([np.full(one.prompt_ids.size - 1, drawn.weight_versions[0]), drawn.weight_versions])
    cache, parts = DynamicCache(), []
    for places in np.split(np.arange(by.size), np.flatnonzero(np.diff(by)) + 1):
        with torch.no_grad():
            parts.append(read(models[int(by[places[0]])], ids[:, places[0] : places[-1] + 1], cache))
    return np.concatenate(parts)


def reference_in_flight(models: Mapping[int, torch.nn.Module], one: GenerationRequest, drawn: Generation) -> np.ndarray:
    """Log-probs [T] by Hugging Face's forward with the weights of each token's version, on old keys and values."""

    def logits(model: torch.nn.Module, ids: torch.Tensor, cache: DynamicCache) -> np.ndarray:
        return model(ids, past_key_values=cache, use_cache=True).logits[0].double().log_softmax(-1).numpy()

    rows = read_in_turn(models, one, drawn, logits)[one.prompt_ids.size - 1 :]
    return np.take_along_axis(rows, drawn.token_ids[:, None].astype(np.int64), 1)[:, 0]


def on_publish(place: Place, mode: str) -> None:
    """The servers are the same for every mode."""
    config = replace(place.fleet.config, on_publish=mode)
    place.fleet._publisher.config = place.fleet._requests.config = config


def kill(place: Place) -> None:
    assert place.server.process is not None
    os.kill(place.server.process.pid, signal.SIGKILL)


async def begun(place: Place, requests: int) -> None:
    """Waits until so many of the requests have streamed tokens: no time is right for every machine. TimeoutError: some
    ended first, and never will."""
    responses = place.fleet._requests._responses
    async with asyncio.timeout(60):
        while sum(bool(each.streaming and each.streaming[1]) for each in responses.values()) < requests:
            await asyncio.sleep(0.01)


def assert_log_probs(model: torch.nn.Module, asked: list[GenerationRequest], answers: list[Generation]) -> None:
    for one, answer in zip(asked, answers, strict=True):
        expected = reference(model, one.prompt_ids, answer.token_ids, one.sampling.temperature or 1.0)
        np.testing.assert_allclose(answer.log_probs, expected, atol=1e-4, rtol=0)
