"""One Megatron rank as the body of a Ray actor, and its part of the timeline."""

import faulthandler
import gc
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import psutil
import ray

from megatron_dapo.config.root import Config
from megatron_dapo.monitor.timeline import SpanFile
from rollout.server.engine import free_port, group_environment

if TYPE_CHECKING:
    from megatron_dapo.actor.actor import MegatronActor

T = TypeVar("T")

GIB = 2**30
MINI_BATCHES = ".mini-batches"
"""In the logs of a run: how many mini-batches of the update under way are done. A rank at work answers no call."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuMemory:
    """A trainer rank's GPU, in bytes."""

    rank: int
    free: int
    total: int
    reserved: int
    """By the rank's own allocator."""

    def line(self) -> str:
        free = f"{self.free / GIB:.1f} of {self.total / GIB:.1f} GiB free"
        return f"rank {self.rank}: {free}, {self.reserved / GIB:.1f} held by the trainer"


WAITS = "waits for other ranks"
WRITING_S = 1.0


def state_of(run_dir: Path, rank: int, pid: int) -> str:
    """In words, where the main thread of a rank of this node stands, equal for ranks that do the same; of one that does
    not say it, as one that is stopped, the state of its process. All stacks come into its log."""
    log = run_dir / "logs" / f"trainer-rank{rank}.log"
    try:
        start = log.stat().st_size
        os.kill(pid, signal.SIGUSR2)
    except (FileNotFoundError, ProcessLookupError):
        return f"its process {pid} on {socket.gethostname()} has not begun or is gone"
    time.sleep(WRITING_S)
    stacks = log.read_bytes()[start:].decode(errors="replace").rpartition("(most recent call first):")[2]
    frames = re.findall(r'File "(.+)", line (\d+) in (\S+)', stacks)
    if not frames:
        return f"{psutil.Process(pid).status()} (process {pid} on {socket.gethostname()})"
    own = [frame for frame in frames if "/megatron_dapo/" in frame[0]]
    places = [f"{name} ({Path(file).name}:{line})" for file, line, name in dict.fromkeys([frames[0], *own[:1]])]
    waits = any(file.endswith("/distributed_c10d.py") for file, *_ in frames)
    return f"{WAITS if waits else 'stands'} in {', called by '.join(places)}"


class TrainerRank:
    """Body of one Ray actor. Everything it prints goes to its own log file."""

    def __init__(self, run_dir: Path, threads: int) -> None:
        self._run_dir = run_dir
        os.environ["OMP_NUM_THREADS"] = str(threads)
        faulthandler.register(signal.SIGUSR2, file=sys.stderr.fileno())

    def place(self) -> tuple[str, str, str, int]:
        """Ray's name of this process's node; its GPU there, as CUDA_VISIBLE_DEVICES knows it, empty on the CPU; a free
        address of the node, for the ranks to meet at; the process's id."""
        context, host = ray.get_runtime_context(), ray.util.get_node_ip_address()
        gpu = next(iter(context.get_accelerator_ids().get("GPU", [])), "")
        # The address is bound only after seconds of imports.
        return context.get_node_id(), gpu, f"tcp://{host}:{free_port(host)}", os.getpid()

    def device_memory(self) -> GpuMemory | None:
        """Of this rank's GPU now; None on the CPU."""
        import torch

        if not torch.cuda.is_initialized():
            return None
        free, total = torch.cuda.mem_get_info()
        return GpuMemory(rank=self._rank, free=free, total=total, reserved=torch.cuda.memory_reserved())

    def build(self, config: Config, rank: int, rendezvous: str, timeout_s: float) -> dict[str, Any]:
        """Join the other ranks as number `rank` and load the model. Returns MegatronActor.describe().

        `timeout_s`: of the ranks' process groups.
        """
        self._rank = rank
        self._log_to_file()
        own_gpus = config.actor.device != "cpu" and config.run.mode != "colocated"
        if group := group_environment(config.rollout, own_gpus=own_gpus):  # before NCCL is used; without it no matter
            # Else torch ends the process minutes after any of its groups has lost a rank; a lost server must not end a
            # rank.
            os.environ.update(group | {"TORCH_NCCL_ENABLE_MONITORING": "0"} | os.environ)
        if config.run.mode != "colocated" and not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
            # Rows differ in length from one mini-batch to the next: memory in pieces of fixed size would be left over
            # unused. Read when torch is imported. Not where servers wait for the memory that a rank gives back.
            os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
        gc.disable()  # what is imported stays; to look at it again and again takes a quarter of the imports' time
        from megatron_dapo.actor.actor import MegatronActor

        self.actor = MegatronActor(
            config.actor,
            config.model,
            rank=rank,
            world_size=config.actor.layout.world_size,
            rendezvous=rendezvous,
            steps_per_rollout=config.algorithm.mini_batches_per_step,
            seed=config.run.seed,
            timeout_s=timeout_s,
            keep_reference=config.algorithm.kl.coefficient > 0,
        )
        from megatron_dapo.cluster.rank_weights import RankWeights  # imports Megatron, which the actor prepares

        bucket, quantization = config.rollout.sync_bucket_mb << 20, config.rollout.quantization_config
        self.weights = RankWeights(self.actor, bucket_bytes=bucket, quantization=quantization)
        self._timeline = RankTimeline(self._run_dir, self.actor)
        gc.collect()
        gc.freeze()
        gc.enable()
        return self.actor.describe()

    def perform(self, name: str, recorded_step: int | None, call: "Callable[[Self], T]") -> T:
        """What `call` returns; with `recorded_step` its spans are written down as that rollout step's, as `name`."""
        with nullcontext() if recorded_step is None else self._timeline.call(recorded_step, name):
            return call(self)

    def counted(self, mini_batches: Sequence[T]) -> Iterator[T]:
        """The same, and rank 0 writes down how many are done."""
        for done, mini_batch in enumerate(mini_batches):
            if self._rank == 0:
                write_count(self._run_dir, done, len(mini_batches))
            yield mini_batch

    def _log_to_file(self) -> None:
        log = self._run_dir / "logs" / f"trainer-rank{self._rank}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as file:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
                os.dup2(file.fileno(), stream.fileno())


def write_count(run_dir: Path, done: int, total: int) -> None:
    """For who shows it: not written, it does no harm."""
    with suppress(OSError):
        (run_dir / "logs" / MINI_BATCHES).write_text(f"{done} {total}")


def read_count(run_dir: Path) -> tuple[int, int]:
    """(done, total); zeros as long as nothing can be read."""
    with suppress(OSError, ValueError):  # while it is written, it is empty
        done, total = map(int, (run_dir / "logs" / MINI_BATCHES).read_text().split())
        return done, total
    return 0, 0


class RankTimeline:
    """Writes `timeline/rank<N>.jsonl`."""

    def __init__(self, run_dir: Path, actor: "MegatronActor") -> None:
        self._actor = actor
        chunks = len(actor.optimizer.chunks)  # that each micro-batch passes on this rank
        about = {"rank": actor.rank, "stages": actor.config.layout.pipeline, "chunks": chunks}
        self._file = SpanFile(run_dir, f"rank{actor.rank}", about | actor.place())

    @contextmanager
    def call(self, step: int, method: str) -> Iterator[None]:
        """Record what runs inside as rollout step `step`'s call of `method`."""
        import torch

        self._file.begin(step)
        on_cuda = self._actor.device.device.type == "cuda"
        if on_cuda:
            torch.cuda.reset_peak_memory_stats()
        began = time.time()
        with self._actor.timed() as clock:
            yield
        passes = clock.times()
        peak = {"peak_bytes": torch.cuda.max_memory_allocated(), "memory": "device"} if on_cuda else {}
        self._file.add("calls", method, began, time.time(), **peak)
        tokens = max((about.get("tokens", 0) for *_, about in passes), default=0)
        began = time.time()
        if method == "update" and tokens and (measured := self._actor.time_tensor_parallel(tokens)) is not None:
            self._file.add("probe", "all-reduce", began, time.time(), **measured)
        for name, start, end, about in passes:
            self._file.add(method, name, start, end, **about)
        self._file.write()
