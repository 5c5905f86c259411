"""A server that fails, dies or stops in any phase of a publish over NCCL: nobody waits for it beyond the deadline."""

import asyncio
import time
from pathlib import Path

import pytest

from tests.emulated.played_server import Fault, PlayedEngine
from tests.emulated.played_trainer import PlayedTrainer
from tests.emulated.publish_kit import DEADLINE_S, STANDSTILL_S, played_fleet, save_weights
from tests.rollout.fleet_kit import request, until

pytestmark = pytest.mark.timeout(300)
SLACK_S = 30.0
"""For a loaded machine, beside the deadline."""
PHASES = ("join", "bucket 0", "bucket 1", "label", "loaded", "checksums")
QUICK = {("kill", "join"), ("kill", "bucket 1"), ("kill", "checksums"), ("stop", "bucket 0"), ("refuse", "bucket 1")}


def cases() -> list:
    every = [(kind, phase) for kind in ("refuse", "kill", "stop") for phase in PHASES]
    return [pytest.param(*case, marks=[] if case in QUICK else [pytest.mark.slow]) for case in every]


def restarted(phase: str) -> list[int]:
    """Restarts of the server with the fault, and of the other one: over NCCL nobody leaves a broken broadcast, but
    nobody waits for the others in the joining, nor when the data is there."""
    return [1, int(phase not in ("join", "checksums"))]


@pytest.mark.parametrize(("kind", "phase"), cases())
def test_nobody_waits_for_a_lost_server(tmp_path: Path, kind: str, phase: str) -> None:
    folder = save_weights(tmp_path / "weights", 1)

    async def test() -> None:
        engines = [PlayedEngine(tmp_path / f"server{at}", folder) for at in range(2)]
        engines[0].fault = Fault(kind=kind, phase=phase)
        trainer = PlayedTrainer(folder, 2, deadline_s=DEADLINE_S)
        try:
            async with played_fleet(engines, deadline_s=DEADLINE_S) as fleet:
                urls = [engine.url for engine in engines]
                began = time.monotonic()
                async with asyncio.timeout(DEADLINE_S + SLACK_S):
                    report = await fleet.publish_stream(trainer, 1)
                    await until(lambda: all(seen.state == "ready" for seen in fleet.members), SLACK_S)
                waited = time.monotonic() - began
                assert [seen.weight_version for seen in fleet.members] == [1, 1]
                assert [seen.restarts for seen in fleet.members] == restarted(phase)
                assert trainer.report.largest_gap_s < STANDSTILL_S
                if phase == "checksums":
                    assert report.by_disk == {}
                else:
                    assert set(report.by_disk) == set(urls)
                    assert all(urls[0] in reason for reason in report.by_disk.values()), report.by_disk
                print(f"{kind} {phase}: all servers ready after {waited:.1f} s: {report.by_disk}")
                # A new group, of the servers as they are now.
                report = await fleet.publish_stream(trainer, 2)
                assert report.by_disk == {}
                assert len(report.servers) == 2
                assert set((await fleet.generate(request())).weight_versions) == {2}
        finally:
            trainer.close()

    asyncio.run(test())


def test_a_server_of_others_is_asked_for_nothing_while_it_may_wait_in_a_broken_group(tmp_path: Path) -> None:
    folder = save_weights(tmp_path / "weights", 1)

    async def test() -> None:
        engines = [PlayedEngine(tmp_path / f"server{at}", folder, ours=at == 0) for at in range(2)]
        engines[0].fault = Fault(kind="kill", phase="bucket 1")
        trainer = PlayedTrainer(folder, 1, deadline_s=DEADLINE_S)
        try:
            async with played_fleet(engines, deadline_s=DEADLINE_S) as fleet:
                async with asyncio.timeout(DEADLINE_S + SLACK_S):
                    await fleet.publish_stream(trainer, 1)
                    await until(lambda: fleet.members[0].state == "ready", SLACK_S)
                report = await fleet.publish_stream(trainer, 2)
                assert list(report.servers) == [engines[0].url]
                assert fleet.members[1].state != "ready"
                assert set((await fleet.generate(request())).weight_versions) == {2}
        finally:
            trainer.close()

    asyncio.run(test())
