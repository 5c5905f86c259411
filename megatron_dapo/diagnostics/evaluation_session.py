"""An evaluation with servers of its own, or with somebody's running ones; it can be stopped and resumed.

The weights of a run: which are its newest, a snapshot of a version that outlives the run's own copy, a fingerprint that
tells versions apart. The responses so far are on disk as soon as each is judged: a restart asks for the others only.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from megatron_dapo.actor.weights.hf_files import SafetensorsReader, WeightsError
from megatron_dapo.cluster.heartbeat import heartbeat
from megatron_dapo.cluster.waits import Waits
from megatron_dapo.config import Config
from megatron_dapo.coordinator.inputs import read_heldout
from megatron_dapo.data.tokenizer import load_text_tools
from megatron_dapo.diagnostics.local_jobs import local_fleet
from megatron_dapo.experience.episodes import Rules, turn_rules
from megatron_dapo.experience.evaluation import Answer, AnswerKey, Evaluator, write_results
from megatron_dapo.experience.generator import Responder
from megatron_dapo.experience.groups import EarlierTurn
from megatron_dapo.monitor.console import Console, Count
from megatron_dapo.monitor.statistics import EVALUATIONS
from megatron_dapo.storage.durable import append_lines, lock_folder, replace_file, whole_lines
from reward.pool.pool import RewardPool
from rollout.fleet.fleet import RolloutFleet

SETTINGS, RESPONSES = "settings.json", "responses.jsonl"


class EvaluationError(RuntimeError):
    """An evaluation cannot be made, or its folder not be used. The message says why and what to do."""

    exit_code = 2


class ResponseLog:
    """`responses.jsonl` in the folder of one evaluation, which this process holds."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        """`settings`: what decides a response and its verdict; those of an earlier start must have been equal.

        Raises:
            EvaluationError: its responses were made with other settings, or one of them cannot be read.
            OSError: the folder cannot be written.
        """
        _check_settings(folder, settings)
        self._file = folder / RESPONSES
        self.known = _read(self._file)

    def add(self, key: AnswerKey, answer: Answer) -> None:
        """One more."""
        mode, problem, sample = key
        append_lines(self._file, [json.dumps({"way": mode, "problem": problem, "sample": sample} | asdict(answer))])
        self.known[key] = answer


def _check_settings(folder: Path, settings: Mapping[str, Any]) -> None:
    path = folder / SETTINGS
    if not path.exists():
        replace_file(path, json.dumps(settings, indent=2) + "\n")
    try:
        before = dict(json.loads(path.read_bytes()))
    except (ValueError, TypeError) as error:
        raise EvaluationError(f"{path} is damaged ({error}); remove {folder}, or give another --out") from None
    for key, now in json.loads(json.dumps(settings)).items():
        if before.get(key) != now:
            told = f"its responses were made with {key} = {before.get(key)}, not {now}"
            raise EvaluationError(f"{folder}: {told}; give another --out, or remove that folder")


def _read(path: Path) -> dict[AnswerKey, Answer]:
    """What is there, but for a last line that a killed process did not finish."""
    known = {}
    for place, text in whole_lines(path) if path.exists() else ():
        try:
            line = json.loads(text)
            key = (line.pop("way"), line.pop("problem"), line.pop("sample"))
            known[key] = Answer(**line | {"earlier": tuple(EarlierTurn(**turn) for turn in line["earlier"])})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise EvaluationError(f"{place}: no response ({error!r}); remove the line, it is asked for again") from None
    return known


KEPT = Path(EVALUATIONS) / ".kept"
"""In a run directory: the weights that an evaluation of it is about, until it is finished."""


def versions(folder: Path) -> list[int]:
    """N of each vN in a folder of weights, oldest first."""
    return sorted(int(each.name[1:]) for each in folder.glob("v*") if each.name[1:].isdigit())


def newest_weights(run: Path) -> tuple[Path, int | None]:
    """The exported model of a run that has ended, else the newest version that its servers read from disk, with its
    number.

    Raises:
        EvaluationError: there are neither.
    """
    if _exported(run):
        return run / "model", None
    for version in reversed(versions(run / "weights")):
        if (run / "weights" / f"v{version}" / "config.json").is_file():
            return run / "weights" / f"v{version}", version
    wait = "wait for the run's first ones (with rollout.weight_sync=disk)"
    named = "(eval --model FOLDER; tools.bisect CONFIG.yaml model.path=FOLDER)"
    convert = f"convert a checkpoint with tools/convert_checkpoint.py and name its folder {named}"
    raise EvaluationError(f"{run}: no weights in Hugging Face format below model/ or weights/: {wait}, or {convert}")


def evaluated_weights(run: Path) -> tuple[Path, int | None]:
    """The exported model of a run, else a snapshot: of the version at which an evaluation was stopped, or of the newest
    one. And the version's number.

    Raises:
        EvaluationError: there are no weights yet.
    """
    begun = versions(run / KEPT)
    if begun and not _exported(run):  # a snapshot outlives the run's own copy
        return run / KEPT / f"v{begun[-1]}", begun[-1]
    source, version = newest_weights(run)
    if version is None:
        return source, None
    if not snapshot(source, run / KEPT / source.name):
        raise EvaluationError(f"{run}: version {version} was removed by the run meanwhile; try again")
    return run / KEPT / source.name, version


def _exported(run: Path) -> bool:
    return (run / "summary.json").exists() and (run / "model" / "config.json").is_file()


def snapshot(source: Path, target: Path) -> bool:
    """Make `target` hold the files of `source`, which may be removed at any moment: as hard links, which cost nothing,
    or as copies where the file system has none. False if `source` was removed meanwhile; there is no target then."""
    aside = target.with_name(f"{target.name}.tmp")
    for old in (target, aside):
        shutil.rmtree(old, ignore_errors=True)
    with suppress(FileNotFoundError, shutil.Error):
        shutil.copytree(source, aside, copy_function=_link_or_copy)
        if {file.name for file in source.iterdir()} == {file.name for file in aside.iterdir()}:
            os.replace(aside, target)
            return True
    shutil.rmtree(aside, ignore_errors=True)
    return False


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)  # which fails too where there is no source any more


def fingerprint(folder: Path) -> str:
    """Of the model in a folder: of its config, and of some bytes of each tensor. Another step of training has another
    one.

    Raises:
        EvaluationError: the folder holds no model in Hugging Face format.
    """
    try:
        with SafetensorsReader(folder) as weights:
            content = (folder / "config.json").read_bytes()
            weights.check_head(tied=re.search(rb'"tie_word_embeddings"\s*:\s*true', content) is not None)
            content += weights.digest().encode()
    except (OSError, WeightsError) as error:
        why = f"no model in Hugging Face format (config.json, *.safetensors): {error}"
        remedy = "python -m tools.convert_checkpoint makes one of a checkpoint"
        raise EvaluationError(f"{folder}: {why}; {remedy}") from None
    return hashlib.sha256(content).hexdigest()[:16]


async def evaluate(config: Config, out: Path, console: Console, rollout_step: int | None) -> dict[str, Any]:
    """Every problem answered, those responses that `out` has already not asked for again.

    The servers of `rollout.urls` are asked as they are and never given weights; servers of its own get those of
    `model.path`, verified by checksum.

    Args:
        out: gets settings.json, responses.jsonl, problems.jsonl and result.json, status.json, and the servers' logs and
            key.
        rollout_step: of the run that made the weights, for the result.

    Returns:
        What result.json holds.

    Raises:
        EvaluationError: `out` belongs to another evaluation, or the servers' weights changed meanwhile.
        FolderHeld: another process is at work in `out`.
        Stalled: as `Waits.wait_for`.
    """
    weights = None if config.rollout.urls else Path(config.model.path)
    described = {"fingerprint": fingerprint(weights)} if weights else {}
    text = load_text_tools(config.model.path, config.model.stop_token_ids)
    heldout = read_heldout(config, text)
    rules = turn_rules(config, text, heldout.prompts)
    console.note(f"held-out problems: {heldout.summary()}; asked: {config.evaluation.limit or 'all'}")
    waits, deadline_s = Waits(), config.run.step_deadline_s
    out.mkdir(parents=True, exist_ok=True)
    with closing(console), lock_folder(out), closing(RewardPool(config.reward)) as pool:
        asked = partial(Evaluator, config, text=text, heldout=heldout, folder=out)
        nobody: Any = None
        if weights:  # before servers, which may take minutes, are started
            ResponseLog(out, answer_settings(config, asked(responder=nobody), rules, described))
        async with (
            heartbeat(out, waits, 0, console),
            local_fleet(config, out, waits, vocab_size=text.vocab_size, report=console.note) as fleet,
        ):
            responder = Responder(fleet=fleet, pool=pool, decoder=text.decoder, rules=rules)
            evaluator = asked(responder=responder)
            described = described or await weight_labels(fleet)
            total = len(evaluator.keys)
            log = ResponseLog(out, answer_settings(config, evaluator, rules, described))
            if there := sum(key in log.known for key in evaluator.keys):
                console.note(f"{there} of {total} responses are there already")
            others = len(log.known) - there  # of problems or samples that are not asked for now
            console.run = {"evaluation": Count(there, total, "responses")}
            if there < total and weights:
                publishing = fleet.publish(weights, 1)
                await waits.wait_for("weights of the evaluation", "rollout servers", deadline_s, publishing)

            def record(key: AnswerKey, answer: Answer) -> None:
                log.add(key, answer)
                console.run = {"evaluation": Count(len(log.known) - others, total, "responses")}

            answering = evaluator.answer("eval", known=log.known, record=record)
            answers = await waits.wait_for("held-out answers", "rollout servers", deadline_s, answering)
            if weights is None and (now := await weight_labels(fleet)) != described:
                aside = (out / RESPONSES).rename(out / f"{RESPONSES}.mixed")
                raise EvaluationError(f"the servers held {described} and now {now}: {aside} mixes them and is useless")
            read = described | ({"folder": str(weights)} if weights else {})
            about = {"weights": read, "rollout_step": rollout_step, "problems_from": config.evaluation.path}
            return write_results(out, evaluator.prompts, answers, about)


def answer_settings(config: Config, evaluator: Evaluator, rules: Rules, weights: dict[str, Any]) -> dict[str, Any]:
    return {
        "weights": weights,
        "numbers": [config.model.dtype, config.model.upcasts_head, config.rollout.quantization],
        "extra_args": list(config.rollout.extra_args) if not config.rollout.urls else [],
        "temperature": config.evaluation.temperature,
        "top_p": config.evaluation.top_p,
        "max_new_tokens": config.rollout.longest_response,
        **{f"thinking_{key}": getattr(config.rollout, f"thinking_{key}") for key in ("budget", "end", "mark")},
        "stop_token_ids": list(evaluator.modes[0].sampling.stop_token_ids),
        "seed": config.run.seed if config.rollout.deterministic else None,
        "verifiers": sorted({prompt.verifier for prompt in evaluator.prompts}),
        "turns": rules and [rules.max_turns, rules.max_tokens, rules.end_ids, sorted(rules.between.values())],
        "environments": rules and sorted({each.environment or "" for each in evaluator.prompts}),
    }


async def weight_labels(fleet: RolloutFleet) -> dict[str, Any]:
    """What the servers of `rollout.urls` call their weights."""
    labels = {member.url: await member.client.weight_label(model=True) for member in fleet.members}
    if len(set(labels.values())) > 1:
        raise EvaluationError(f"the servers hold different weights: {labels}; give them the same ones first")
    return {"label": next(iter(labels.values())), "urls": sorted(labels)}
