"""An evaluation with servers of its own, or with somebody's running ones; it can be stopped and resumed."""

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_dapo.cluster.waits import Waits
from megatron_dapo.config import Config
from megatron_dapo.coordinator.inputs import read_heldout
from megatron_dapo.data.tokenizer import load_text_tools
from megatron_dapo.diagnostics.local_jobs import local_fleet
from megatron_dapo.diagnostics.response_log import EvaluationError, ResponseLog, response_log
from megatron_dapo.diagnostics.weight_snapshot import fingerprint
from megatron_dapo.experience.evaluation import Answer, AnswerKey, Evaluator, write_results
from megatron_dapo.experience.generator import Responder
from megatron_dapo.experience.observations import turn_rules
from reward.pool.pool import RewardPool
from rollout.fleet.fleet import RolloutFleet

PROGRESS_INTERVAL_S = 10.0


@asynccontextmanager
async def evaluation_session(
    config: Config, folder: Path, report: Callable[[str], None]
) -> AsyncIterator["EvaluationSession"]:
    """A fleet and a reward pool for evaluations alone.

    Args:
        config: `model.path` names what the servers start with.
        folder: gets the servers' logs and key.
    """
    text = load_text_tools(config.model.path, config.model.stop_token_ids)
    heldout = read_heldout(config, text)
    rules = turn_rules(config, text, heldout.prompts)
    report(f"held-out problems: {heldout.summary()}; asked: {config.evaluation.limit or 'all'}")
    waits = Waits()
    with closing(RewardPool(config.reward)) as pool:
        async with local_fleet(config, folder, waits, vocab_size=text.vocab_size, report=report) as fleet:
            responder = Responder(fleet=fleet, pool=pool, decoder=text.decoder, rules=rules)
            evaluator = Evaluator(config, text=text, heldout=heldout, responder=responder, folder=folder)
            yield EvaluationSession(config, evaluator, fleet, waits, report)


@dataclass
class EvaluationSession:
    """The servers of `rollout.urls` are asked as they are and never given weights; servers of its own get those of a
    folder, verified by checksum."""

    config: Config
    evaluator: Evaluator
    fleet: RolloutFleet
    waits: Waits
    report: Callable[[str], None]
    weight_version: int = 0

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
            Stalled: as `Waits.wait_for`.
        """
        described = await self._labels() if weights is None else {"fingerprint": fingerprint(weights)}
        deadline_s = self.config.run.step_deadline_s
        with response_log(out, self._settings(described)) as log:
            missing = sum(key not in log.known for key in self.evaluator.keys)
            if missing and weights is not None:
                self.weight_version += 1
                publishing = self.fleet.publish(weights, self.weight_version)
                await self.waits.wait_for("weights of the evaluation", "rollout servers", deadline_s, publishing)
            answering = self.evaluator.answer("eval", known=log.known, record=self._recorder(log, missing))
            answers = await self.waits.wait_for("held-out answers", "rollout servers", deadline_s, answering)
            if weights is None and (now := await self._labels()) != described:
                aside = log.set_aside("mixed")
                raise EvaluationError(
                    f"the servers held {described} and now {now}: {aside} mixes them and is of no use"
                )
            about = {
                "weights": described | ({"folder": str(weights)} if weights else {}),
                "rollout_step": rollout_step,
                "problems_from": self.config.evaluation.path,
            }
            return write_results(out, self.evaluator.prompts, answers, about)

    def _settings(self, weights: dict[str, Any]) -> dict[str, Any]:
        config, rules = self.config, self.evaluator.rules
        return {
            "weights": weights,
            "temperature": config.evaluation.temperature,
            "top_p": config.evaluation.top_p,
            "max_new_tokens": config.rollout.longest_response,
            **{f"thinking_{key}": getattr(config.rollout, f"thinking_{key}") for key in ("budget", "end", "mark")},
            "stop_token_ids": list(self.evaluator.stop_token_ids),
            "seed": config.run.seed if config.rollout.deterministic else None,
            "verifiers": sorted({prompt.verifier for prompt in self.evaluator.prompts}),
            "turns": rules and [rules.max_turns, rules.max_tokens, rules.end_ids, sorted(rules.between.values())],
            "environments": rules and sorted({each.environment or "" for each in self.evaluator.prompts}),
        }

    def _recorder(self, log: ResponseLog, missing: int) -> Callable[[AnswerKey, Answer], None]:
        """Adds an answer to the log, and reports every 10 s how many there are."""
        total = len(self.evaluator.keys)
        if missing < total:
            self.report(f"{total - missing} of {total} responses are there already")
        began = reported = time.monotonic()

        def record(key: AnswerKey, answer: Answer) -> None:
            nonlocal reported
            log.add(key, answer)
            if time.monotonic() - reported > PROGRESS_INTERVAL_S:
                reported = time.monotonic()
                self.report(f"{len(log.known)} of {total} responses after {reported - began:.0f} s")

        return record

    async def _labels(self) -> dict[str, Any]:
        """What the servers of `rollout.urls` call their weights."""
        labels = {member.url: await member.client.weight_label() for member in self.fleet.members}
        if len(set(labels.values())) > 1:
            raise EvaluationError(f"the servers hold different weights: {labels}; give them the same ones first")
        return {"label": next(iter(labels.values())), "urls": sorted(labels)}
