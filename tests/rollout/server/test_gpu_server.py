"""A server process with GPUs of its own: what it sees, and how it is ended."""

import asyncio
from types import SimpleNamespace

import pytest

from rollout.config import RolloutConfig
from rollout.server.engine import LocalServer
from tests.rollout.server.test_launch import spec


@pytest.mark.parametrize(("gpus", "seen"), [(("4", "7"), "4,7"), ((), "0,1,4,7")])
def test_a_server_sees_its_own_gpus_alone(monkeypatch, gpus, seen):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,4,7")
    server = LocalServer(RolloutConfig(), spec(device="cuda", gpus=gpus))
    assert server._environment()["CUDA_VISIBLE_DEVICES"] == seen


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_server_with_gpus_is_asked_to_end_before_it_is_killed(device):
    told = []
    server = LocalServer(RolloutConfig(), spec(device=device))
    server.process = SimpleNamespace(
        poll=lambda: None, terminate=lambda: told.append("asked"), wait=lambda _: told.append("waited")
    )
    server.kill = lambda: told.append("killed")
    asyncio.run(server.close())
    assert told == ["asked", "waited"] * (device == "cuda") + ["killed"]
