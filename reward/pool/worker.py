"""The process that judges: `python -m reward.pool.worker FD PARENT MEMORY_MB NICENESS`, started by `worker_process`."""

import os
import resource
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import replace

from reward.code.seccomp import die_with_parent
from reward.pool.messages import Batch, Channel, Result, Signal
from reward.registry import load
from reward.verdict import Deferred, Judgement, Rule, Verdict, VerificationRequest, Verifier, VerifierError

_ERROR_LIMIT = 300


def main() -> None:
    """Serves orders until the connection closes."""
    descriptor, parent, memory_mb, niceness = (int(argument) for argument in sys.argv[1:5])
    die_with_parent()  # even in the middle of an endless computation
    if os.getppid() != parent:
        sys.exit("the parent died before this worker was ready")
    os.nice(niceness)
    channel = Channel(socket.socket(fileno=descriptor))
    _limit_memory(memory_mb)
    verifiers: dict[str, Verifier] = {name: load(name) for name in ("robust", "exact")}
    channel.send_reply(Signal.READY)
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 2)  # the parent keeps what was written so far, to explain a failed start
    while True:
        try:
            order = channel.receive_order()
        except EOFError:
            return
        if isinstance(order, Batch):
            channel.send_reply([_judge(request, verifiers) for request in order.requests])
        else:
            judge = _prepare(order.job, verifiers, memory_mb)
            channel.send_reply(Signal.STARTED)
            channel.send_reply([judge()])


def _limit_memory(memory_mb: int) -> None:
    """Lets the address space grow by `memory_mb` MiB from here."""
    with open("/proc/self/statm", encoding="ascii") as statm:
        pages = int(statm.read().split()[0])
    limit = pages * resource.getpagesize() + (memory_mb << 20)
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def _prepare(
    job: VerificationRequest | Deferred, verifiers: dict[str, Verifier], memory_mb: int
) -> Callable[[], Result]:
    """What gives the result, with everything imported that it needs. Imports do not count against the memory limit."""
    if isinstance(job, Deferred):
        from reward.answer import symbolic
        from reward.verifiers.robust import finish

        if symbolic.prepare():
            _limit_memory(memory_mb)
        return lambda: _timed(lambda: finish(job), "robust")
    if job.verifier not in verifiers:
        try:
            verifiers[job.verifier] = load(job.verifier)
        except VerifierError as error:
            failure = _failure(str(error), 0.0, Rule.UNJUDGED)
            return lambda: failure
        _limit_memory(memory_mb)
    return lambda: _judge(job, verifiers)


def _judge(request: VerificationRequest, verifiers: dict[str, Verifier]) -> Result:
    verifier = verifiers.get(request.verifier)
    if verifier is None:
        verifier = verifiers[request.verifier] = load(request.verifier)
    return _timed(lambda: verifier(request), request.verifier)


def _timed(judge: Callable[[], Judgement | Deferred | bool], name: str) -> Result:
    start = time.perf_counter()
    try:
        judged = judge()
    except MemoryError:
        return _failure("memory", time.perf_counter() - start)
    except VerifierError as error:
        return _failure(str(error), time.perf_counter() - start, Rule.UNJUDGED)
    except Exception as error:  # a verifier may fail in any way; the verdict says how, and the pool goes on
        return _failure(f"{type(error).__name__}: {error}", time.perf_counter() - start)
    seconds = time.perf_counter() - start
    if isinstance(judged, Judgement):
        return Verdict(accuracy=judged.accuracy, extracted=judged.extracted, rule=judged.rule, seconds=seconds)
    if isinstance(judged, Deferred):
        return replace(judged, seconds=seconds)
    if isinstance(judged, bool):
        return Verdict(accuracy=judged, extracted=None, rule=name, seconds=seconds)
    return _failure(f"verifier {name!r} returned {type(judged).__name__}, not a Judgement or a bool", seconds)


def _failure(reason: str, seconds: float, rule: str = "") -> Verdict:
    return Verdict(accuracy=False, extracted=None, rule=rule, seconds=seconds, error=reason[:_ERROR_LIMIT])


if __name__ == "__main__":
    main()
