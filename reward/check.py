"""What can be known of verifiers and ground truths before the first response is written."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping

from reward.config import RewardConfig
from reward.pool.worker_process import START_LIMIT_S, worker_environment
from reward.registry import VERIFIERS, find, load, probe
from reward.verdict import VerificationRequest, VerifierError


def check_verifiers(names: Mapping[str, str], config: RewardConfig) -> None:
    """Whether each verifier can be run here. Modules are imported in a process of their own, as the pool does it.

    Args:
        names: verifier -> who names it, such as `reward.verifier` or `train.jsonl:17`.

    Raises:
        VerifierError: one cannot; the message begins with who names it.
    """
    for name, place in names.items():
        try:
            entry = find(name)
        except VerifierError as error:
            raise VerifierError(f"{place}: {error}") from None
        if entry.remote and config.remote.url is None:
            raise VerifierError(f"{place} = {name}: reward.remote.url is not set; give the address of the service")
    local = [name for name in names if not find(name).remote and not find(name).fast]
    reasons = _try(local) if local else {}
    for name, reason in reasons.items():
        raise VerifierError(f"{names[name]} = {name}: {reason}")


def check_ground_truth(name: str, ground_truth: str) -> None:
    """Whether a built-in verifier can use this ground truth: each of them looks at it before the response.

    Says nothing of `remote` and of verifiers outside the table.

    Raises:
        VerifierError: it cannot; the message says why.
    """
    entry = VERIFIERS.get(name)
    if entry is not None and not entry.remote:
        load(name)(VerificationRequest(response="", ground_truth=ground_truth, verifier=name))


def _try(names: list[str]) -> dict[str, str]:
    """Names that cannot be loaded, with the reason."""
    command = [sys.executable, "-m", "reward.check", *names]
    try:
        tried = subprocess.run(
            command, capture_output=True, timeout=START_LIMIT_S, env=worker_environment(), stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        return {names[0]: f"import of {', '.join(names)} has not ended after {START_LIMIT_S:g} s"}
    found = tried.stdout.rpartition(b"\n")[2]
    if tried.returncode != 0 or not found:
        log = tried.stderr.decode("utf-8", "replace").strip()[-500:]
        return {names[0]: f"import of {', '.join(names)} ended with exit code {tried.returncode}: {log or '(no word)'}"}
    return json.loads(found)


def main() -> None:
    """Tries the verifiers that the arguments name; the last line of the output says which failed."""
    reasons = {}
    answer = os.dup(1)
    os.dup2(2, 1)  # what an imported module prints is no answer
    for name in sys.argv[1:]:
        try:
            probe(name)
        except VerifierError as error:
            reasons[name] = str(error)
    os.write(answer, b"\n" + json.dumps(reasons).encode("ascii"))


if __name__ == "__main__":
    main()
