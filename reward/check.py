"""What can be known of verifiers and ground truths before the first response is written."""

import os
import subprocess
import sys
from collections.abc import Mapping

from reward.config import RewardConfig
from reward.pool.worker_process import START_LIMIT_S, worker_environment
from reward.registry import VERIFIERS, find, load, probe, weighted
from reward.verdict import VerificationRequest, VerifierError

_DONE = b"\nthe verifier can be run\n"
"""What the trying process writes in the end; a module that ends the process does not get so far."""


def check_verifiers(names: Mapping[str, str], config: RewardConfig) -> None:
    """Whether each verifier can be run here. Modules are imported in a process of their own, as the pool does it.

    Args:
        names: verifier -> who names it, such as `reward.verifier` or `train.jsonl:17`.

    Raises:
        VerifierError: one cannot; the message begins with who names it.
    """
    for name, place in [(part, place) for given, place in names.items() for _, part in weighted(given)]:
        try:
            entry = find(name)
        except VerifierError as error:
            raise VerifierError(f"{place}: {error}") from None
        if entry.remote and config.remote.url is None:
            raise VerifierError(f"{place} = {name}: reward.remote.url is not set; give the address of the service")
        if not entry.remote and not entry.fast and (reason := _why_not(name)):
            raise VerifierError(f"{place} = {name}: {reason}")


def check_ground_truth(name: str, ground_truth: str) -> None:
    """Whether built-in verifiers can use this ground truth: each of them looks at it before the response.

    Says nothing of `remote` and of verifiers outside the table.

    Raises:
        VerifierError: it cannot; the message says why.
    """
    for _, part in weighted(name):
        entry = find(part)
        if entry.fast or (part in VERIFIERS and not entry.remote):
            load(part)(VerificationRequest(response="", ground_truth=ground_truth, verifier=part))


def _why_not(name: str) -> str:
    """Why a verifier cannot be loaded here; empty if it can."""
    try:
        tried = subprocess.run(
            [sys.executable, "-m", "reward.check", name],
            stdin=subprocess.DEVNULL, capture_output=True, timeout=START_LIMIT_S, env=worker_environment(),
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"its import has not ended after {START_LIMIT_S:g} s"
    if tried.returncode == 0 and _DONE in tried.stdout:
        return ""
    log = tried.stderr.decode("utf-8", "replace").strip()[-500:]
    return f"its import ended with exit code {tried.returncode}: {log or '(nothing)'}"


def main() -> None:
    """Tries the verifier that the argument names. Exit code 0 and `_DONE` written: it can be run here."""
    try:
        probe(sys.argv[1])
    except VerifierError as error:
        sys.exit(str(error))
    os.write(1, _DONE)


if __name__ == "__main__":
    main()
