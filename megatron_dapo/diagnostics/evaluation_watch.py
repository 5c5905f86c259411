"""Each new version of a run's weights, evaluated beside the training on servers of its own.

The run writes a version, gives it to its servers and removes the one before; what is to be evaluated is frozen as soon
as it appears (`frozen.freeze`). Only the newest frozen version waits: where training is faster than evaluation,
versions in between are left out, and said to be.
"""

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_dapo.diagnostics.evaluation_session import EvalSession
from megatron_dapo.diagnostics.response_log import SETTINGS
from megatron_dapo.diagnostics.weight_snapshot import fingerprint, freeze, versions
from megatron_dapo.experience.problem_results import RESULT
from megatron_dapo.monitor.run_status import liveness, lock_holder, read_heartbeat
from megatron_dapo.monitor.statistics import EVALUATIONS

POLL_S = 0.5


class Watch:
    """The versions of one run. `freezing` and `evaluating` run side by side."""

    def __init__(self, run: Path, *, every: int, report: Callable[[str], None]) -> None:
        """`every`: versions whose number is no multiple of it are left alone."""
        self._run, self._every, self._report = run, every, report
        self._frozen = run / EVALUATIONS / ".frozen"
        self._waiting: int | None = None
        self._seen: dict[int, int] = {}
        """Version -> when its folder was made: a run that was resumed makes some versions again, with other weights."""
        self._ended = False

    async def first(self) -> Path | None:
        """The first version there is to evaluate, frozen; None if the run ended without one."""
        while self._waiting is None and not self._ended:
            self._look()
            await asyncio.sleep(0 if self._waiting is not None else POLL_S)
        return None if self._waiting is None else self._folder(self._waiting)

    async def freezing(self) -> None:
        """Until the run ends."""
        while not self._ended:
            self._look()
            await asyncio.sleep(POLL_S)

    async def evaluating(self, session: EvalSession, done: Callable[[int, dict[str, Any]], None]) -> None:
        """Until the run has ended and nothing waits."""
        while not self._ended or self._waiting is not None:
            if self._waiting is None:
                await asyncio.sleep(POLL_S)
                continue
            version, self._waiting = self._waiting, None
            out = self._run / EVALUATIONS / f"v{version}"
            self._report(f"version {version}: evaluating")
            done(version, await session.evaluate(out, weights=self._folder(version), rollout_step=version))
            shutil.rmtree(self._folder(version))

    def close(self) -> None:
        """Remove what is frozen."""
        shutil.rmtree(self._frozen, ignore_errors=True)

    def _look(self) -> None:
        ended = not self._alive()  # before the look: a version that came last must not be missed
        for version in versions(self._run / "weights"):
            source = self._run / "weights" / f"v{version}"
            made = source.stat().st_mtime_ns if source.exists() else None
            if version % self._every or made in (None, self._seen.get(version)):
                continue
            if not freeze(source, self._folder(version)):
                self._report(f"version {version}: the run removed it before it could be kept; left out")
                continue
            self._seen[version] = made
            if self._is_done(version):
                shutil.rmtree(self._folder(version))
                continue
            if self._waiting not in (None, version):
                self._report(f"version {self._waiting}: left out, {version} is there and comes first")
                shutil.rmtree(self._folder(self._waiting))
            self._waiting = version
        self._ended = ended

    def _is_done(self, version: int) -> bool:
        """Whether these weights have a result. One of other weights of that number is kept under another name."""
        out = self._run / EVALUATIONS / f"v{version}"
        settings = json.loads((out / SETTINGS).read_text()) if (out / SETTINGS).exists() else None
        if settings and settings["weights"] != {"fingerprint": fingerprint(self._folder(version))}:
            older = len(list(out.parent.glob(f"{out.name}.superseded*"))) + 1
            out.rename(out.with_name(f"{out.name}.superseded{older}"))
        return (out / RESULT).exists()

    def _alive(self) -> bool:
        finished = (self._run / "summary.json").exists()
        return liveness(read_heartbeat(self._run), lock_holder(self._run), finished=finished).alive

    def _folder(self, version: int) -> Path:
        return self._frozen / f"v{version}"


async def watch_run(session: EvalSession, watch: Watch, done: Callable[[int, dict[str, Any]], None]) -> None:
    """Evaluate until the run ends. An error of either side ends both."""
    tasks = {asyncio.create_task(watch.freezing()), asyncio.create_task(watch.evaluating(session, done))}
    try:
        finished, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in finished:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
