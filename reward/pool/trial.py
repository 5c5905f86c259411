"""Tries one verifier or environment in a process of its own, started by `reward.check`: `python -m reward.pool.trial
NAME KIND`."""

import faulthandler
import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from reward.check import DONE, TRY_S, Truth
from reward.environment import ENVIRONMENTS, Episode, Turn, ask, load_environment
from reward.registry import load, probe
from reward.verdict import Deferred, Judgement, VerificationRequest, VerifierError


def _try(name: str, kind: str, truths: Sequence[Truth]) -> None:
    """Any other error is the response's: a verifier may want a form that a ground truth alone does not have."""
    own: Any = load(name) if kind == "verifier" else load_environment(name)
    end = time.monotonic() + TRY_S
    for place, prompt, truth in truths:
        request = VerificationRequest(response=truth, ground_truth=truth, prompt=prompt, verifier=name)
        # Its thread needs no lock of Python's, which a regular expression without end keeps.
        faulthandler.dump_traceback_later(float(sys.argv[-1]), exit=True)
        try:
            judged = own(request) if kind == "verifier" else ask(own, Episode(prompt, truth, (Turn(truth),)))
        except VerifierError as error:
            raise VerifierError(f"{place}: {error}") from None
        except (NameError, ImportError) as error:
            raise VerifierError(f"{type(error).__name__}: {error}") from None
        except Exception:
            continue
        if kind == "verifier" and not isinstance(judged, Judgement | Deferred | bool):
            raise VerifierError(f"it returned {type(judged).__name__}, not a Judgement or a bool")
        if time.monotonic() > end:
            break


def main() -> None:
    """Tries what the first two arguments name on the `Truth`s of standard input, each for as many seconds as the last
    one says. `DONE` is written once it can be run; the exit code is 0 unless a ground truth is refused."""
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
