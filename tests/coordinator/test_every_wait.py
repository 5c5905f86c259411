"""Law 5, wait by wait: each one is blocked in turn, and the explanation that the run then gives is read."""

import asyncio
import re
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

from megatron_dapo.cluster import placement
from megatron_dapo.cluster import trainer as trainer_module
from megatron_dapo.cluster.gpu_handover import GpuHandover
from megatron_dapo.cluster.trainer import Trainer, TrainerStalled
from megatron_dapo.cluster.waits import Stalled, Waits
from megatron_dapo.config import load_config
from megatron_dapo.coordinator import loop, publish, run_context
from megatron_dapo.coordinator.run_context import RunContext
from megatron_dapo.monitor.console import Count
from megatron_dapo.monitor.timeline import StepTimer
from reward.config import RewardConfig
from reward.pool import pool as pool_module
from reward.pool.pool import RewardPool
from reward.verdict import PoolError, VerificationRequest
from rollout.errors import FleetLost, ServerStartError
from rollout.fleet.member import State, Timing
from tests.processes import ROOT
from tests.rollout.conftest import folders  # noqa: F401 - a fixture
from tests.rollout.fleet.test_fleet_stream import FromMemory
from tests.rollout.fleet_kit import fleet_of, request, run, until
from tests.rollout.standin import StandIn

SHORT = 0.2
SOON = Timing(
    probe_interval_s=0.05,
    probe_deadline_s=0.5,
    scheduler_interval_s=60.0,
    control_deadline_s=SHORT,
    load_deadline_s=SHORT,
    first_backoff_s=0.05,
    longest_backoff_s=0.1,
    report_interval_s=0.1,
)


async def never(*_: object, **__: object) -> Any:
    await asyncio.sleep(60)


class Stuck(StandIn):
    """Does not answer one kind of call."""

    def __init__(self, where: str) -> None:
        super().__init__(seconds_a_token=0.05)
        setattr(self, where, self.sleep)

    async def sleep(self, _: web.Request) -> web.Response:
        await asyncio.sleep(60)
        return web.Response()


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("_abort", "requests did not end on abort|abort_request: no answer within"),
        ("_pause", "/pause_generation: no answer within 0.2 s"),
        ("_update", "/update_weights_from_disk: no answer within 0.2 s"),
        ("_flush", "/flush_cache.*: no answer within 0.2 s"),
        ("_checksums", "/weights_checker: no answer within 0.2 s"),
        ("_resume", "/continue_generation: no answer within 0.2 s"),
    ],
    ids=["drain", "pause", "load", "flush", "checksum", "resume"],
)
def test_each_part_of_a_publish(folders: list[Path], where: str, words: str) -> None:  # noqa: F811
    async def test() -> None:
        server, reports = Stuck(where), list[str]()
        async with fleet_of(server, reports=reports, timing=SOON, fleet_deadline_s=1.5) as fleet:
            drawing = asyncio.ensure_future(fleet.generate(request(tokens=1000)))
            await until(lambda: server.running)
            # A restart cures a server that does not abort; the others fail again after it.
            ended = nullcontext() if where == "_abort" else pytest.raises(FleetLost, match=r"fleet_deadline_s = 1.5")
            with ended:
                await fleet.publish(folders[0], 1)
            assert any(re.search(words, line) for line in reports), reports
            drawing.cancel()

    run(test)


def test_the_start_of_a_server() -> None:
    async def test() -> None:
        server = StandIn()
        healthy = StandIn._health

        async def loading(self: StandIn, request: web.Request) -> web.Response:
            await asyncio.sleep(60)
            return await healthy(self, request)

        StandIn._health = loading  # type: ignore[method-assign]
        try:
            with pytest.raises(
                ServerStartError, match=r"(?s)not ready within 1 s: .*/health: no answer.*last words of"
            ):
                async with fleet_of(server, start_s=1.0):
                    pass
        finally:
            StandIn._health = healthy  # type: ignore[method-assign]

    run(test)


def test_a_response_with_every_server_down() -> None:
    async def test() -> None:
        server, reports = StandIn(), list[str]()
        async with fleet_of(server, reports=reports, timing=SOON, fleet_deadline_s=0.5) as fleet:
            server.start_fails = True
            await server.die()
            with pytest.raises(FleetLost, match=r"longer than rollout\.fleet_deadline_s = 0\.5"):
                await fleet.generate(request())
            assert any("requests wait for" in line for line in reports)

    run(test)


def test_weights_in_memory_that_never_arrive(folders: list[Path]) -> None:  # noqa: F811
    async def test() -> None:
        server = StandIn()
        async with fleet_of(server) as fleet:
            stream = FromMemory(folders[0], server)
            stream.send = never  # type: ignore[method-assign]
            with pytest.raises(Stalled, match=r"weight version 3: rollout servers gave no answer within 0\.2 s"):
                await Waits().wait_for("weight version 3", "rollout servers", SHORT, fleet.publish_stream(stream, 3))

    run(test)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda trainer: trainer.update([], None, 1.0), "trainer update"),
        (lambda trainer: trainer.export_hf(Path("x")), "trainer export_hf"),
        (lambda trainer: trainer.save_checkpoint(Path("x")), "trainer save_checkpoint"),
        (lambda trainer: trainer.load_checkpoint(Path("x")), "trainer load_checkpoint"),
        (lambda trainer: trainer.write_weights(Path("x"), ()), "trainer write"),
        (lambda trainer: trainer.send_weights(None, ()), "trainer send"),
        (lambda trainer: trainer._everyone("log_probs", None), "trainer log_probs"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_call_to_the_trainer(monkeypatch, call: Callable[[Trainer], Awaitable[object]], name: str) -> None:
    async def test() -> None:
        config = SimpleNamespace(run=SimpleNamespace(step_deadline_s=SHORT), rollout=SimpleNamespace(temperature=1.0))
        monkeypatch.setattr(trainer_module.ray, "put", lambda value: value)
        trainer = Trainer(config, None, Path(), Waits(), use_gpu=False)
        rank = SimpleNamespace(perform=SimpleNamespace(remote=never))
        trainer._ranks = [rank, rank]
        with pytest.raises(TrainerStalled, match=rf"{name}: 2 trainer rank\(s\) gave no answer within 0\.2 s"):
            await call(trainer)

    asyncio.run(test())


def test_the_start_of_the_trainer(monkeypatch) -> None:
    async def test() -> None:
        config = load_config(ROOT / "examples" / "quickstart" / "dapo.yaml", [f"run.start_deadline_s={SHORT}"])
        rank = SimpleNamespace(place=SimpleNamespace(remote=never))
        kind = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda *_: rank))
        monkeypatch.setattr(trainer_module.ray, "remote", lambda _: kind)
        trainer = Trainer(config, None, Path(), Waits(), use_gpu=False)
        where = SimpleNamespace(trainer=(0, 0), at=lambda bundle: {})
        with pytest.raises(TrainerStalled, match=r"trainer start: 2 trainer rank\(s\) gave no answer within 0\.2 s"):
            await trainer.start(where)

    asyncio.run(test())


def test_the_places_on_a_cluster(monkeypatch) -> None:
    async def test() -> None:
        config = load_config(ROOT / "examples" / "quickstart" / "dapo.yaml", [f"run.start_deadline_s={SHORT}"])
        nodes = [placement.Bundle(what="here", cpus=8, gpus=0)]
        monkeypatch.setattr(placement, "cluster_nodes", lambda: nodes)
        monkeypatch.setattr(placement, "placement_group", lambda *_, **__: SimpleNamespace(ready=never))
        with pytest.raises(Stalled, match=r"placement: Ray gave no answer within 0\.2 s"):
            await placement.place(config, Waits(), use_gpu=False, servers=0)

    asyncio.run(test())


def _context(**parts: object) -> Any:
    config = load_config(ROOT / "examples" / "quickstart" / "dapo.yaml", [f"run.step_deadline_s={SHORT}"])
    waits = Waits()
    handover = GpuHandover(config.run, None, None, waits, report=print)
    return SimpleNamespace(
        config=config,
        waits=waits,
        handover=handover,
        sampler=SimpleNamespace(fill=never),
        generator=SimpleNamespace(take_seconds=dict, finished=3, failing=0),
        evaluator=SimpleNamespace(run=never, count=lambda: Count(5, 9, "answers")),
        run_dir=SimpleNamespace(path=Path("/nonexistent"), check_there=lambda: None),
        shared_gpu=False,
        **{"trainer": None, "fleet": SimpleNamespace(load=lambda: (900, 4, 7.0))} | parts,
    )


def test_the_start_says_how_many_servers_are_ready() -> None:
    async def test() -> None:
        run_config, waits = SimpleNamespace(start_deadline_s=60.0, mode="async"), Waits()
        members = [SimpleNamespace(state=state) for state in (State.READY, State.STARTING)]
        fleet: Any = SimpleNamespace(start=never, members=members, engines=[None, None])
        said: list[str] = []
        console = SimpleNamespace(note=said.append)
        context: Any = SimpleNamespace(config=SimpleNamespace(run=run_config), waits=waits, console=console)
        built: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        starting = asyncio.ensure_future(run_context._start_both(context, built, fleet))
        await asyncio.sleep(0.01)
        assert waits.counts() == {"server start": Count(1, 2, "servers")}
        members.clear()  # before the fleet has made them
        assert waits.counts() == {"server start": Count(0, 2, "servers")}
        assert said == []
        built.set_result({})
        await asyncio.sleep(0.01)
        assert said == ["  trainer ready after 0.0 s"]
        starting.cancel()

    asyncio.run(test())


def test_a_batch_of_groups() -> None:
    async def test() -> None:
        progress = SimpleNamespace(rollout_step=4, weight_version=4)
        with pytest.raises(
            Stalled, match=r"(?s)batch of groups: rollout servers gave no answer within 0\.2 s.*; 0 of 32 g"
        ):
            await loop.fill_batch(_context(), progress, StepTimer())

    asyncio.run(test())


def test_an_evaluation() -> None:
    async def test() -> None:
        with pytest.raises(
            Stalled, match=r"(?s)held-out answers step5: rollout servers gave no answer within 0\.2 s.*5 of 9"
        ):
            await RunContext.evaluate(_context(), "step5")

    asyncio.run(test())


@pytest.mark.parametrize("whose", ["trainer", "servers"])
def test_the_handover_of_a_shared_gpu(whose: str) -> None:
    async def test() -> None:
        config = SimpleNamespace(mode="colocated", step_deadline_s=SHORT)
        fleet = SimpleNamespace(release_memory=never, resume_memory=never)

        async def nothing() -> list[object]:
            return []

        trainer = SimpleNamespace(device_memory=nothing, suspend_communicators=nothing)
        handover = GpuHandover(config, fleet, trainer, Waits(), report=print)
        handover.trainer_has_it = whose == "servers"
        with pytest.raises(Stalled, match=rf"memory for the {whose}: rollout servers gave no answer within 0\.2 s"):
            await getattr(handover, f"to_{whose}")()

    asyncio.run(test())


def test_a_publish_as_a_whole() -> None:
    async def test() -> None:
        async def written(*_: object) -> dict[object, object]:
            return {}

        trainer = SimpleNamespace(write_weights=written, on_gpu=False)
        servers = [SimpleNamespace(weight_version=version) for version in (6, 7, 7)]
        context = _context(fleet=SimpleNamespace(kinds=(), publish=never, members=servers), trainer=trainer)
        stalled = r"(?s)weight version 7: rollout servers gave no answer within 0\.2 s.*; 2 of 3 servers"
        with pytest.raises(Stalled, match=stalled):
            await publish.publish_weights(context, 7)

    asyncio.run(test())


def test_verdicts(monkeypatch) -> None:
    async def test(pool: RewardPool) -> None:
        monkeypatch.setattr(pool_module, "START_LIMIT_S", 0.0)
        monkeypatch.setattr(pool_module, "_LOOK_EVERY_S", 0.05)
        monkeypatch.setattr(pool._fast, "put_nowait", lambda work: None)  # no worker ever sees the request
        with pytest.raises(PoolError, match=r"reward pool: no verdict for \d+ s; workers \["):
            await pool.verify([VerificationRequest(response="Answer: 1", ground_truth="1")])

    pool = RewardPool(RewardConfig(workers=1, timeout_s=0.1))
    try:
        asyncio.run(test(pool))
    finally:
        pool.close()


def test_a_call_that_holds_up_the_whole_process() -> None:
    async def test() -> None:
        clock = time.monotonic()
        with (
            pytest.raises(
                Stalled, match=r"(?s)Ray start: Ray gave no answer within 0\.2 s.*Ray start: waiting for Ray"
            ),
            Waits().blocking("Ray start", "Ray", SHORT),
        ):
            time.sleep(60)
        assert time.monotonic() - clock < 20
        with Waits().blocking("Ray start", "Ray", SHORT):
            pass
        time.sleep(2 * SHORT)  # its alarm is off

    asyncio.run(test())


def test_a_call_that_lets_no_signal_through_ends_with_the_process() -> None:
    """A held lock in C: the handler of the alarm never gets its turn."""
    script = (
        "import asyncio, signal, time\n"
        "from megatron_dapo.cluster.waits import Waits\n"
        "async def main():\n"
        "    with Waits().blocking('Ray start', 'Ray', 0.2, last_word_s=0.3):\n"
        "        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])\n"
        "        time.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == Stalled.exit_code
    assert "Ray start: Ray gave no answer within 0.2 s" in done.stderr
    assert "time.sleep" in done.stderr or "in main" in done.stderr
    with open("/dev/full", "w") as nobody:
        done = subprocess.run(command, cwd=ROOT, stderr=nobody, timeout=60)
    assert done.returncode == Stalled.exit_code, "nobody can read why, and it ends all the same"
