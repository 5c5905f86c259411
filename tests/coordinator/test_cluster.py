"""Joining a Ray cluster that is not there."""

import socket
import time

import pytest

from megatron_dapo.coordinator.cluster import Cluster, ClusterError


def test_an_address_where_nothing_answers_is_named_at_once(monkeypatch):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
    monkeypatch.setenv("RAY_ADDRESS", address)
    began = time.monotonic()
    with pytest.raises(ClusterError, match=f"RAY_ADDRESS = {address}"):
        Cluster(processes=1, device="auto")
    assert time.monotonic() - began < 15
