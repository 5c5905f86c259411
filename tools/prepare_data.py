"""Prompt files for training: convert, de-duplicate, split, report; and answers made integers.

python -m tools.prepare_data convert gsm8k.jsonl --schema gsm8k --out data/gsm8k --heldout 500
python -m tools.prepare_data integers data/math.jsonl --out data/integers --url http://127.0.0.1:30000/v1 --model NAME

`convert` writes train.jsonl, heldout.jsonl (`prompt`, `answer`, `source`), aside.jsonl (rows left out, with the reason)
and report.md. `integers` writes train.jsonl, aside.jsonl, report.md and replies.jsonl, from which a new start goes on.
One command at a time writes into a folder.
"""

import argparse
import asyncio
import hashlib
import json
import os
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from megatron_dapo.config.base import ConfigError
from megatron_dapo.config.data_config import ColumnsConfig, Schema
from megatron_dapo.data.hub import local_path
from megatron_dapo.data.records import SCHEMAS, DataError, PromptFile, Row, parse_row, raw_rows, resolve
from megatron_dapo.storage.durable import FolderHeld, lock_folder, replace_file
from reward.answer.read import read_raw
from reward.check import check_ground_truth
from reward.config import RewardConfig, check_url
from reward.pool.pool import RewardPool
from reward.registry import VERIFIERS
from reward.verdict import VerifierError
from tools.arguments import count, positive, positive_count
from tools.chat_endpoint import ChatEndpoint, EndpointError
from tools.integer_answers import SetAside, integer_of, transform_all

EXIT_OK, EXIT_NO_REPLY, EXIT_USAGE, EXIT_INTERRUPTED = 0, 1, 2, 130

_LATEX = re.compile(r"\\[A-Za-z]|[\^_{}]")


@dataclass(kw_only=True)
class Sifted:
    """Rows by what becomes of them."""

    kept: dict[str, Row] = field(default_factory=dict)
    """Key of the prompt (spaces made one) -> row."""
    aside: list[dict[str, Any]] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command that the arguments name. Exit code 1: the endpoint gave no reply; start it again."""
    options = _parser().parse_args(arguments)
    try:
        _check(options)
        options.out.mkdir(parents=True, exist_ok=True)
        with lock_folder(options.out):
            return convert(options) if options.command == "convert" else integers(options)
    except FolderHeld:
        print(f"--out {options.out}: another command writes there; wait for it or name another folder", file=sys.stderr)
        return EXIT_USAGE
    except EndpointError as error:
        print(f"{error}; the same command goes on from {options.out / 'replies.jsonl'}", file=sys.stderr)
        return EXIT_NO_REPLY
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from the replies that are kept", file=sys.stderr)
        return EXIT_INTERRUPTED
    except (DataError, OSError) as error:
        print(error, file=sys.stderr)
        return EXIT_USAGE


def _check(options: argparse.Namespace) -> None:
    """What can be wrong before anything is read. Raises DataError."""
    written = {(options.out / name).resolve() for name in ("train.jsonl", "heldout.jsonl", "aside.jsonl")}
    for file in (*options.files, *vars(options).get("exclude", ())):
        if file.resolve() in written:
            raise DataError(f"{file}: would be written over; name another folder than --out {options.out}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.prepare_data", description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    first = commands.add_parser("convert", help="to {prompt, answer, source}, each problem once, split in two")
    first.add_argument("--heldout", type=count, default=0, help="problems that go to heldout.jsonl")
    first.add_argument("--seed", type=int, default=0, help="of the split")
    first.add_argument(
        "--exclude", type=_path, nargs="*", default=[], help="files whose problems shall not be trained on"
    )
    first.add_argument("--tokenizer", type=_path, help="model folder: report prompt lengths in tokens too")
    second = commands.add_parser("integers", help="rewrite problems so that their answers are integers")
    second.add_argument(
        "--url", type=_address, required=True, help="OpenAI-compatible endpoint, as http://127.0.0.1:30000/v1"
    )
    second.add_argument("--model", required=True)
    second.add_argument("--key-env", default="OPENAI_API_KEY", help="environment variable that holds the API key")
    second.add_argument("--concurrency", type=positive_count, default=16, help="questions under way at the same time")
    second.add_argument(
        "--deadline", type=positive, default=1800.0, help="seconds until a question without reply ends it"
    )
    second.add_argument("--max-tokens", type=positive_count, default=8192, help="of one reply")
    for command in (first, second):
        command.add_argument("files", type=_path, nargs="+", help=".csv, .json, .jsonl or .parquet")
        command.add_argument("--out", type=Path, required=True, help="folder")
        command.add_argument("--schema", choices=list(SCHEMAS), default="columns")
        for key in ("prompt-key", "answer-key", "answer-after", "source-key"):
            command.add_argument(f"--{key}", help=f"as data.{key.replace('-', '_')}")
        command.add_argument("--verifier", choices=list(VERIFIERS), default="robust", help="must accept the answers")
        command.add_argument("--broken-rows", choices=["stop", "skip"], default="stop")
    return parser


def _path(text: str) -> Path:
    try:
        return Path(local_path(text, "the argument"))
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _address(text: str) -> str:
    try:
        return check_url(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text[:100]!r}: {error}") from None


def convert(options: argparse.Namespace) -> int:
    """Reads, sifts, splits, writes and reports."""
    sifted = sift(options.files, options)
    forbidden = {_key(row.prompt) for _, row in _rows(options.exclude, options, Counter())}
    for key in [key for key in sifted.kept if key in forbidden]:
        sifted.counts["excluded"] += 1
        sifted.aside.append(_written(sifted.kept.pop(key)) | {"reason": "excluded: it is in a file to be kept apart"})
    heldout, train = split(sifted.kept, options.heldout, options.seed)
    if options.heldout > len(heldout) or not train:
        raise DataError(f"--heldout {options.heldout}: of {len(sifted.kept)} problems, none would be left to train on")
    sifted.counts |= Counter({"train": len(train), "heldout": len(heldout)})
    lengths = {"prompt, characters": [len(_key(row.prompt)) for row in (*train, *heldout)]}
    if options.tokenizer:
        from megatron_dapo.data.prompts import render
        from megatron_dapo.data.tokenizer import load_text_tools

        try:
            tokenizer = load_text_tools(options.tokenizer).tokenizer
            template = "chat" if tokenizer.chat_template else "plain"
            lengths["prompt, tokens"] = [len(render(row.prompt, template, tokenizer)[1]) for row in (*train, *heldout)]
        except Exception as error:  # a chat template is a program of the model's author and may raise anything
            raise DataError(f"--tokenizer {options.tokenizer}: {error}") from error
    _write(options.out / "train.jsonl", map(_written, train))
    _write(options.out / "heldout.jsonl", map(_written, heldout))
    _finish(options.out, sifted, [(_key(row.prompt), row.answer) for row in (*train, *heldout)], lengths)
    return EXIT_OK


def sift(files: Sequence[Path], options: argparse.Namespace) -> Sifted:
    """Each problem once. One that comes with two answers is set aside whole: nobody knows which is right.

    Raises:
        DataError: a broken row, unless they shall be skipped.
    """
    sifted = Sifted()
    contradicted: set[str] = set()
    for _, row in _rows(files, options, sifted.counts, sifted.aside):
        key = _key(row.prompt)
        if key in contradicted:
            sifted.counts["with contradicting answers"] += 1
        elif key not in sifted.kept:
            sifted.kept[key] = row
        elif sifted.kept[key].answer == row.answer:
            sifted.counts["duplicates"] += 1
        else:
            contradicted.add(key)
            first = sifted.kept.pop(key)
            reason = f"contradiction: the answer is {first.answer[:80]!r}, and elsewhere {row.answer[:80]!r}"
            sifted.aside.append(_written(first) | {"reason": reason})
            sifted.counts["with contradicting answers"] += 2
    return sifted


def _rows(
    files: Sequence[Path],
    options: argparse.Namespace,
    counts: Counter[str],
    aside: list[dict[str, Any]] | None = None,
) -> Iterable[tuple[str, Row]]:
    keys = {name: vars(options)[name] for name in ("prompt_key", "answer_key", "answer_after", "source_key")}
    columns = resolve(ColumnsConfig(**keys), SCHEMAS[cast(Schema, options.schema)])
    for path in files:
        file = PromptFile(path=path, setting="options", columns=columns, name=path.stem)
        for place, record in raw_rows(path, "the argument"):
            counts["read"] += 1
            try:
                row = parse_row(record, file, place)
                check_ground_truth(options.verifier, row.answer)
            except (DataError, VerifierError) as error:
                message = str(error) if isinstance(error, DataError) else f"{place}: {error}"
                message = re.sub(r"options\.(\w+)", lambda key: "--" + key[1].replace("_", "-"), message)
                if options.broken_rows == "stop":
                    raise DataError(f"{message} (--broken-rows skip sets such rows aside)") from None
                counts["broken"] += 1
                if aside is not None:
                    aside.append({"place": place, "reason": f"broken: {message}"})
                continue
            yield place, row


def split(kept: dict[str, Row], heldout: int, seed: int) -> tuple[list[Row], list[Row]]:
    """(held out, rest), each in the order read. Which side a problem falls on depends on its text and the seed, so a
    problem that is added or taken away moves hardly any other."""
    ranked = sorted(kept, key=lambda key: hashlib.sha256(f"{seed}:{key}".encode()).digest())
    chosen = set(ranked[:heldout])
    return [kept[key] for key in kept if key in chosen], [kept[key] for key in kept if key not in chosen]


def integers(options: argparse.Namespace) -> int:
    """Transforms what has no integer answer; the other problems pass as they are."""
    sifted = sift(options.files, options)
    rows = list(sifted.kept.values())
    todo = [row for row in rows if integer_of(row.answer) is None]
    outcomes = iter(asyncio.run(_transform([(_text(row), row.answer) for row in todo], options)))
    written, lost_by_kind = [], defaultdict[str, list[bool]](list)
    for row in rows:
        if integer_of(row.answer) is not None:
            sifted.counts["integers already"] += 1
            written.append(_written(row))
            continue
        outcome = next(outcomes)
        lost_by_kind[answer_kind(row.answer)].append(isinstance(outcome, SetAside))
        if isinstance(outcome, SetAside):
            sifted.counts[f"set aside: {str(outcome).partition(':')[0]}"] += 1
            sifted.aside.append(_written(row) | {"reason": str(outcome)})
            continue
        sifted.counts["transformed"] += 1
        new = replace(row, prompt=_with_problem(row, outcome.problem), answer=str(outcome.answer))
        original = {"prompt": row.prompt, "answer": row.answer, "format": outcome.form.format}
        written.append(_written(new) | {"original": original | {"integer": outcome.form.integer}})
    _write(options.out / "train.jsonl", written)
    problems = [(_key(line["prompt"]), line["answer"]) for line in written]
    for kind, lost in lost_by_kind.items():
        sifted.counts[f"set aside of the answers that are {kind}: {sum(lost) / len(lost):.1%}"] = sum(lost)
    _finish(options.out, sifted, problems, {"prompt, characters": [len(prompt) for prompt, _ in problems]})
    return EXIT_OK


async def _transform(problems: list[tuple[str, str]], options: argparse.Namespace) -> list[Any]:
    pool = RewardPool(RewardConfig())
    try:
        async with ChatEndpoint(
            options.url,
            model=options.model,
            journal=options.out / "replies.jsonl",
            key=os.environ.get(options.key_env),
            concurrency=options.concurrency,
            deadline_s=options.deadline,
            settings={"temperature": 0, "max_tokens": options.max_tokens},
        ) as endpoint:
            outcomes = await transform_all(problems, endpoint, pool)
            print(f"{endpoint.questions} questions asked", file=sys.stderr)
            return outcomes
    finally:
        pool.close()


def _text(row: Row) -> str:
    """The problem: a text, or the last turn of a chat."""
    return row.prompt if isinstance(row.prompt, str) else row.prompt[-1]["content"]


def _with_problem(row: Row, problem: str) -> str | list[dict[str, str]]:
    return problem if isinstance(row.prompt, str) else [*row.prompt[:-1], row.prompt[-1] | {"content": problem}]


def _key(prompt: str | list[dict[str, str]]) -> str:
    """What makes two prompts one: the text, however it is spaced."""
    text = prompt if isinstance(prompt, str) else "\n".join(turn["content"] for turn in prompt)
    return " ".join(text.split())


def _written(row: Row) -> dict[str, Any]:
    answer = json.loads(row.answer) if row.structured else row.answer
    return {"prompt": row.prompt, "answer": answer, "source": row.source}


def _write(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    replace_file(path, "".join(json.dumps(line) + "\n" for line in lines).encode())


def answer_kind(answer: str) -> str:
    """`integer`, `negative integer`, `number` (fraction, decimal, percentage, ...), `list`, `choice`, `json`,
    `expression` or `text`.

    Example: answer_kind("\\\\frac{1}{2}") == "number", answer_kind("2\\\\sqrt{3}") == "expression".
    """
    text = answer.strip()
    if re.fullmatch(r"\(?[A-Za-z]\)?", text):
        return "choice"
    if text.startswith(("{", "[")):
        try:
            json.loads(text)
            return "json"
        except (ValueError, RecursionError):
            pass
    truth = read_raw(text)
    if truth.number is not None:
        if truth.number.value.denominator > 1 or truth.number.percent:
            return "number"
        return "integer" if truth.number.value >= 0 else "negative integer"
    if truth.items:
        return "list"
    return "expression" if _LATEX.search(text) or re.search(r"\d\s*[-+*/]|[-+*/]\s*\d", text) else "text"


def report(counts: Mapping[str, int], problems: Sequence[tuple[str, str]], lengths: Mapping[str, Iterable[int]]) -> str:
    """Markdown: the counts as they come, lengths (min, median, 95%, max), kinds of the answers.

    Args:
        problems: (prompt, answer) of those that are kept.
        lengths: what was measured -> a length for each.
    """
    lines = ["| rows | count |", "|---|---|", *(f"| {name} | {count} |" for name, count in counts.items())]
    lines += ["", "| length | min | median | 95% | max |", "|---|---|---|---|---|"]
    for name, values in lengths.items():
        found = np.array(list(values))
        if found.size:
            low, middle, high, top = np.percentile(found, [0, 50, 95, 100])
            lines.append(f"| {name} | {low:.0f} | {middle:.0f} | {high:.0f} | {top:.0f} |")
    lines += ["", "| kind of answer | count | example |", "|---|---|---|"]
    kinds: Counter[str] = Counter()
    examples: dict[str, str] = {}
    for _, answer in problems:
        kind = answer_kind(answer)
        kinds[kind] += 1
        examples.setdefault(kind, answer.replace("|", "\\|").replace("\n", " ")[:40])
    lines += [f"| {kind} | {count} | `{examples[kind]}` |" for kind, count in kinds.most_common()]
    return "\n".join(lines) + "\n"


def _finish(out: Path, sifted: Sifted, problems: list[tuple[str, str]], lengths: dict[str, list[int]]) -> None:
    _write(out / "aside.jsonl", sifted.aside)
    page = report(sifted.counts, [(prompt, str(answer)) for prompt, answer in problems], lengths)
    replace_file(out / "report.md", page.encode())
    print(page)


if __name__ == "__main__":
    sys.exit(main())
