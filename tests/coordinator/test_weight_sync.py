"""Weights from Megatron at TP=2 into two real SGLang servers on the CPU, by every transport, on the quickstart's model.

The reference of what a server then holds is Hugging Face's forward of the folder that the trainer was loaded from.
"""

import asyncio
import contextlib
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rollout.config import RolloutConfig
from rollout.errors import WeightMismatch
from rollout.fleet.fleet import RolloutFleet
from rollout.fleet.weight_update import WeightStream
from rollout.generation import GenerationRequest, SamplingParams
from rollout.server.engine import LocalServer
from rollout.server.server_command import ServerSpec
from rollout.weights.sender import Sent
from rollout.weights.transport import Target
from tests.actor.gloo import end_workers, run_ranks
from tests.coordinator.sync_kit import PoolTrainer
from tests.processes import ROOT
from tests.rollout.fleet_kit import until
from tests.rollout.real_kit import assert_log_probs

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(torch.cuda.is_available(), reason="these servers are started for the CPU"),
]
BASE = ROOT / "examples" / "quickstart" / "base"
TRANSPORTS = ("tensor", "distributed")
PLANTED = "model.layers.1.mlp.down_proj.weight"


@dataclass(kw_only=True)
class Place:
    loop: asyncio.AbstractEventLoop
    fleet: RolloutFleet
    servers: tuple[LocalServer, ...]
    version: int = 0
    """Of the newest weights."""

    def run(self, work: Any, seconds: float = 300.0) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(work, seconds))

    async def publish(self, stream: WeightStream) -> Any:
        self.version += 1
        return await self.fleet.publish_stream(stream, self.version)

    async def all_ready(self) -> None:
        await until(lambda: all(seen.state == "ready" for seen in self.fleet.members), 240)


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Iterator[Place]:
    root, loop = tmp_path_factory.mktemp("servers"), asyncio.new_event_loop()
    config = RolloutConfig(max_running_requests=32, kv_cache_tokens=8192, memory_fraction=0.5, servers=2)
    servers = tuple(
        LocalServer(
            config,
            ServerSpec(
                model_path=BASE,
                device="cpu",
                dtype="float32",
                context_length=128,
                seed=1,
                log_path=root / f"{index}.log",
                index=index,
            ),
        )
        for index in range(2)
    )
    vocabulary = AutoModelForCausalLM.from_pretrained(BASE).config.vocab_size
    fleet = RolloutFleet(config, servers, vocab_size=vocabulary, report=print)
    try:
        loop.run_until_complete(fleet.start(300))
        yield Place(loop=loop, fleet=fleet, servers=servers)
    finally:
        loop.run_until_complete(fleet.close())
        loop.close()
        end_workers()


def changed(folder: Path, factor: float) -> tuple[Path, torch.nn.Module]:
    """The base with every matrix scaled, and the model that it is."""
    shutil.copytree(BASE, folder)
    tensors = load_file(folder / "model.safetensors")
    save_file({name: tensor * factor for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def asked(count: int, tokens: int = 24) -> list[GenerationRequest]:
    draw = np.random.default_rng(4)
    return [
        GenerationRequest(
            request_id=f"s{at}.",
            group_id=f"g{at}",
            prompt_ids=draw.integers(5, 60, 12).astype(np.int32),
            sampling=SamplingParams(max_new_tokens=tokens),
            seed=at,
        )
        for at in range(count)
    ]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_both_servers_serve_the_trainers_weights(place: Place, tmp_path: Path, transport: str) -> None:
    folder, model = changed(tmp_path / "new", 0.9 if transport == "tensor" else 1.1)

    async def work() -> None:
        running = [asyncio.ensure_future(place.fleet.generate(one)) for one in asked(4, tokens=100)]
        await asyncio.sleep(0.1)
        stream = PoolTrainer(run_ranks, folder, transport)
        report = await place.publish(stream)
        assert report.by_disk == {}
        assert len(report.servers) == 2
        assert stream.written == 0
        assert stream.sent is not None
        assert stream.sent.bytes > stream.bucket_bytes, "in several buckets"
        await asyncio.gather(*running)
        requests = asked(8)
        answers = await asyncio.gather(*map(place.fleet.generate, requests))
        assert {int(version) for answer in answers for version in answer.weight_versions} == {place.version}
        assert_log_probs(model, requests, answers)
        assert len({seen.restarts for seen in place.fleet.members}) == 1

    place.run(work())


class Planted(PoolTrainer):
    """After the weights have arrived, one number of one tensor of the first server changes."""

    wrong: Callable[[], Any]

    async def send(self, targets: Sequence[Target], label: str, *, more: bool) -> Sent:
        sent = await super().send(targets, label, more=more)
        await self.wrong()
        return sent


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_planted_wrong_tensor_is_named(place: Place, tmp_path: Path, transport: str) -> None:
    folder, _ = changed(tmp_path / "new", 0.95)
    wrong, _ = changed(tmp_path / "wrong", 0.95)
    tensors = load_file(wrong / "model.safetensors")
    tensors[PLANTED].view(-1)[3] += 1e-6
    save_file(tensors, wrong / "model.safetensors")

    async def work() -> None:
        await place.all_ready()
        stream = Planted(run_ranks, folder, transport)
        member = place.fleet.members[0]
        stream.wrong = lambda: member.client.update_weights("disk", {"model_path": str(wrong)}, "wrong", 60)
        with pytest.raises(WeightMismatch, match=PLANTED.replace(".", r"\.")) as caught:
            await place.publish(stream)
        assert len(caught.value.problems) == 1
        assert member.url in str(caught.value)
        await place.all_ready()  # restarted, from disk

    place.run(work())


class Killed(PoolTrainer):
    """A signal to the first server's process group as soon as the first bucket is made."""

    victim: LocalServer
    number: int

    def begun(self, groups: int) -> bool:
        if self.transport == "distributed":
            return _groups(self.victim) > groups
        links = (link for links in Path("/proc").glob("[0-9]*/fd") for link in _links(links))
        return any("rollout-weights" in link for link in links)

    async def send(self, targets: Sequence[Target], label: str, *, more: bool) -> Sent:
        groups = _groups(self.victim)

        async def strike() -> None:
            while not self.begun(groups):
                await asyncio.sleep(0.01)
            assert self.victim.process is not None
            os.killpg(self.victim.process.pid, self.number)

        striking = asyncio.ensure_future(strike())
        try:
            return await super().send(targets, label, more=more)
        finally:
            await striking


def _groups(server: LocalServer) -> int:
    """Process groups that a server has begun to join."""
    return server.spec.log_path.read_text().count("init custom process group")


def _links(folder: Path) -> Iterator[str]:
    with contextlib.suppress(OSError):  # the process has ended, or is another user's
        for link in folder.iterdir():
            with contextlib.suppress(OSError):
                yield os.readlink(link)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_server_lost_in_the_middle_keeps_nobody_waiting(
    place: Place, tmp_path: Path, transport: str, number: signal.Signals
) -> None:
    folder, model = changed(tmp_path / "new", 1.05)

    async def work() -> None:
        await place.all_ready()
        stream = Killed(run_ranks, folder, transport, deadline_s=15.0, bucket_bytes=1 << 18)
        stream.victim, stream.number = place.servers[0], number
        started = time.monotonic()
        await place.publish(stream)
        assert time.monotonic() - started < 200
        requests = asked(6)
        answers = await asyncio.gather(*map(place.fleet.generate, requests))
        assert_log_probs(model, requests, answers)
        await place.all_ready()
        assert {seen.weight_version for seen in place.fleet.members} == {place.version}
        assert place.fleet.members[0].restarts > 0

    place.run(work(), 400)
