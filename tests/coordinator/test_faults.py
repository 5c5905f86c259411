"""Batches filled by the real fleet, generator, sampler and ledger while scripted servers die and freeze."""

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron_dapo.algorithm.dynamic_sampling import PassRate
from megatron_dapo.config.algorithm_config import AlgorithmConfig, OverlongConfig
from megatron_dapo.coordinator.sampler import DynamicSampler
from megatron_dapo.data.order import PromptOrder, Span
from megatron_dapo.experience.generator import GroupGenerator, Responder
from megatron_dapo.experience.groups import SamplerState
from megatron_dapo.storage.ledger import Event, Ledger, read_ledger
from reward.verdict import Verdict, VerificationRequest
from rollout.config import RolloutConfig
from rollout.fleet.fleet import RolloutFleet
from rollout.fleet.member import Timing
from rollout.generation import SamplingParams
from tests.coordinator.scripted import scripted_prompts
from tests.ledger_check import check_ledger
from tests.rollout.fleet_kit import FAST
from tests.rollout.script import RIGHT, VOCABULARY, Script, check_generation
from tests.rollout.scripted_server import ScriptedServer, Speed

LONGEST = 2000
PROMPTS = 5000
SOON = replace(FAST, probe_deadline_s=1.0, scheduler_deadline_s=1.5)
PATIENT = replace(FAST, probe_interval_s=0.5, probe_deadline_s=3.0, scheduler_interval_s=1.0, scheduler_deadline_s=4.0)
"""64 servers and the fleet share one event loop here: probes wait for their turn in it."""


class LastToken:
    """Decoder and verifier at once: a response is right if the token before its end is RIGHT."""

    def decode(self, token_ids: np.ndarray, *, skip_special_tokens: bool) -> str:
        return str(token_ids[-2])

    async def verify(self, requests: Sequence[VerificationRequest]) -> list[Verdict]:
        return [
            Verdict(accuracy=one.response == str(RIGHT), extracted=None, rule="token", seconds=0.0) for one in requests
        ]


async def break_servers(fleet: RolloutFleet, servers: Sequence[ScriptedServer], faults: int, seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(faults):
        await asyncio.sleep(0.3 * draw.random())
        up = [server for server, seen in zip(servers, fleet.members, strict=True) if seen.state == "ready"]
        if not up:
            continue
        server = draw.choice(up)
        if draw.random() < 0.5:
            await server.die()
        else:
            server.frozen = True


async def fill_under_faults(
    folder: Path,
    *,
    servers: int,
    prompts: int,
    group_size: int,
    batches: int,
    faults: int,
    timing: Timing,
    stream_interval: int | None = None,
) -> None:
    script = Script(max_new_tokens=LONGEST, median_tokens=300)
    engines = [ScriptedServer(script, Speed(compress=20), seed) for seed in range(servers)]
    for engine in engines:
        engine.stream_interval = stream_interval
    rollout = RolloutConfig(max_running_requests=32, max_attempts=100, fleet_deadline_s=30.0)
    fleet = RolloutFleet(rollout, engines, vocab_size=VOCABULARY, report=lambda line: None, timing=timing)
    algorithm = AlgorithmConfig(
        prompts_per_step=prompts,
        group_size=group_size,
        mini_batch_responses=prompts * group_size,
        overlong=OverlongConfig(buffer=400),
    )
    responder = Responder(fleet=fleet, pool=LastToken(), decoder=LastToken())
    asked = scripted_prompts(PROMPTS, answer="", verifier="last-token")
    generator = GroupGenerator(
        responder, asked, lambda version: SamplingParams(max_new_tokens=LONGEST), algorithm, seed=0
    )
    ledger = Ledger(folder / "ledger.jsonl")
    start = SamplerState(cursor=0, pass_rate=PassRate.start(0.5), carried=())
    sampler = DynamicSampler(algorithm, generator.group, ledger, start)
    await fleet.start(30.0)
    breaking = asyncio.ensure_future(break_servers(fleet, engines, faults, seed=0))
    decided, made = [], []
    try:
        # Weights stay at version 0: staleness is not what is tested here.
        for step in range(1, batches + 1):
            admission = await sampler.fill(step, 0)
            assert len(admission.kept) == prompts
            decided += [group.position for group in (*admission.kept, *admission.filtered)]
            made += admission.generated
        await breaking
    finally:
        breaking.cancel()
        await fleet.close()
        ledger.close()
    restarts = sum(status.restarts for status in fleet.members)
    assert restarts > 0, "no fault was met: the test shows nothing"
    assert sorted(decided) == list(range(len(decided))), "every position decided once"
    entries = read_ledger(folder / "ledger.jsonl")
    given_up = Counter(entry["prompt"] for entry in entries if entry["event"] == Event.EXPIRED)
    times = Counter(group.position for group in made)
    assert all(times[one] <= 1 + given_up[one] for one in times), "only what was given up was generated again"
    order = PromptOrder([Span(start=0, count=PROMPTS, weight=1.0)], 0)
    for group in made:
        assert len(group.responses) == group_size
        assert group.prompt_index == order.index_at(group.position)
        for response in group.responses:
            check_generation(script, group.prompt_index, response.generation)
    check_ledger(entries)


@pytest.mark.parametrize("stream_interval", [pytest.param(None, marks=pytest.mark.slow), 64])
def test_nothing_is_lost_or_doubled_while_servers_die_and_freeze(tmp_path: Path, stream_interval: int | None) -> None:
    size = {"servers": 8, "prompts": 12, "group_size": 8, "batches": 2, "faults": 6}
    asyncio.run(fill_under_faults(tmp_path, **size, timing=SOON, stream_interval=stream_interval))


@pytest.mark.slow
def test_nothing_is_lost_or_doubled_over_64_servers(tmp_path: Path) -> None:
    asyncio.run(
        fill_under_faults(
            tmp_path, servers=64, prompts=128, group_size=16, batches=3, faults=60, timing=PATIENT, stream_interval=64
        )
    )
