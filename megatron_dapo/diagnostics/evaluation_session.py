"""Servers of an evaluation's own, or somebody's running ones, and held-out problems answered by them: resumable."""

import asyncio
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch

from megatron_dapo.cluster.engines import api_key, lone_engines, visible_gpus
from megatron_dapo.cluster.waits import Waits
from megatron_dapo.config import Config
from megatron_dapo.data.prompts import PromptSet
from megatron_dapo.data.tokenizer import TextTools
from megatron_dapo.diagnostics.response_log import EvaluationError, ResponseLog
from megatron_dapo.diagnostics.weight_snapshot import fingerprint
from megatron_dapo.experience.generator import all_or_none
from megatron_dapo.experience.problem_results import Results, gathered, problem_id, write_results
from megatron_dapo.experience.responder import Responder, Way, ways_of
from reward.pool.pool import RewardPool
from rollout.fleet.fleet import RolloutFleet
from rollout.generation import SamplingParams
from rollout.wire.client import SglangClient

PROGRESS_INTERVAL_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Problems:
    """What is asked, and with which tokenizer."""

    text: TextTools
    heldout: PromptSet


class EvalSession:
    """A fleet and a reward pool for evaluations alone. Use as a context: it ends what it started.

    The servers of `rollout.urls` are asked as they are and never given weights; servers of its own get those of a
    folder, verified by checksum.
    """

    def __init__(
        self, config: Config, problems: Problems, folder: Path, waits: Waits, report: Callable[[str], None]
    ) -> None:
        """`config`: `model.path` names what the servers start with. `folder`: gets the servers' logs and key."""
        self._config, self._problems, self._folder = config, problems, folder
        self._waits, self._report = waits, report
        self._prompts = problems.heldout.prompts[: config.evaluation.limit or None]
        self._stack = AsyncExitStack()
        self._version = 0

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            self._folder.mkdir(parents=True, exist_ok=True)
            config, text = self._config, self._problems.text
            self._pool = RewardPool(config.reward)
            stack.callback(self._pool.close)
            on_gpu = config.actor.device != "cpu" and torch.cuda.is_available()
            gpus = visible_gpus(torch.cuda.device_count()) if on_gpu else ()
            engines = lone_engines(config, self._folder / "logs", gpus=gpus)
            self._key = api_key(config, self._folder)
            self._fleet = RolloutFleet(
                config.rollout, engines, vocab_size=text.vocab_size, report=self._report, api_key=self._key
            )
            stack.push_async_callback(self._fleet.close)
            deadline = config.run.start_deadline_s
            starting = self._fleet.start(deadline)
            await self._waits.wait_for("server start", "SGLang servers", deadline + 30, starting, stoppable=True)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def evaluate(self, out: Path, *, weights: Path | None, rollout_step: int | None = None) -> dict[str, Any]:
        """Every problem answered, those responses that `out` has already not asked for again.

        Args:
            out: gets settings.json, responses.jsonl, problems.jsonl and result.json.
            weights: folder in Hugging Face format; None: what the servers of `rollout.urls` hold.
            rollout_step: of the run that made the weights, for the result.

        Returns:
            What result.json holds.

        Raises:
            EvaluationError: `out` belongs to another evaluation, or the servers' weights changed meanwhile.
            Stalled, StopRequested: as `Waits.wait_for`.
        """
        held = await self._labels() if weights is None else {"fingerprint": fingerprint(weights)}
        log = ResponseLog(out, self._settings(held))
        try:
            if self._missing(log) and weights is not None:
                await self._publish(weights)
            results = await self._answer(log)
            if weights is None and (now := await self._labels()) != held:
                aside = log.set_aside("mixed")
                raise EvaluationError(f"the servers held {held} and now {now}: {aside} mixes them and is of no use")
            about = {"weights": held | ({"folder": str(weights)} if weights else {}), "rollout_step": rollout_step}
            return write_results(out, results, about | {"problems_from": self._config.evaluation.path})
        finally:
            log.close()

    @property
    def _ways(self) -> list[Way]:
        rollout, text = self._config.rollout, self._problems.text
        shared = SamplingParams(max_new_tokens=rollout.max_new_tokens, stop_token_ids=text.stop_token_ids)
        return ways_of(self._config.evaluation, shared)

    def _settings(self, weights: dict[str, Any]) -> dict[str, Any]:
        config = self._config
        return {
            "weights": weights,
            "temperature": config.evaluation.temperature,
            "top_p": config.evaluation.top_p,
            "max_new_tokens": config.rollout.max_new_tokens,
            "stop_token_ids": list(self._problems.text.stop_token_ids),
            "seed": config.run.seed if config.rollout.deterministic else None,
            "verifiers": sorted({prompt.verifier for prompt in self._prompts}),
        }

    def _missing(self, log: ResponseLog) -> list[tuple[Way, int, int]]:
        """(way, problem, sample) of each response that is still to be asked for."""
        return [
            (way, at, sample)
            for way in self._ways
            for at, prompt in enumerate(self._prompts)
            for sample in range(way.samples)
            if (way.name, problem_id(prompt), sample) not in log.known
        ]

    async def _answer(self, log: ResponseLog) -> Results:
        missing = self._missing(log)
        whole = len(self._prompts) * sum(way.samples for way in self._ways)
        if len(missing) < whole:
            self._report(f"{whole - len(missing)} of {whole} responses are there already")
        decoder, seed = self._problems.text.decoder, self._config.run.seed
        responder = Responder(fleet=self._fleet, pool=self._pool, decoder=decoder, prompts=self._prompts, seed=seed)
        began, said = time.monotonic(), time.monotonic()
        left = len(missing)

        async def one(way: Way, at: int, sample: int) -> None:
            nonlocal left, said
            answer = await responder.answer(f"eval-{way.name}", at, sample, way.sampling)
            log.add((way.name, problem_id(self._prompts[at]), sample), answer)
            left -= 1
            if time.monotonic() - said > PROGRESS_INTERVAL_S:
                said = time.monotonic()
                self._report(f"{whole - left} of {whole} responses after {said - began:.0f} s")

        deadline = self._config.run.step_deadline_s
        asking = all_or_none(one(*each) for each in missing)
        await self._waits.wait_for("held-out answers", "rollout servers", deadline, asking, stoppable=True)
        return Results(
            {
                way.name: [
                    gathered(prompt, [log.known[way.name, problem_id(prompt), sample] for sample in range(way.samples)])
                    for prompt in self._prompts
                ]
                for way in self._ways
            }
        )

    async def _publish(self, weights: Path) -> None:
        self._version += 1
        deadline = self._config.run.step_deadline_s
        await self._waits.wait_for(
            "weights of the evaluation", "rollout servers", deadline, self._fleet.publish(weights, self._version)
        )

    async def _labels(self) -> dict[str, Any]:
        """The servers' own names of their weights."""
        labels = {}
        for url in self._config.rollout.urls:
            async with SglangClient(url, request_deadline_s=30.0, api_key=self._key) as client:
                labels[url] = await client.weight_label()
        if len(set(labels.values())) > 1:
            raise EvaluationError(f"the servers hold different weights: {labels}; give them the same ones first")
        return {"label": next(iter(labels.values())), "urls": sorted(labels)}


def with_own_servers(config: Config, model: Path) -> Config:
    """The same config, its servers started here with `model`, on free ports."""
    rollout = replace(config.rollout, urls=(), api_key_file=None, port=0, weight_sync="disk")
    run = replace(config.run, mode="sync")  # nobody trains beside them
    return replace(config, run=run, rollout=rollout, model=replace(config.model, path=str(model)))


async def evaluate_once(
    config: Config,
    problems: Problems,
    out: Path,
    *,
    weights: Path | None,
    rollout_step: int | None,
    stop: "asyncio.Future[None]",
    report: Callable[[str], None],
) -> dict[str, Any]:
    """One evaluation; as `EvalSession.evaluate`."""
    async with EvalSession(config, problems, out, Waits(stop), report) as session:
        return await session.evaluate(out, weights=weights, rollout_step=rollout_step)
