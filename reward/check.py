"""What can be known of verifiers and ground truths before the first response is written.

A verifier or an environment is tried in a process of its own, which is this program."""

import faulthandler
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from reward.config import RewardConfig, ServiceConfig
from reward.environment import ENVIRONMENTS, REMOTE, Episode, Turn, ask, load_environment
from reward.pool.worker_process import START_LIMIT_S, worker_environment
from reward.registry import VERIFIERS, find, load, probe, weighted
from reward.verdict import VerificationRequest, VerifierError, fault_of

TRY_S = 5.0
"""An own verifier is tried on so many seconds of ground truths, the first ones; one of every run at least."""

Truth = tuple[str, str, str]
"""Place such as `train.jsonl:17`, prompt, ground truth."""
Truths = Mapping[str, Sequence[Truth]]

DONE = b"\nit can be run\n"
"""What the trying process writes in the end; a module that ends the process does not get so far."""


def check_verifiers(names: Mapping[str, str], config: RewardConfig, truths: Truths | None = None) -> None:
    """Whether each verifier can be run here. Modules are imported in a process of their own, as the pool does it, and
    an own function judges each ground truth as if it were the response, for `TRY_S` seconds.

    Args:
        names: verifier -> who names it, such as `reward.verifier` or `train.jsonl:17`.
        truths: verifier -> what it will have to judge.

    Raises:
        VerifierError: one cannot, refuses one of them, or returns no verdict; the message begins with who names it.
    """
    parts = [(given, part, place) for given, place in names.items() for _, part in weighted(given)]
    for whole, name, place in parts:
        try:
            entry = find(name)
        except VerifierError as error:
            raise VerifierError(f"{place}: {error}") from None
        if entry.remote:
            _check_service(config.remote, f"{place} = {name}: reward.remote")
        tried_on = () if truths is None or name in VERIFIERS else truths.get(whole, ())
        if not entry.remote and not entry.fast and (reason := _why_not(name, config, tried_on)):
            raise VerifierError(f"{place} = {name}: {reason}")


def check_environments(names: Mapping[str, str], config: RewardConfig, truths: Truths | None = None) -> None:
    """Whether each environment can be run here: imported in a process of its own, and tried on the ground truths as if
    each were the model's first turn, for `TRY_S` seconds.

    Args:
        names: environment -> who names it, such as `data.environment`.
        truths: environment -> problems that it will get.

    Raises:
        VerifierError: one cannot, refuses one of them, or returns no outcome.
    """
    for name, place in names.items():
        if name == REMOTE:
            _check_service(config.remote_environment, f"{place} = {name}: reward.remote_environment")
        elif reason := _why_not(name, config, (truths or {}).get(name, ()), "environment"):
            raise VerifierError(f"{place} = {name}: {reason}")


def _check_service(config: ServiceConfig, section: str) -> None:
    if config.url is None:
        raise VerifierError(f"{section}.url is not set; give the address of the service")
    try:
        if config.key_file and len(Path(config.key_file).read_text("ascii").split()) != 1:
            raise ValueError(f"{config.key_file} must hold one key, a line of ASCII text without spaces")
    except (OSError, ValueError) as error:
        raise VerifierError(f"{section}.key_file: {error}") from None


def check_ground_truth(name: str, ground_truth: str) -> None:
    """Whether built-in verifiers can use this ground truth: each of them looks at it before the response.

    Says nothing of `remote` and of verifiers outside the table.

    Raises:
        VerifierError: it cannot; the message says why.
    """
    for _, part in weighted(name):
        entry = find(part)
        if entry.fast or (part in VERIFIERS and part != "none" and not entry.remote):
            load(part)(VerificationRequest(response="", ground_truth=ground_truth, verifier=part))


def _why_not(name: str, config: RewardConfig, truths: Sequence[Truth], kind: str = "verifier") -> str:
    """Why a verifier or an environment cannot be run here, or takes longer for one answer than it may; empty if it
    can."""
    limit_s = config.timeout_s if kind == "verifier" else START_LIMIT_S
    command = [sys.executable, "-m", __name__, name, kind, str(limit_s)]
    environment, pipe = worker_environment(config), subprocess.PIPE
    with tempfile.TemporaryFile() as said, tempfile.TemporaryFile() as log:  # its children would keep a pipe open
        tried = subprocess.Popen(command, stdin=pipe, stdout=said, stderr=log, env=environment, start_new_session=True)
        try:
            with suppress(subprocess.TimeoutExpired):
                tried.communicate(json.dumps(truths).encode(), START_LIMIT_S)
        finally:
            code = tried.poll()
            with suppress(ProcessLookupError):
                os.killpg(tried.pid, signal.SIGKILL)
            tried.wait()
        said.seek(0)
        log.seek(0)
        can, wrote = DONE in said.read(), log.read().decode("utf-8", "replace").strip()
    if code is None:  # the threads of one that can be run may not let it end
        return "" if can else f"its import has not ended after {START_LIMIT_S:g} s"
    if code == 0 and can:
        return ""
    if (at := wrote.rfind("Timeout (")) >= 0:  # as faulthandler begins when it ends a process
        return f"no verdict on a ground truth in reward.timeout_s = {limit_s:g}\n{wrote[at:][:500]}"
    return f"a trial ended with exit code {code}: {wrote[-500:] or '(nothing)'}"


def _try(name: str, kind: str, truths: Sequence[Truth]) -> None:
    """Any other error is the response's: a verifier may want a form that a ground truth alone does not have. But a
    TypeError or AttributeError on each of them is a slip in the code."""
    slips: list[str] = []
    own: Any = load(name) if kind == "verifier" else load_environment(name)
    end = time.monotonic() + TRY_S
    for place, prompt, truth in truths:
        if time.monotonic() > end:
            break
        slips.append("")
        request = VerificationRequest(response=truth, ground_truth=truth, prompt=prompt, verifier=name)
        # Its thread needs no lock of Python's, which a regular expression without end keeps.
        faulthandler.dump_traceback_later(float(sys.argv[-1]), exit=True)
        try:
            judged = own(request) if kind == "verifier" else ask(own, Episode(prompt, truth, (Turn(truth),)))
        except VerifierError as error:
            raise VerifierError(f"{place}: {error}") from None
        except (NameError, ImportError) as error:
            raise VerifierError(f"{type(error).__name__}: {error}") from None
        except (Exception, SystemExit) as error:
            slips[-1] = f"{type(error).__name__}: {error}" if isinstance(error, TypeError | AttributeError) else ""
            continue
        if kind == "verifier" and (fault := fault_of(judged)):
            raise VerifierError(f"it {fault}")
    if slips and all(slips):
        raise VerifierError(f"on every ground truth that it was tried on: {slips[-1]}")


def main() -> None:
    """`python -m reward.check NAME KIND SECONDS`: tries that verifier or environment on the `Truth`s of standard input,
    each for so many seconds. `DONE` is written once it can be run; the exit code is 0 unless a ground truth is
    refused."""
    signal.alarm(round(START_LIMIT_S))  # whether or not there is somebody left to end it
    truths = json.load(sys.stdin)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # as in the pool
    try:
        name, kind = sys.argv[1:3]
        (probe if kind == "verifier" else load_environment)(name)
        if name in ENVIRONMENTS:
            probe("code")  # its sandbox
        os.write(1, DONE)
        _try(name, kind, truths)
    except VerifierError as error:
        sys.exit(str(error))
    sys.stdout.flush()
    os._exit(0)  # whatever threads it has


if __name__ == "__main__":
    main()
