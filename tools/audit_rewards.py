"""The responses that a run kept, judged again: on which of them the rules disagree, as a table to read.

python -m tools.audit_rewards runs/quickstart            # <run>/samples.jsonl
python -m tools.audit_rewards rollouts.jsonl --all       # lines of {"response", "ground_truth"}

A line whose verifier is for mathematics is judged by `exact` and by `robust`, any other by its own verifier; of a
weighted sum the first counts. What an environment judged is counted and not asked again. A row is listed when the
verdicts differ, when there is none, or when the verifier of the run now says something else.
Exit code 1: there are such rows.
"""

import argparse
import asyncio
import json
import sys
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_dapo.config import ConfigError, load_config
from reward.config import RewardConfig
from reward.pool.pool import RewardPool
from reward.registry import find_named_by_data, weighted
from reward.verdict import Verdict, VerificationRequest, VerifierError

RULES, ENVIRONMENT = ("exact", "robust"), "environment"
EXIT_AGREE, EXIT_DISAGREE, EXIT_USAGE = 0, 1, 2

_CELL = 60


class AuditError(ValueError):
    """Nothing to audit; the message says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Audited:
    """One saved response with its verdicts."""

    place: str
    line: Mapping[str, Any]
    verdicts: dict[str, Verdict]
    """Verifier -> what it says now."""

    @property
    def saved(self) -> bool | None:
        """What was saved with the response."""
        return bool(self.line["accuracy"]) if "accuracy" in self.line else None

    @property
    def reason(self) -> str:
        """Why a person should look at it; empty if there is no reason."""
        own = weighted(str(self.line.get("verifier")))[0][1]
        if self.saved is not None and own in self.verdicts and self.verdicts[own].accuracy is not self.saved:
            return f"{own} changed"
        if len({verdict.accuracy for verdict in self.verdicts.values()}) > 1:
            return "rules differ"
        return "no verdict" if any(verdict.error for verdict in self.verdicts.values()) else ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(prog="python -m tools.audit_rewards", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("run", type=Path, help="run directory, or a JSON lines file")
    parser.add_argument("--all", action="store_true", help="list the rows on which the rules agree too")
    parser.add_argument("--limit", type=int, default=200, help="rows listed, at most")
    options = parser.parse_args(arguments)
    if options.limit < 0:
        parser.error(f"--limit {options.limit}: must be 0 or more")
    try:
        config, allowed = _settings(options.run)
        file = options.run / "samples.jsonl" if options.run.is_dir() else options.run
        audited = asyncio.run(audit(read_lines(file), config, allowed))
    except (AuditError, ConfigError) as error:
        print(error, file=sys.stderr)
        return EXIT_USAGE
    except OSError as error:
        print(f"{error.filename}: {error.strerror}; give a run directory, or a JSON lines file", file=sys.stderr)
        return EXIT_USAGE
    print(page(audited, everything=options.all, limit=options.limit))
    return EXIT_DISAGREE if any(row.reason for row in audited) else EXIT_AGREE


def _settings(run: Path) -> tuple[RewardConfig, set[str]]:
    """Section `reward` of the run and all verifiers that its config names; the defaults for a file of its own."""
    stored = run / "config.yaml"
    if not stored.is_file():
        return RewardConfig(), set()
    config = load_config(stored)
    files = {source.verifier for source in config.data.mixture if source.verifier is not None}
    return config.reward, {config.reward.verifier, *config.reward.by_source.values(), *files}


def read_lines(file: Path) -> list[tuple[str, dict[str, Any]]]:
    """(file:line, object) of each saved response. Raises AuditError, OSError."""
    found = []
    for number, text in enumerate(file.read_bytes().splitlines(), start=1):
        if not text.strip():
            continue
        place = f"{file.name}:{number}"
        try:
            line = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise AuditError(f"{place}: no JSON ({error}); a run that is writing may leave half a last line") from None
        if not isinstance(line, dict):
            raise AuditError(f"{place}: no JSON object")
        truth = line.get("ground_truth", line.get("answer"))  # the second is what a run writes
        if not isinstance(line.get("response"), str) or truth is None or isinstance(truth, bool):
            raise AuditError(f'{place}: holds no "response" as a text and "ground_truth" (or "answer")')
        if line.get("accuracy", 0) not in (0, 1):  # true and 1.0 are equal to 1
            raise AuditError(f"{place}: accuracy = {str(line['accuracy'])[:80]!r}: expected true or false")
        if not isinstance(line.get("verifier"), str | None):
            raise AuditError(f"{place}: verifier = {str(line['verifier'])[:80]!r}: expected the name of one, as a text")
        # As verifiers take it: a text, a number as it is written, an object or a list as JSON.
        line["ground_truth"] = truth if isinstance(truth, str) else json.dumps(truth)
        found.append((place, line))
    if not found:
        raise AuditError(f"{file}: holds no responses; monitor.sample_responses says how many a run keeps")
    return found


async def audit(
    lines: Sequence[tuple[str, Mapping[str, Any]]], config: RewardConfig, allowed: Collection[str]
) -> list[Audited]:
    """Judges every line.

    Args:
        allowed: verifiers outside the table that a line may name.

    Raises:
        AuditError: a line names a verifier that is not known or not allowed.
    """
    requests: list[VerificationRequest] = []
    owners: list[int] = []
    for at, (place, line) in enumerate(lines):
        if line.get("judged_by") == ENVIRONMENT:
            continue
        own = line.get("verifier") or config.verifier
        try:
            both, own = find_named_by_data(own, allowed).second, weighted(own)[0][1]
        except VerifierError as error:
            raise AuditError(f"{place}: {error}") from None
        texts = {"response": line["response"], "ground_truth": line["ground_truth"]}
        prompt = str(line.get("prompt_text", ""))
        for name in RULES if both else (own,):
            requests.append(VerificationRequest(**texts, prompt=prompt, verifier=name))
            owners.append(at)
    pool = RewardPool(config)
    try:
        verdicts = await pool.verify(requests)
    finally:
        pool.close()
    audited = [Audited(place=place, line=line, verdicts={}) for place, line in lines]
    for at, request, verdict in zip(owners, requests, verdicts, strict=True):
        audited[at].verdicts[request.verifier] = verdict
    return audited


def page(audited: Sequence[Audited], *, everything: bool, limit: int) -> str:
    """Markdown: how often which rules credit, and the rows to look at."""
    both = Counter(
        (row.verdicts["exact"].accuracy, row.verdicts["robust"].accuracy)
        for row in audited
        if set(RULES) <= row.verdicts.keys()
    )
    games = sum(row.line.get("judged_by") == ENVIRONMENT for row in audited)
    reasons = Counter(row.reason for row in audited if row.reason)
    lines = [
        f"{len(audited)} responses, {sum(reasons.values())} to look at"
        + "".join(f"; {reason}: {count}" for reason, count in reasons.most_common())
        + (f"; judged by an environment, and not again: {games}" if games else ""),
        "",
        "| | robust: right | robust: wrong |",
        "|---|---|---|",
        *(f"| exact: {_word(exact)} | {both[exact, True]} | {both[exact, False]} |" for exact in (True, False)),
        "",
        "| where | step | why | saved | verdicts now | ground truth | end of the response |",
        "|---|---|---|---|---|---|---|",
    ]
    shown = [row for row in audited if everything or row.reason]
    for row in shown[:limit]:
        now = ", ".join(f"{name}: {_said(verdict)}" for name, verdict in row.verdicts.items())
        saved = "" if row.saved is None else f"{row.line.get('verifier', '')}: {_word(row.saved)}".lstrip(": ")
        cells = (row.place, str(row.line.get("rollout_step", "")), row.reason, saved, now)
        truth, end = _cell(row.line["ground_truth"]), _cell(row.line["response"].strip()[-_CELL:])
        lines.append(f"| {' | '.join(_cell(cell, 200) for cell in cells)} | {truth} | {end} |")
    if len(shown) > limit:
        lines.append(f"\n{len(shown) - limit} more rows; --limit {len(shown)} shows them")
    return "\n".join(lines)


def _said(verdict: Verdict) -> str:
    if verdict.error is not None:
        return f"no verdict ({verdict.error})"
    stated = "nothing stated" if verdict.extracted is None else repr(verdict.extracted[:_CELL])
    return f"{_word(verdict.accuracy)} ({verdict.rule}, {stated})"


def _word(accuracy: bool) -> str:
    return "right" if accuracy else "wrong"


def _cell(text: str, width: int = _CELL) -> str:
    """Text that does not break a table."""
    printable = "".join(letter if letter.isprintable() else " " for letter in text[:width])
    return printable.replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main())
