"""Processes that tests start often are forks of one that has torch and Megatron-Core imported: each saves seconds."""

import contextlib
import multiprocessing
from multiprocessing import forkserver
from pathlib import Path

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.forked"])


def start() -> None:
    """Before the first of them: what a fork has imported comes from this checkout, wherever the test stands."""
    with contextlib.chdir(Path(__file__).parents[1]):
        forkserver.ensure_running()
