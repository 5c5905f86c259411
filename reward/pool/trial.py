"""Tries one verifier in a process of its own: `python -m reward.pool.trial NAME`, started by `reward.check`."""

import json
import os
import sys
import time
from collections.abc import Sequence

from reward.check import DONE, TRY_S, Truth
from reward.pool.worker import judge
from reward.registry import load, probe
from reward.verdict import Deferred, VerificationRequest, VerifierError


def _try(name: str, truths: Sequence[Truth]) -> None:
    verifiers, end, errors = {name: load(name)}, time.monotonic() + TRY_S, []
    for place, prompt, truth in truths:
        request = VerificationRequest(response=truth, ground_truth=truth, prompt=prompt, verifier=name)
        verdict = judge(request, verifiers)
        if not isinstance(verdict, Deferred) and verdict.unjudged:
            raise VerifierError(f"{place}: {verdict.error}")
        errors.append(None if isinstance(verdict, Deferred) else verdict.error)
        if time.monotonic() > end:
            break
    if errors and all(errors):
        raise VerifierError(f"no verdict on any of {len(errors)} ground truths; the first, {truths[0][0]}: {errors[0]}")


def main() -> None:
    """Tries the verifier that the argument names on the `Truth`s of standard input. Exit code 0 and `DONE` written: it
    can be run here."""
    try:
        probe(sys.argv[1])
        _try(sys.argv[1], json.load(sys.stdin))
    except VerifierError as error:
        sys.exit(str(error))
    os.write(1, DONE)


if __name__ == "__main__":
    main()
