"""A server process with GPUs of its own: what it sees, and how it is ended."""

import asyncio
import os
import sys
import time
from pathlib import Path

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
def test_a_server_with_gpus_is_asked_to_end_and_none_leaves_a_file(monkeypatch, tmp_path, device):
    """Neither in the folder of temporary files nor in shared memory: SGLang removes nothing of its own."""
    shared, program = Path(f"/dev/shm/sgl_test_{os.getpid()}"), tmp_path / "server"
    program.write_text(
        f"#!{sys.executable}\n"
        "import mmap, signal, sys, tempfile, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: print('asked', flush=True) or sys.exit())\n"
        f"file = open('{shared}', 'w+b')\n"
        "file.truncate(4096)\n"
        "mapped = mmap.mmap(file.fileno(), 4096)\n"
        "print(tempfile.NamedTemporaryFile(delete=False).name, flush=True)\n"
        "time.sleep(60)\n"
    )
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    server = LocalServer(RolloutConfig(), spec(device=device, log_path=tmp_path / "log"))

    async def work():
        await server.start()
        began = time.monotonic()
        while not (lines := server.log_tail().splitlines())[-1].startswith("/"):
            assert time.monotonic() < began + 30
            await asyncio.sleep(0.02)
        assert shared.exists()
        left = Path(lines[-1])
        assert left.is_file()
        assert left.parent.name.startswith("dapo-server_")
        await server.close()
        return left.parent

    folder = asyncio.run(work())
    assert server.log_tail().endswith("asked") == (device == "cuda")
    assert not folder.exists()
    assert not shared.exists()
