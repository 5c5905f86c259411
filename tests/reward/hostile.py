"""Verifiers that misbehave in every way the pool must survive; named in tests as `tests.reward.hostile:NAME`."""

import ctypes
import os
import signal
import sys
import time
from pathlib import Path

from reward.pool.messages import HEADER
from reward.verdict import Judgement, VerificationRequest


def hang(request: VerificationRequest) -> bool:
    """Burns a core for ever."""
    while True:
        pass


def sleep(request: VerificationRequest) -> bool:
    """Waits the number of seconds that the response holds."""
    time.sleep(float(request.response))
    return True


def hang_in_c(request: VerificationRequest) -> bool:
    """Hangs inside one C call that holds the interpreter lock and hears no signal of Python's."""
    return 7 ** (10**9) == 0


def die(request: VerificationRequest) -> bool:
    """Is killed, as by the out-of-memory killer."""
    os.kill(os.getpid(), signal.SIGKILL)
    return True


def die_once(request: VerificationRequest) -> bool:
    """Dies unless the file that the response names is there; makes it first."""
    mark = Path(request.response)
    if not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return True


def crash(request: VerificationRequest) -> bool:
    """Reads through a null pointer."""
    ctypes.string_at(0)
    return True


def leave(request: VerificationRequest) -> bool:
    """Ends its process."""
    sys.exit(3)


def devour(request: VerificationRequest) -> bool:
    """Takes memory until there is none."""
    hoard = []
    while True:
        hoard.append(bytearray(64 << 20))


def fail(request: VerificationRequest) -> bool:
    """Has a bug."""
    raise KeyError(request.response)


def halves(request: VerificationRequest) -> Judgement:
    """Says what cannot be sent as UTF-8, and too much of it."""
    return Judgement(accuracy=True, extracted="\ud83d" + "x" * 1_000_000, rule="\ud83d")


def babble(request: VerificationRequest) -> bool:
    """Writes to whatever it can reach."""
    for stream in (1, 2):
        os.write(stream, b"\x00\x00\x00\x00\x00\x00\x00\x05" * 1000)
    return True


def confused(request: VerificationRequest) -> str:
    """Returns something that is no verdict."""
    return "correct"


def score(request: VerificationRequest) -> Judgement:
    """Gives points where the paper asks for right or wrong: the filter would count 0.7 of a response."""
    return Judgement(accuracy=0.7, extracted=None, rule="own")  # type: ignore[arg-type]


def judge(request: VerificationRequest) -> Judgement:
    """Behaves."""
    right = request.response == request.ground_truth
    return Judgement(accuracy=right, extracted=request.response, rule="own")


def write_much(request: VerificationRequest) -> bool:
    """Sends a frame of as many bytes as the response says."""
    return _write_to_the_pool(bytes(int(request.response)))


def write_to_the_pool(request: VerificationRequest) -> bool:
    """Sends frames of its own over every descriptor, as if it were the worker."""
    return _write_to_the_pool(request.response.encode())


def _write_to_the_pool(frame: bytes) -> bool:
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        try:
            os.write(descriptor, HEADER.pack(len(frame), 0) + frame)
        except OSError:
            continue
    return False
