"""Weights from a trainer's memory to two real SGLang servers on the CPU under `rollout.on_publish` recompute and keep:
one draws while the other is sent to. Reference: Hugging Face's forward with the weights of each token's version.
"""

import asyncio
import copy
import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollout.config import RolloutConfig
from rollout.fleet.fleet import RolloutFleet
from rollout.generation import Generation, GenerationRequest, SamplingParams
from rollout.server.engine import LocalServer
from rollout.server.server_command import ServerSpec
from rollout.weights.sender import Sent
from rollout.weights.transport import Target
from tests.rollout.fleet_kit import until
from tests.rollout.folders import CONTEXT, VOCABULARY, save_model
from tests.rollout.real_kit import SHAPES, START_S, Place, begun, on_publish, reference, reference_in_flight
from tests.rollout.weights.memory_trainer import MemoryTrainer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(torch.cuda.is_available(), reason="these servers are started for the CPU"),
]
TOKENS = 420


class Watching(MemoryTrainer):
    """Sends only once somebody draws beside it, and can end a server's process in the middle of a send."""

    fleet: RolloutFleet

    def __init__(self, folder: Path, model: torch.nn.Module, version: int = 0) -> None:
        super().__init__(folder)
        self.version, self.model = version, model
        self.models: dict[int, torch.nn.Module] = {}
        self.waves: list[tuple[int, ...]] = []
        self.victim: LocalServer | None = None
        self.at_wave = 0
        self.drawing = False

    async def publish(self, share: float) -> Any:
        self.change(share)
        self.version += 1
        self.waves.clear()
        self.models[self.version] = copy.deepcopy(self.model)
        self.models[self.version].load_state_dict(self.tensors, strict=False)
        self.models[self.version].tie_weights()
        return await self.fleet.publish_stream(self, self.version)

    async def send(self, targets: Sequence[Target], label: str, *, more: bool) -> Sent:
        self.waves.append(tuple(target.index for target in targets))
        assert more == (len(self.waves) == 1)
        if self.drawing:
            drawn = self.fleet.load()[0]
            await until(lambda: self.fleet.load()[0] > drawn)
        return await super().send(targets, label, more=more)

    def buckets(self) -> Iterator[Any]:
        for index, bucket in enumerate(super().buckets()):
            if index == 2 and self.victim is not None and len(self.waves) == self.at_wave:
                assert self.victim.process is not None
                os.killpg(self.victim.process.pid, signal.SIGKILL)
            yield bucket


class Fleet:
    """Two servers; each test has a trainer of its own, whose first publish is whole."""

    def __init__(self, root: Path) -> None:
        self.loop, self.root, self.version = asyncio.new_event_loop(), root, 0
        self.folder = root / "model"
        self.model = save_model(self.folder, "qwen2", seed=1, **SHAPES["qwen2"])
        config = RolloutConfig(
            max_running_requests=16,
            kv_cache_tokens=16384,
            memory_fraction=0.5,
            stream_every=16,
            servers=2,
            weight_sync="delta",
            on_publish="keep",
        )
        spec = ServerSpec(
            model_path=self.folder,
            device="cpu",
            dtype="float32",
            context_length=CONTEXT,
            seed=3,
            log_path=root / "0.log",
        )
        specs = [replace(spec, index=index, log_path=root / f"{index}.log") for index in range(2)]
        self.servers = [LocalServer(config, each) for each in specs]
        self.fleet = RolloutFleet(config, self.servers, vocab_size=VOCABULARY, report=print)
        self.place = Place(
            loop=self.loop, fleet=self.fleet, server=self.servers[0], folder=self.folder, model=self.model, reports=[]
        )

    def trainer(self, transport: str) -> Watching:
        folder = self.root / f"written{self.version}"
        save_model(folder, "qwen2", seed=1, **SHAPES["qwen2"])
        made = Watching(folder, self.model, self.version)
        made.transport, made.fleet = transport, self.fleet
        return made

    def groups(self) -> list[int]:
        """That each server has joined since it was first started."""
        logs = (server.spec.log_path.read_text() for server in self.servers)
        return [log.count("init custom process group") for log in logs]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    made = Fleet(tmp_path_factory.mktemp("servers"))
    try:
        made.place.run(made.fleet.start(START_S))
        yield made
    finally:
        made.place.run(made.fleet.close())
        made.loop.close()


def asked(name: str, count: int = 8) -> list[GenerationRequest]:
    draw = np.random.default_rng(4)
    return [
        GenerationRequest(
            request_id=f"{name}/{at}",
            group_id=f"{name}/{at // 2}",
            prompt_ids=draw.integers(0, VOCABULARY, 30).astype(np.int32),
            sampling=SamplingParams(max_new_tokens=TOKENS),
            seed=at,
        )
        for at in range(count)
    ]


def check(trainer: Watching, requests: list[GenerationRequest], answers: list[Generation], mode: str) -> None:
    """Each token was drawn by the weights that it says, on the keys and values that `mode` leaves."""
    for one, answer in zip(requests, answers, strict=True):
        assert answer.token_ids.size == TOKENS
        assert (np.diff(answer.weight_versions) >= 0).all()
        if mode == "keep":
            expected = reference_in_flight(trainer.models, one, answer)
        else:
            wholes = {by: reference(trainer.models[by], one.prompt_ids, answer.token_ids) for by in trainer.models}
            expected = np.array([wholes[by][at] for at, by in enumerate(answer.weight_versions.tolist())])
        assert np.abs(answer.log_probs - expected).max() < 1e-4


@pytest.mark.parametrize("mode", ["recompute", "keep"])
@pytest.mark.parametrize("transport", ["distributed", "delta"])
def test_one_server_draws_while_the_other_is_sent_to(two: Fleet, transport: str, mode: str) -> None:
    trainer = two.trainer(transport)

    async def work() -> None:
        on_publish(two.place, mode)
        for _ in range(2):  # of two: those before them are no versions of this trainer
            await trainer.publish(0.05)
        joined, first = two.groups(), trainer.version
        requests = asked(f"{transport} {mode}")
        tasks = [asyncio.ensure_future(two.fleet.generate(one)) for one in requests]
        trainer.drawing = True
        for _ in range(2):
            await begun(two.place, len(requests))
            report = await trainer.publish(0.05)
            assert trainer.waves == [(0,), (1,)]
            assert report.by_disk == {}
            assert set(report.servers) == {server.url for server in two.servers}
            assert report.standstill_s == 0 < report.stopped_s
            size = sum(tensor.nbytes for tensor in trainer.tensors.values())
            if transport == "distributed":
                assert (report.bytes, report.changed) == (2 * size, 1.0)
            else:
                assert trainer.sent[-1].changed == trainer.sent[-2].changed == report.changed < 0.1
                assert report.bytes < size / 2
        answers = await asyncio.gather(*tasks)
        check(trainer, requests, answers, mode)
        assert {version for one in answers for version in one.weight_versions.tolist()} == {first, first + 1, first + 2}
        assert two.groups() == joined, "each keeps its process group"

    two.place.run(work())
    two.version = trainer.version


@pytest.mark.parametrize("wave", [1, 2])
@pytest.mark.parametrize("transport", ["distributed", "delta"])
def test_a_server_is_killed_while_it_is_sent_to(two: Fleet, transport: str, wave: int) -> None:
    """The other one has the new weights all the same, and all responses end; the killed one comes back with them."""
    trainer = two.trainer(transport)

    async def work() -> None:
        on_publish(two.place, "recompute")
        for _ in range(2):
            await trainer.publish(0.05)
        requests = asked(f"killed {transport} {wave}")
        tasks = [asyncio.ensure_future(two.fleet.generate(one)) for one in requests]
        await begun(two.place, len(requests))
        trainer.victim, trainer.at_wave, trainer.deadline_s = two.servers[wave - 1], wave, 15.0
        restarts = [member.restarts for member in two.fleet.members]
        report = await trainer.publish(0.05)
        trainer.victim = None
        assert trainer.waves == [(0,), (1,)]
        assert list(report.servers) == [two.servers[2 - wave].url]
        assert len(report.by_disk) == 1
        check(trainer, requests, await asyncio.gather(*tasks), "recompute")
        await until(lambda: all(member.state == "ready" for member in two.fleet.members), START_S)
        assert [member.weight_version for member in two.fleet.members] == [trainer.version] * 2
        restarts[wave - 1] += 1
        assert [member.restarts for member in two.fleet.members] == restarts
        for again in (True, False):
            report = await trainer.publish(0.05)
            assert (len(report.servers), report.by_disk) == (2, {})
            if transport == "delta":  # everything once, to all if the trainer kept weights of two versions
                assert [sent.changed == 1.0 for sent in trainer.sent[-2:]] == [again, again and wave == 2]

    two.place.run(work(), 600)
    two.version = trainer.version
