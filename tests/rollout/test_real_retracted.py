"""Real SGLang with too little room: responses that have begun lose their places, and publishes come meanwhile."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rollout.config import RolloutConfig
from rollout.fleet.fleet import RolloutFleet
from rollout.fleet.member import Timing
from rollout.generation import Generation, GenerationRequest, SamplingParams
from rollout.server.engine import LocalServer
from rollout.server.server_command import ServerSpec
from tests.rollout.folders import CONTEXT, VOCABULARY, save_model
from tests.rollout.real_kit import SHAPES, START_S, assert_log_probs, requests_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(torch.cuda.is_available(), reason="this server is started for the CPU"),
]
TOKENS = 450


def _long(one: GenerationRequest) -> GenerationRequest:
    return replace(one, sampling=SamplingParams(max_new_tokens=TOKENS), prompt_ids=one.prompt_ids[:20])


def test_no_token_is_doubled_where_a_response_lost_its_place(tmp_path: Path) -> None:
    folder, log = tmp_path / "model", tmp_path / "server.log"
    model = save_model(folder, "qwen2", seed=1, **SHAPES["qwen2"])
    config = RolloutConfig(
        max_running_requests=16,
        kv_cache_tokens=1200,
        memory_fraction=0.5,
        stream_every=8,
        extra_args=("--schedule-conservativeness", "0.01"),  # takes in more than it has room for
    )
    spec = ServerSpec(model_path=folder, device="cpu", dtype="float32", context_length=CONTEXT, seed=3, log_path=log)
    asked = [_long(one) for one in requests_of(16, seed=4)]

    async def later(fleet: RolloutFleet, seconds: float, one: GenerationRequest) -> Generation:
        """A server takes in no more than it has room for at once; but who comes later finds what is not used yet."""
        await asyncio.sleep(seconds)
        return await fleet.generate(one)

    async def work() -> None:
        often = Timing(load_interval_s=0.2)
        fleet = RolloutFleet(config, [LocalServer(config, spec)], vocab_size=VOCABULARY, report=print, timing=often)
        try:
            await fleet.start(START_S)
            answers = asyncio.gather(*(later(fleet, index * 0.05, one) for index, one in enumerate(asked)))
            for version in (1, 2, 3):
                while log.read_text().count("Retract requests") < version:
                    assert not answers.done(), "no response lost its place"
                    await asyncio.sleep(0.02)
                await fleet.publish(folder, version)  # the same weights, so that one model is the reference
            drawn = await answers
        finally:
            await fleet.close()
        assert [answer.token_ids.size for answer in drawn] == [TOKENS] * len(asked)
        assert_log_probs(model, asked, drawn)
        told = fleet.statistics.take()
        assert told["servers/retractions"] > 0
        assert 0 < told["servers/kv_use"] < told["servers/kv_use_max"] <= 1
        assert told["servers/kv_use_max"] > 0.5
        assert told["servers/queue_max"] > 0
        assert 0 < told["servers/prefix_hits"] < 1
        assert {version for answer in drawn for version in answer.weight_versions.tolist()} >= {0, 3}

    asyncio.run(work())
