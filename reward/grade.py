"""`python -m reward grade FILE.jsonl`: one verdict a line, in order, whatever the lines hold."""

import argparse
import asyncio
import json
import os
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any, BinaryIO, TextIO

from pydantic import BaseModel, ValidationError

from reward.check import check_verifiers
from reward.config import RemoteConfig, RewardConfig
from reward.pool.pool import RewardPool
from reward.registry import VERIFIERS, find_named_by_data
from reward.verdict import PoolError, Verdict, VerificationRequest

EXIT_OK, EXIT_NO_VERDICTS, EXIT_USAGE = 0, 1, 2

_BATCH_BYTES = 16 << 20


class _Turn(BaseModel):
    content: str


class _Line(BaseModel):
    response: str
    ground_truth: str | dict[str, Any] | list[Any]
    prompt: str | list[_Turn] | None = None
    """A chat is joined."""
    verifier: str | None = None


def main() -> int:
    """Grades the file that the arguments name.

    Returns:
        The exit code: 0 even if lines are broken, 2 for arguments and files, 1 if no worker runs.
    """
    parser = argparse.ArgumentParser(prog="python -m reward", description=__doc__)
    defaults = RewardConfig()
    parser.add_argument("command", choices=["grade"], help="judge the responses of a JSON lines file")
    fields = '"response", "ground_truth" and optionally "verifier" and "prompt"'
    parser.add_argument("file", help=f"JSON lines with {fields}; - for stdin")
    names = f"{', '.join(VERIFIERS)}, module:function, or a weighted sum"
    parser.add_argument("--verifier", default=defaults.verifier, help=f"for lines that name none: {names}")
    parser.add_argument("--workers", type=int, default=defaults.workers, help="processes")
    parser.add_argument("--timeout", dest="timeout_s", type=float, default=defaults.timeout_s, help="seconds a verdict")
    parser.add_argument("--remote-url", help="service that judges the lines of verifier remote")
    arguments = parser.parse_args()
    options = {key: value for key, value in vars(arguments).items() if key in RewardConfig.__annotations__}
    try:
        config = RewardConfig(remote=RemoteConfig(url=arguments.remote_url), **options)
        check_verifiers({arguments.verifier: "--verifier"}, config)
        with nullcontext(sys.stdin.buffer) if arguments.file == "-" else open(arguments.file, "rb") as lines:
            asyncio.run(_grade(lines, sys.stdout, config))
        sys.stdout.flush()
        return EXIT_OK
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # `| head` has closed the pipe
        return EXIT_OK
    except OSError as error:
        code, told = EXIT_USAGE, f"{error.filename or arguments.file}: {error.strerror or error}"
    except PoolError as error:
        code, told = EXIT_NO_VERDICTS, str(error)
    except ValueError as error:  # an unknown verifier
        code, told = EXIT_USAGE, _in_words(error) if isinstance(error, ValidationError) else str(error)
    print(f"reward grade: {told}", file=sys.stderr)
    return code


def _in_words(error: ValidationError) -> str:
    faults = [(".".join(map(str, each["loc"])), each["input"], each["msg"]) for each in error.errors()]
    return "; ".join(f"{key} = {given!r:.40}: {said.removeprefix('Value error, ')}" for key, given, said in faults)


async def _grade(lines: BinaryIO, verdicts: TextIO, config: RewardConfig) -> None:
    start = time.monotonic()
    count = right = errors = 0
    pool = RewardPool(config)
    try:
        while batch := lines.readlines(_BATCH_BYTES):
            for verdict in await _verdicts(batch, pool, config.verifier):
                count += 1
                right += verdict.accuracy
                errors += verdict.error is not None
                line = asdict(verdict) | {"accuracy": int(verdict.accuracy)}
                if verdict.rewards is None:
                    del line["reward"], line["rewards"]
                verdicts.write(json.dumps(line) + "\n")
    finally:
        pool.close()
    seconds = time.monotonic() - start
    share = f"{right / count:.4f}" if count else "none"
    print(f"{count} lines, accuracy {share}, {errors} with errors, {seconds:.1f} s", file=sys.stderr)


async def _verdicts(lines: list[bytes], pool: RewardPool, verifier: str) -> list[Verdict]:
    verdicts: list[Verdict | None] = []
    requests: list[VerificationRequest] = []
    for line in lines:
        try:
            requests.append(parse_line(line, verifier))
            verdicts.append(None)
        except ValueError as error:
            verdicts.append(Verdict(accuracy=False, extracted=None, rule="", seconds=0.0, error=str(error)))
    judged = iter(await pool.verify(requests))
    return [next(judged) if verdict is None else verdict for verdict in verdicts]


def parse_line(line: bytes, verifier: str) -> VerificationRequest:
    """The request that a line holds. Bytes that are no UTF-8 become U+FFFD; a number counts as it is written.

    Raises:
        ValueError: no JSON object, or a field of the wrong type.
        VerifierError: the line names a verifier that is not known, or code other than `verifier`.
    """
    text = line.decode("utf-8", "replace").removeprefix("\ufeff")
    try:
        # As text: an int of 4300 digits would be too many, and 0.50 would lose its last one.
        content = json.loads(text.strip(), parse_int=str, parse_float=str)
        if not isinstance(content, dict):
            raise TypeError(f"{type(content).__name__}")
        fields = _Line.model_validate(content)
    except ValidationError as error:
        raise ValueError(_in_words(error)[:200]) from None
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"not a JSON object: {error}"[:200]) from error
    name, prompt, truth = fields.verifier or verifier, fields.prompt or "", fields.ground_truth
    fast = find_named_by_data(name, {verifier}).fast
    if not isinstance(truth, str):
        if fast:
            raise ValueError(f"ground_truth: verifier {name} takes a string")
        truth = json.dumps(json.loads(text)["ground_truth"])  # prompt files may hold it in this form too
    if not isinstance(prompt, str):
        prompt = "\n".join(turn.content for turn in prompt)
    return VerificationRequest(response=fields.response, ground_truth=truth, prompt=prompt, verifier=name)
