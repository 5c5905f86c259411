"""Weights by process group under NCCL's rules: trainer ranks and servers are processes, the fleet is the project's."""

import asyncio
from pathlib import Path

import pytest

from tests.emulated.played_server import PlayedEngine
from tests.emulated.played_trainer import PlayedTrainer
from tests.emulated.publish_kit import STANDSTILL_S, played_fleet, save_weights
from tests.rollout.fleet_kit import request

pytestmark = pytest.mark.timeout(240)


@pytest.mark.parametrize(
    ("ranks", "parallel", "on_publish"),
    [
        pytest.param(1, (1,), "restart", id="1-rank-1-server", marks=pytest.mark.slow),
        pytest.param(2, (1, 1), "restart", id="2-ranks-2-servers", marks=pytest.mark.slow),
        pytest.param(4, (2, 1), "restart", id="4-ranks-servers-of-2-and-1"),
        pytest.param(2, (1, 2), "recompute", id="2-ranks-a-group-for-each-half"),
    ],
)
def test_all_servers_hold_what_was_sent_twice_over_one_group(
    tmp_path: Path, ranks: int, parallel: tuple, on_publish: str
) -> None:
    folders = [save_weights(tmp_path / f"weights{seed}", seed) for seed in (1, 2)]

    async def test() -> None:
        engines = [
            PlayedEngine(tmp_path / f"server{at}", folders[0], tensor_parallel=size) for at, size in enumerate(parallel)
        ]
        # What hangs is reported before the deadline, by who waits for whom.
        trainer = PlayedTrainer(folders[0], ranks, deadline_s=30.0, patience_s=20.0)
        try:
            async with played_fleet(engines, on_publish=on_publish) as fleet:
                for version, folder in enumerate(folders, 1):
                    trainer.folder = folder
                    report = await fleet.publish_stream(trainer, version)
                    assert report.by_disk == {}
                    assert len(report.servers) == len(parallel)
                    assert trainer.report.faults == ()
                    # Torch's watchdog would end the trainer with a server that is lost.
                    assert trainer.report.error_handling == ("0", None)
                    assert trainer.report.largest_gap_s < STANDSTILL_S
                    answer = await fleet.generate(request())
                    assert set(answer.weight_versions) == {version}
                assert [engine.starts for engine in engines] == [1] * len(parallel)
        finally:
            trainer.close()

    asyncio.run(test())


def test_colocated_turns_send_over_gloo_beside_the_trainers_own_groups(tmp_path: Path) -> None:
    """NCCL takes one rank a GPU, so servers that share the trainer's are sent to over gloo, between their turns."""
    folder = save_weights(tmp_path / "weights", 1)

    async def test() -> None:
        engines = [PlayedEngine(tmp_path / f"server{at}", folder) for at in range(2)]
        trainer = PlayedTrainer(folder, 2, backend="gloo", deadline_s=30.0, patience_s=20.0)
        try:
            async with played_fleet(engines) as fleet:
                for version in (1, 2):
                    await fleet.release_memory()
                    await trainer.update()
                    await fleet.resume_memory()
                    report = await fleet.publish_stream(trainer, version)
                    assert (report.by_disk, trainer.report.faults) == ({}, ())
                    assert set((await fleet.generate(request())).weight_versions) == {version}
                assert [engine.starts for engine in engines] == [1, 1]
        finally:
            trainer.close()

    asyncio.run(test())
