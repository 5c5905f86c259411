"""Each new version of a run's weights, evaluated beside the training on servers of its own.

The run writes a version, gives it to its servers and removes the one before; of a version that is to be evaluated a
snapshot is taken as soon as it appears. Only the newest snapshot waits: where training is faster than evaluation,
versions in between are left out, and said to be.
"""

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_dapo.diagnostics.evaluation_session import EvaluationSession
from megatron_dapo.diagnostics.response_log import SETTINGS
from megatron_dapo.diagnostics.weight_snapshot import fingerprint, snapshot, versions
from megatron_dapo.experience.problem_results import RESULT
from megatron_dapo.monitor.at_k import EVALUATIONS
from megatron_dapo.monitor.run_status import liveness, lock_holder, read_heartbeat

POLL_S = 0.5


class Watch:
    """The versions of one run."""

    def __init__(self, run: Path, *, every: int, report: Callable[[str], None]) -> None:
        """`every`: versions whose number is no multiple of it are left alone."""
        self._run, self._every, self._report = run, every, report
        self._snapshots = run / EVALUATIONS / ".snapshots"
        self._waiting: int | None = None
        self._seen: dict[int, int] = {}
        """Version -> when its folder was made: a run that was resumed makes some versions again, with other weights."""
        self._ended = False

    async def first(self) -> Path | None:
        """A snapshot of the first version there is to evaluate; None if the run ended without one."""
        while self._look() is None and not self._ended:
            await asyncio.sleep(POLL_S)
        return None if self._waiting is None else self._snapshot(self._waiting)

    async def evaluate(self, session: EvaluationSession, done: Callable[[int, dict[str, Any]], None]) -> None:
        """Until the run has ended and nothing waits. `done` gets a version and what its result.json holds."""
        task: asyncio.Task[None] | None = None
        try:
            while self._look() is not None or task is not None or not self._ended:
                if task is None and self._waiting is not None:
                    task = asyncio.create_task(self._evaluate_one(session, self._waiting, done))
                    self._waiting = None
                if task is None:
                    await asyncio.sleep(POLL_S)
                    continue
                await asyncio.wait([task], timeout=POLL_S)
                if task.done():
                    task.result()
                    task = None
        finally:
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    def close(self) -> None:
        """Remove the snapshots."""
        shutil.rmtree(self._snapshots, ignore_errors=True)

    async def _evaluate_one(
        self, session: EvaluationSession, version: int, done: Callable[[int, dict[str, Any]], None]
    ) -> None:
        self._report(f"version {version}: evaluating")
        weights = self._snapshot(version)
        done(version, await session.evaluate(self._out(version), weights=weights, rollout_step=version))
        shutil.rmtree(weights)

    def _look(self) -> int | None:
        """Take snapshots of what is new. Returns the version that waits to be evaluated."""
        finished = (self._run / "summary.json").exists()
        # Asked before the look: a version that came last must not be missed.
        ended = not liveness(read_heartbeat(self._run), lock_holder(self._run), finished=finished).alive
        for version in versions(self._run / "weights"):
            source = self._run / "weights" / f"v{version}"
            made = source.stat().st_mtime_ns if source.exists() else None
            if version % self._every or made in (None, self._seen.get(version)):
                continue
            if not snapshot(source, self._snapshot(version)):
                self._report(f"version {version}: the run removed it before it could be copied; left out")
                continue
            self._seen[version] = made
            if self._is_done(version):
                shutil.rmtree(self._snapshot(version))
                continue
            if self._waiting not in (None, version):
                self._report(f"version {self._waiting}: left out, {version} is there and comes first")
                shutil.rmtree(self._snapshot(self._waiting))
            self._waiting = version
        self._ended = ended
        return self._waiting

    def _is_done(self, version: int) -> bool:
        """Whether these weights have a result. One of other weights of that number is kept under another name."""
        out = self._out(version)
        settings = json.loads((out / SETTINGS).read_text()) if (out / SETTINGS).exists() else None
        if settings and settings["weights"] != {"fingerprint": fingerprint(self._snapshot(version))}:
            older = len(list(out.parent.glob(f"{out.name}.superseded*"))) + 1
            out.rename(out.with_name(f"{out.name}.superseded{older}"))
        return (out / RESULT).exists()

    def _snapshot(self, version: int) -> Path:
        return self._snapshots / f"v{version}"

    def _out(self, version: int) -> Path:
        return self._run / EVALUATIONS / f"v{version}"
