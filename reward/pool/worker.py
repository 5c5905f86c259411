"""The process that judges: `python -m reward.pool.worker FD PARENT MEMORY_MB NICENESS`, started by `worker_process`."""

import os
import pickle
import resource
import socket
import sys
import time
from contextlib import suppress
from dataclasses import replace
from functools import cache
from typing import Any

from reward.answer import symbolic
from reward.code.seccomp import die_with_parent
from reward.environment import Step, Stepped, ask, load_environment, sendable
from reward.pool.messages import HEADER, READY, Job, Reply, Result, encode_reply, needed
from reward.registry import VERIFIERS, load
from reward.verdict import EXTRACTED_LIMIT, Deferred, Judgement, Rule, Verdict, VerifierError, fault_of
from reward.verifiers import robust

_ERROR_LIMIT = 300


@cache
def _function(name: str, *, environment: bool = False) -> Any:
    """The verifier or environment of this name; imports it once."""
    return load_environment(name) if environment else load(name)


def main() -> None:
    """Serves orders until the connection closes."""
    descriptor, parent, memory_mb, niceness = (int(argument) for argument in sys.argv[1:5])
    die_with_parent()  # even in the middle of an endless computation
    if os.getppid() != parent:
        sys.exit("the parent died before this worker was ready")
    os.nice(niceness)
    for name in [name for name, entry in VERIFIERS.items() if entry.fast]:
        _function(name)
    _limit_memory(memory_mb)
    with socket.socket(fileno=descriptor).makefile("rwb") as connection:

        def send(reply: Reply, number: int = 0) -> None:
            connection.write(encode_reply(reply, number))
            connection.flush()

        send(READY)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the parent keeps what was written to explain a failed start
        while header := connection.read(HEADER.size):
            length, number = HEADER.unpack(header)
            jobs, imports = pickle.loads(connection.read(length))
            if imports:
                for job in jobs:
                    _prepare(job)
                _limit_memory(memory_mb)
                send(READY, number)
            send([judge(job) for job in jobs], number)


def _limit_memory(memory_mb: int) -> None:
    """Lets the address space grow by `memory_mb` MiB from here."""
    with open("/proc/self/statm", encoding="ascii") as statm:
        pages = int(statm.read().split()[0])
    limit = pages * resource.getpagesize() + (memory_mb << 20)
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def _prepare(job: Job) -> None:
    """Imports what the job needs; it does not count against the memory limit."""
    if isinstance(job, Deferred):
        symbolic.prepare()
    else:
        with suppress(VerifierError):  # `judge` tries again, and says why not
            _function(needed(job), environment=isinstance(job, Step))


def judge(job: Job) -> Result:
    """The job's verdict; an error of the verifier is one too."""
    judged: Judgement | Deferred | bool
    start = time.perf_counter()
    try:
        if isinstance(job, Step):
            outcome = ask(_function(job.environment, environment=True), job.episode)
            return Stepped(outcome=outcome, seconds=time.perf_counter() - start)
        if isinstance(job, Deferred):
            name, judged = "robust", robust.finish(job)
        else:
            name, judged = job.verifier, _function(job.verifier)(job)
    except MemoryError:
        return _failure(job, "memory", start)
    except VerifierError as error:
        return _failure(job, str(error), start, Rule.UNJUDGED)
    except BaseException as error:  # a verifier may fail in any way; the verdict says how, and the pool goes on
        return _failure(job, f"{type(error).__name__}: {error}", start)
    seconds = time.perf_counter() - start
    if fault := fault_of(judged):
        return _failure(job, f"verifier {name!r} {fault}", start)
    if isinstance(judged, Deferred):
        return replace(judged, seconds=seconds)
    given = judged if isinstance(judged, Judgement) else Judgement(accuracy=judged, extracted=None, rule=name)
    text = given.extracted and sendable(given.extracted[:EXTRACTED_LIMIT])
    rule = sendable(given.rule[:EXTRACTED_LIMIT])
    return Verdict(accuracy=given.accuracy, extracted=text, rule=rule, seconds=seconds)


def _failure(job: Job, reason: str, start: float, rule: str = "") -> Verdict | Stepped:
    seconds, reason = time.perf_counter() - start, sendable(reason[:_ERROR_LIMIT])
    if isinstance(job, Step):
        return Stepped(seconds=seconds, error=reason, unjudged=rule == Rule.UNJUDGED)
    return Verdict(accuracy=False, extracted=None, rule=rule, seconds=seconds, error=reason)


if __name__ == "__main__":
    main()
