"""New weights for a fleet of stand-ins: versions, restarts, wrong tensors, servers that die in between."""

import asyncio
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rollout.errors import FleetLost, RolloutError, ServerRefused, WeightMismatch
from rollout.generation import FinishReason
from tests.rollout.fleet_kit import check_tokens, fleet_of, request, run, until
from tests.rollout.standin import StandIn


def test_publish_interrupts_and_every_token_has_its_version(folders: list[Path]) -> None:
    async def test() -> None:
        servers = [StandIn(seconds_a_token=0.05) for _ in range(2)]
        async with fleet_of(*servers, max_running_requests=4) as fleet:
            await fleet.publish(folders[0], 1)
            tasks = [asyncio.ensure_future(fleet.generate(request(f"r{i}", tokens=30))) for i in range(12)]
            await until(lambda: sum(len(server.running) for server in servers) == 8)
            report = await fleet.publish(folders[1], 2)
            assert report.servers == {server.url: 11 for server in servers}
            answers = await asyncio.gather(*tasks)
        for answer in answers:
            check_tokens(answer, 1, 30)
            assert answer.finish_reason is FinishReason.LENGTH
            assert (np.diff(answer.weight_versions) >= 0).all()
        assert sum(set(answer.weight_versions) == {1, 2} for answer in answers) == 8
        for server in servers:
            assert server.calls[:6] == ["flush", "pause", "update 1", "flush", "resume", "generate 1"]
            begin = server.calls.index("pause", 2)
            assert server.calls[begin : begin + 4] == ["pause", "update 2", "flush", "resume"]
            assert {call for call in server.calls[begin + 4 :]} == {"generate 2"}

    run(test)


def test_the_urgent_request_goes_first_and_an_interrupted_one_keeps_its_turn(folders: list[Path]) -> None:
    async def test() -> None:
        server = StandIn(seconds_a_token=0.005)
        async with fleet_of(server, max_running_requests=1) as fleet:
            turns = {7: 1, 8: 3, 9: 2}  # first prompt id, which the server writes down, and priority
            asked = [
                asyncio.ensure_future(
                    fleet.generate(replace(request(f"r{prompt}", prompt=(prompt,), tokens=20), priority=priority))
                )
                for prompt, priority in turns.items()
            ]
            await until(lambda: server.running)
            await fleet.publish(folders[0], 1)
            await asyncio.gather(*asked)
        assert [prompt[0] for prompt in server.prompts] == [7, 7, 9, 8]
        assert len(server.prompts[1]) > 1, "the second call goes on from the tokens of the first"

    run(test)


def test_a_restarted_server_gets_the_newest_weights_before_it_serves(folders: list[Path]) -> None:
    async def test() -> None:
        server = StandIn()
        async with fleet_of(server) as fleet:
            await fleet.publish(folders[0], 1)
            await fleet.publish(folders[2], 7)
            server.calls.clear()
            await server.die()
            generation = await fleet.generate(request())
            assert set(generation.weight_versions) == {7}
            assert server.calls == ["flush", "pause", "update 7", "flush", "resume", "generate 7"]
            assert server.loaded == folders[2]

    run(test)


def test_a_wrong_tensor_stops_the_publish_and_the_server(folders: list[Path]) -> None:
    async def test() -> None:
        server = StandIn()
        server.corrupt = "model.layers.0.mlp.down_proj.weight"
        async with fleet_of(server, fleet_deadline_s=0.5) as fleet:
            with pytest.raises(WeightMismatch, match=r"1 tensors differ.*mlp.down_proj.weight has 0000000000000000"):
                await fleet.publish(folders[0], 1)
            with pytest.raises(FleetLost, match=r"mlp\.down_proj"):
                await fleet.generate(request())
        assert server.prompts == []

    run(test)


def test_a_server_that_dies_in_a_publish_gets_the_weights_later(folders: list[Path]) -> None:
    async def test() -> None:
        servers = [StandIn(), StandIn()]
        async with fleet_of(*servers) as fleet:
            servers[0].die_on_update = True
            servers[0].may_start.clear()
            report = await fleet.publish(folders[0], 1)
            assert list(report.servers) == [servers[1].url]
            servers[0].may_start.set()
            await until(lambda: fleet.members[0].state == "ready")
            assert [status.weight_version for status in fleet.members] == [1, 1]
            assert servers[0].loaded == folders[0]
            # The only server may die too: publish waits for its return.
            servers[1].start_fails = True
            await servers[1].die()
            servers[0].die_on_update = True
            await fleet.publish(folders[1], 2)
            assert set((await fleet.generate(request())).weight_versions) == {2}

    run(test)


def test_checksums_of_a_newer_server_are_understood(folders: list[Path]) -> None:
    async def test() -> None:
        server = StandIn()
        server.newer_checker = True
        async with fleet_of(server) as fleet:
            assert (await fleet.publish(folders[0], 1)).servers == {server.url: 11}

    run(test)


def test_a_model_without_known_checksums_does_not_serve_unverified(folders: list[Path], tmp_path: Path) -> None:
    async def test() -> None:
        strange = shutil.copytree(folders[0], tmp_path / "strange")
        config = strange / "config.json"
        config.write_text(config.read_text().replace("Qwen3ForCausalLM", "MambaForCausalLM"))
        server, reports = StandIn(), list[str]()
        async with fleet_of(server, reports=reports, fleet_deadline_s=0.5) as fleet:
            with pytest.raises(ValueError, match="MambaForCausalLM"):
                await fleet.publish(strange, 1)
            with pytest.raises(FleetLost):
                await fleet.generate(request())
        assert any("did not come back" in line and "MambaForCausalLM" in line for line in reports)
        assert server.prompts == []

    run(test)


def test_a_publish_that_is_cancelled_leaves_no_server_paused(folders: list[Path]) -> None:
    async def test() -> None:
        server = StandIn()
        async with fleet_of(server) as fleet:
            server.slow_updates = 0.3
            task = asyncio.ensure_future(fleet.publish(folders[0], 1))
            await until(lambda: server.paused)
            task.cancel()
            server.slow_updates = 0.0
            assert set((await fleet.generate(request())).weight_versions) == {1}
            assert server.starts == 2
            assert not server.paused

    run(test)


def test_a_folder_that_the_server_cannot_load_is_an_error(folders: list[Path], tmp_path: Path) -> None:
    async def test() -> None:
        server = StandIn()
        async with fleet_of(server) as fleet:
            with pytest.raises(FileNotFoundError, match="safetensors"):
                await fleet.publish(tmp_path, 1)
            server.refuse_updates = True
            with pytest.raises(ServerRefused, match="no such folder"):
                await fleet.publish(folders[0], 1)

    run(test)


def test_a_server_restarted_behind_our_back_is_noticed_by_its_weights(folders: list[Path]) -> None:
    async def test() -> None:
        server = StandIn()
        async with fleet_of(server) as fleet:
            await fleet.publish(folders[0], 1)
            server.label = "0"
            assert set((await fleet.generate(request())).weight_versions) == {1}
            assert server.starts == 2

    run(test)


def test_closing_ends_waits_and_servers() -> None:
    async def test() -> None:
        server = StandIn(seconds_a_token=1.0)
        async with fleet_of(server, max_running_requests=1) as fleet:
            tasks = [asyncio.ensure_future(fleet.generate(request(f"r{i}"))) for i in range(2)]
            await until(lambda: server.running)
            await fleet.close()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert [type(result) for result in results] == [RolloutError, RolloutError]
            with pytest.raises(RolloutError, match="closed"):
                await fleet.generate(request())
        assert server.closed

    run(test)
