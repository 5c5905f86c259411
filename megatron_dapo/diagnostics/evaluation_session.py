"""An evaluation with servers of its own, or with somebody's running ones; it can be stopped and resumed."""

from contextlib import closing
from pathlib import Path
from typing import Any

from megatron_dapo.cluster.waits import Waits
from megatron_dapo.config import Config
from megatron_dapo.coordinator.inputs import read_heldout
from megatron_dapo.data.tokenizer import load_text_tools
from megatron_dapo.diagnostics.local_jobs import local_fleet
from megatron_dapo.diagnostics.response_log import RESPONSES, EvaluationError, response_log
from megatron_dapo.diagnostics.weight_snapshot import fingerprint
from megatron_dapo.experience.evaluation import Answer, AnswerKey, Evaluator, write_results
from megatron_dapo.experience.generator import Responder
from megatron_dapo.experience.observations import turn_rules
from megatron_dapo.monitor.console import Console, Count
from reward.pool.pool import RewardPool
from rollout.fleet.fleet import RolloutFleet


async def evaluate(config: Config, out: Path, console: Console, rollout_step: int | None) -> dict[str, Any]:
    """Every problem answered, those responses that `out` has already not asked for again.

    The servers of `rollout.urls` are asked as they are and never given weights; servers of its own get those of
    `model.path`, verified by checksum.

    Args:
        out: gets settings.json, responses.jsonl, problems.jsonl and result.json, and the servers' logs and key.
        rollout_step: of the run that made the weights, for the result.

    Returns:
        What result.json holds.

    Raises:
        EvaluationError: `out` belongs to another evaluation, or the servers' weights changed meanwhile.
        Stalled: as `Waits.wait_for`.
    """
    weights = None if config.rollout.urls else Path(config.model.path)
    described = {"fingerprint": fingerprint(weights)} if weights else {}
    text = load_text_tools(config.model.path, config.model.stop_token_ids)
    heldout = read_heldout(config, text)
    rules = turn_rules(config, text, heldout.prompts)
    console.note(f"held-out problems: {heldout.summary()}; asked: {config.evaluation.limit or 'all'}")
    waits, deadline_s = Waits(), config.run.step_deadline_s
    with closing(console), closing(RewardPool(config.reward)) as pool:
        async with local_fleet(config, out, waits, vocab_size=text.vocab_size, report=console.note) as fleet:
            responder = Responder(fleet=fleet, pool=pool, decoder=text.decoder, rules=rules)
            evaluator = Evaluator(config, text=text, heldout=heldout, responder=responder, folder=out)
            described = described or await _labels(fleet)
            total = len(evaluator.keys)
            with response_log(out, _settings(config, evaluator, described)) as log:
                if there := sum(key in log.known for key in evaluator.keys):
                    console.note(f"{there} of {total} responses are there already")
                if there < total and weights:
                    publishing = fleet.publish(weights, 1)
                    await waits.wait_for("weights of the evaluation", "rollout servers", deadline_s, publishing)

                def record(key: AnswerKey, answer: Answer) -> None:
                    log.add(key, answer)
                    console.working({"evaluation": Count(len(log.known), total, "responses")})

                answering = evaluator.answer("eval", known=log.known, record=record)
                answers = await waits.wait_for("held-out answers", "rollout servers", deadline_s, answering)
                if weights is None and (now := await _labels(fleet)) != described:
                    aside = (out / RESPONSES).rename(out / f"{RESPONSES}.mixed")
                    raise EvaluationError(
                        f"the servers held {described} and now {now}: {aside} mixes them and is of no use"
                    )
                about = {
                    "weights": described | ({"folder": str(weights)} if weights else {}),
                    "rollout_step": rollout_step,
                    "problems_from": config.evaluation.path,
                }
                return write_results(out, evaluator.prompts, answers, about)


def _settings(config: Config, evaluator: Evaluator, weights: dict[str, Any]) -> dict[str, Any]:
    rules = evaluator.rules
    return {
        "weights": weights,
        "temperature": config.evaluation.temperature,
        "top_p": config.evaluation.top_p,
        "max_new_tokens": config.rollout.longest_response,
        **{f"thinking_{key}": getattr(config.rollout, f"thinking_{key}") for key in ("budget", "end", "mark")},
        "stop_token_ids": list(evaluator.stop_token_ids),
        "seed": config.run.seed if config.rollout.deterministic else None,
        "verifiers": sorted({prompt.verifier for prompt in evaluator.prompts}),
        "turns": rules and [rules.max_turns, rules.max_tokens, rules.end_ids, sorted(rules.between.values())],
        "environments": rules and sorted({each.environment or "" for each in evaluator.prompts}),
    }


async def _labels(fleet: RolloutFleet) -> dict[str, Any]:
    """What the servers of `rollout.urls` call their weights."""
    labels = {member.url: await member.client.weight_label() for member in fleet.members}
    if len(set(labels.values())) > 1:
        raise EvaluationError(f"the servers hold different weights: {labels}; give them the same ones first")
    return {"label": next(iter(labels.values())), "urls": sorted(labels)}
