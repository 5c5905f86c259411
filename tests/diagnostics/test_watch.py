"""`Watch` on a run directory that this process locks as a run does, with a session that copies what it is given."""

import asyncio
import json
import shutil

import pytest

from megatron_dapo.diagnostics import evaluation_session
from megatron_dapo.diagnostics.evaluation_session import Watch
from megatron_dapo.diagnostics.weight_snapshot import fingerprint
from megatron_dapo.storage.durable import lock_folder


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(evaluation_session, "POLL_S", 0.01)


def write_version(run, number):
    folder = run / "weights" / f"v{number}"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes([number]) * 10)


class Session:
    """Evaluates when it is let to; notes the first byte of the weights that it then reads."""

    def __init__(self):
        self.free, self.found = asyncio.Event(), {}

    async def evaluate(self, out, *, weights, rollout_step):
        await self.free.wait()
        self.found[rollout_step] = (weights / "model.safetensors").read_bytes()[0]
        out.mkdir(parents=True, exist_ok=True)
        (out / "settings.json").write_text(json.dumps({"weights": {"fingerprint": fingerprint(weights)}}))
        (out / "result.json").write_text("{}")
        return {}


async def evaluated(watch, session, said):
    async for version, _ in watch.evaluate(session):
        said.append(f"{version} done")


async def until(condition):
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


def test_the_newest_version_waits_while_one_is_evaluated_and_the_run_removes_its_own(tmp_path):
    async def body():
        lock, session, said = lock_folder(tmp_path), Session(), []
        watch = Watch(tmp_path, every=1, report=said.append)
        write_version(tmp_path, 0)
        assert await watch.next_version() == 0
        watching = asyncio.create_task(evaluated(watch, session, said))
        for number in (1, 2, 3):
            await until(lambda: any("evaluating" in line for line in said))
            write_version(tmp_path, number)
            await until(lambda number=number: (watch._snapshots / f"v{number}").exists())
            shutil.rmtree(tmp_path / "weights" / f"v{number - 1}")
        session.free.set()
        await until(lambda: "3 done" in said)
        assert not watching.done(), "the run goes on"
        lock.release()
        await asyncio.wait_for(watching, 20)
        watch.close()
        assert not watch._snapshots.exists()
        return session.found, said

    found, said = asyncio.run(body())
    assert found == {0: 0, 3: 3}
    assert [line for line in said if "left out" in line] == [
        "version 1: left out, 2 is there and comes first",
        "version 2: left out, 3 is there and comes first",
    ]
    again = Watch(tmp_path, every=1, report=said.append)
    assert asyncio.run(again.next_version()) is None, "it has a result, and the run has ended"


def test_other_weights_of_a_number_that_has_a_result_are_evaluated_and_the_old_result_is_kept(tmp_path):
    async def evaluate_all():
        session = Session()
        session.free.set()
        await evaluated(Watch(tmp_path, every=2, report=print), session, [])
        return session.found

    write_version(tmp_path, 1)
    write_version(tmp_path, 2)
    assert asyncio.run(evaluate_all()) == {2: 2}
    (tmp_path / "weights" / "v2" / "model.safetensors").write_bytes(b"\7" * 10)
    assert asyncio.run(evaluate_all()) == {2: 7}
    assert {folder.name for folder in (tmp_path / "evaluations").glob("v*")} == {"v2", "v2.superseded1"}


def test_an_error_of_an_evaluation_ends_the_watch(tmp_path):
    class Broken:
        async def evaluate(self, out, **_):
            raise RuntimeError("no server")

    write_version(tmp_path, 1)
    with pytest.raises(RuntimeError, match="no server"):
        asyncio.run(evaluated(Watch(tmp_path, every=1, report=print), Broken(), []))
