"""The process that judges: `python -m reward.worker FD PARENT MEMORY_MB NICENESS`, started by `reward.process`.

Requests: ("batch", rows), ("single", row), ("algebra", answer, truth, extracted), where a row is (verifier, response,
ground_truth, prompt). A batch is answered by one list; the two others by "started" once everything is imported, so
that the wall-clock limit does not pay for imports, and then by one result. A result is [accuracy, extracted, rule,
seconds, error]; in a batch it may be [answer, truth, extracted, seconds] instead: that one needs algebra.
"""

import ctypes
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

from reward.registry import load
from reward.verdict import Deferred, Judgement, Rule, VerificationRequest, Verifier, VerifierError
from reward.wire import Channel

_PR_SET_PDEATHSIG = 1
_ERROR_LIMIT = 300

Row = tuple[str, str, str, str]


def main() -> None:
    """Serves requests until the connection closes."""
    descriptor, parent, memory_mb, niceness = (int(argument) for argument in sys.argv[1:5])
    _die_with(parent)
    os.nice(niceness)
    channel = Channel(socket.socket(fileno=descriptor))
    _limit_memory(memory_mb)
    verifiers: dict[str, Verifier] = {name: load(name) for name in ("robust", "exact")}
    channel.send_reply("ready")
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 2)  # the parent keeps what was written so far, to explain a failed start
    while True:
        try:
            request = channel.receive_request()
        except EOFError:
            return
        kind, *arguments = request
        if kind == "batch":
            channel.send_reply([_judge(row, verifiers) for row in arguments[0]])
        elif kind == "single":
            _serve_single(channel, arguments[0], verifiers, memory_mb)
        else:
            _serve_algebra(
                channel, Deferred(answer=arguments[0], truth=arguments[1], extracted=arguments[2]), memory_mb
            )


def _die_with(parent: int) -> None:
    """Has the kernel kill this process when its parent dies, even in the middle of an endless computation."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the parent died before this worker was ready")


def _limit_memory(memory_mb: int) -> None:
    """Lets the address space grow by `memory_mb` MiB from here."""
    with open("/proc/self/statm", encoding="ascii") as statm:
        pages = int(statm.read().split()[0])
    limit = pages * resource.getpagesize() + (memory_mb << 20)
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def _judge(row: Row, verifiers: dict[str, Verifier]) -> list[Any]:
    name, response, ground_truth, prompt = row
    request = VerificationRequest(response=response, ground_truth=ground_truth, prompt=prompt, verifier=name)
    verifier = verifiers.get(name)
    if verifier is None:
        verifier = verifiers[name] = load(name)
    return _timed(lambda: verifier(request), name)


def _timed(judge: Callable[[], Judgement | Deferred | bool], name: str) -> list[Any]:
    start = time.perf_counter()
    try:
        judged = judge()
    except MemoryError:
        return [False, None, "", time.perf_counter() - start, "memory"]
    except VerifierError as error:
        return [False, None, Rule.UNJUDGED.value, time.perf_counter() - start, str(error)[:_ERROR_LIMIT]]
    except Exception as error:  # a verifier may fail in any way; the verdict says how, and the pool goes on
        return [False, None, "", time.perf_counter() - start, f"{type(error).__name__}: {error}"[:_ERROR_LIMIT]]
    seconds = time.perf_counter() - start
    if isinstance(judged, Judgement):
        return [judged.accuracy, judged.extracted, judged.rule, seconds, None]
    if isinstance(judged, Deferred):
        return [judged.answer, judged.truth, judged.extracted, seconds]
    if isinstance(judged, bool):
        return [judged, None, name, seconds, None]
    return [False, None, "", seconds, f"verifier {name!r} returned {type(judged).__name__}, not a Judgement or a bool"]


def _serve_single(channel: Channel, row: Row, verifiers: dict[str, Verifier], memory_mb: int) -> None:
    if row[0] not in verifiers:
        try:
            verifiers[row[0]] = load(row[0])
        except VerifierError as error:
            channel.send_reply("started")
            channel.send_reply([False, None, Rule.UNJUDGED.value, 0.0, str(error)[:_ERROR_LIMIT]])
            return
        _limit_memory(memory_mb)
    channel.send_reply("started")
    channel.send_reply(_judge(row, verifiers))


def _serve_algebra(channel: Channel, deferred: Deferred, memory_mb: int) -> None:
    from reward.answer import symbolic
    from reward.verifiers.robust import finish

    if symbolic.prepare():
        _limit_memory(memory_mb)
    channel.send_reply("started")
    channel.send_reply(_timed(lambda: finish(deferred), "robust"))


if __name__ == "__main__":
    main()
