"""Changes alone into real SGLang servers of two CPU ranks: the loaders of fused, padded, tied and expert weights.

After each publish every server's checksums of all its tensors are compared with those of the whole model.
"""

import asyncio
from collections.abc import Iterator

import pytest
import torch
from transformers import AutoModelForCausalLM

from rollout.errors import WeightMismatch
from rollout.weights import delta
from tests.rollout.fleet_kit import until
from tests.rollout.real_kit import SHAPES, START_S, Place, all_of, assert_log_probs, kill, make_place, requests_of
from tests.rollout.weights.memory_trainer import MemoryTrainer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(torch.cuda.is_available(), reason="these servers are started for the CPU"),
]


@pytest.fixture(scope="module", params=["qwen2", "qwen3_moe"])
def place(request, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    root, loop = tmp_path_factory.mktemp("servers"), asyncio.new_event_loop()
    settings = {"weight_sync": "delta", "tensor_parallel": 2}
    changes = SHAPES.get(request.param, {})
    made = make_place(loop, root, request.param, deterministic=False, settings=settings, **changes)
    try:
        made.run(made.fleet.start(START_S))
        yield made
    finally:
        made.run(made.fleet.close())
        loop.close()


class Publishes:
    def __init__(self, place: Place) -> None:
        self.place, self.version = place, 0
        self.trainer = MemoryTrainer(place.folder, api_key_file=place.server.spec.api_key_file)

    async def __call__(self, share: float) -> float:
        """Changes so much and publishes it; the share that was sent."""
        self.trainer.change(share)
        self.version += 1
        report = await self.place.fleet.publish_stream(self.trainer, self.version)
        assert report.by_disk == {}
        assert len(report.servers) == 1
        assert report.changed == self.trainer.sent[-1].changed
        return report.changed


@pytest.fixture(scope="module")
def publish(place: Place) -> Publishes:
    return Publishes(place)


def test_what_changed_is_loaded_and_all_of_it_verified(place: Place, publish: Publishes) -> None:
    async def work() -> None:
        assert await publish(0.0) == 1.0
        for share in (0.01, 0.05, 0.2):
            assert 0.9 * share < await publish(share) < share + 0.03
        await publish.trainer.to_disk()
        model = AutoModelForCausalLM.from_pretrained(place.folder, dtype=torch.float32).eval()
        asked = requests_of(8, seed=publish.version)
        assert_log_probs(model, asked, await all_of(place.fleet, asked))

    place.run(work(), 600)


def test_a_killed_server_is_sent_everything_once(place: Place, publish: Publishes) -> None:
    async def work() -> None:
        await publish(0.01)
        kill(place)
        await until(lambda: place.fleet.members[0].state == "ready" and place.fleet.members[0].restarts > 0, START_S)
        assert place.fleet.members[0].weight_version == publish.version, "from a folder"
        assert await publish(0.01) == 1.0
        assert await publish(0.01) < 0.05

    place.run(work(), 800)


def test_a_wrong_bit_on_the_way_is_found(place: Place, publish: Publishes, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the server is then restarted with what is right."""
    encode = delta.encode

    def wrong(*tensors: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
        data, counts = encode(*tensors)
        data[0] ^= 1
        return data, counts

    async def work() -> None:
        await publish(0.01)
        monkeypatch.setattr(delta, "encode", wrong)
        with pytest.raises(WeightMismatch) as caught:
            await publish(0.01)
        assert caught.value.problems
        monkeypatch.setattr(delta, "encode", encode)
        member = place.fleet.members[0]
        await until(lambda: member.state == "ready" and member.weight_version == publish.version, START_S)
        assert await publish(0.01) == 1.0

    place.run(work(), 800)
