"""The Megatron ranks as the coordinator sees them: Ray actors, one process a rank, all called together."""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import ray
from ray.exceptions import RayActorError, RayError

from megatron_dapo.actor import step_data
from megatron_dapo.actor.model.hf_config import HFModelConfig
from megatron_dapo.actor.packing import plan_for_actor
from megatron_dapo.actor.step_data import LogProbs, MiniBatch, Responses, UpdateMetrics
from megatron_dapo.algorithm.policy_loss import Objective
from megatron_dapo.cluster.placement import Placement, by_node_and_gpu
from megatron_dapo.cluster.trainer_rank import WAITS, GpuMemory, TrainerRank, read_count, state_of, write_count
from megatron_dapo.cluster.waits import LOOK_DEADLINE_S, Stalled, Waits
from megatron_dapo.config.root import Config
from megatron_dapo.monitor.console import Count
from rollout.weights.checksums import Checksums
from rollout.weights.sender import Sent
from rollout.weights.transport import SendRequest
from rollout.wire.client import ServerInfo

T = TypeVar("T")

WATCH_INTERVAL_S = 1.0
"""Between two looks at whether every rank still lives."""

DEATH_SHOWS_S = 3.0
"""After an error of a rank, time for the death of another rank to become known."""


class TrainerError(RuntimeError):
    """A trainer rank failed. The message holds the rank and its own error."""

    exit_code = 6


class TrainerLost(TrainerError):
    """The process of a rank has ended; the run can start again from the last checkpoint."""


class Diverged(TrainerError):
    """The loss or the gradient is not a finite number any more."""

    exit_code = 3


class CheckpointUnreadable(TrainerError):
    """A file of the checkpoint that the ranks were to load is missing or damaged."""


class TrainerStalled(Stalled):
    """The ranks did not answer in time, and will not answer another call either."""


class Trainer:
    """All ranks of the actor. Every call goes to every rank; the answer of an update or a pass is rank 0's."""

    def __init__(self, config: Config, model: HFModelConfig, run_dir: Path, waits: Waits, *, use_gpu: bool) -> None:
        self._config, self._model, self._run_dir, self._waits = config, model, run_dir, waits
        self.on_gpu = use_gpu
        self.weight_changes = 0
        """Grows with every call that changes the weights, when it is made."""
        self.recorded_step: int | None = None
        """Rollout step whose calls the ranks write into the timeline."""
        self.gpus: tuple[str, ...] = ()
        """Each rank's GPU on its node, once they have started; empty names on the CPU."""
        self._ranks: list[Any] = []
        self._homes: list[tuple[dict[str, Any], int]] = []
        """Ray's options for each rank's place, and its process id, once they have started."""
        self._watch: asyncio.Task[None] | None = None

    async def start(self, placement: Placement) -> dict[str, Any]:
        """Build all ranks in their places. Returns rank 0's description.

        Raises:
            TrainerError: a rank failed, or on a GPU its first forward; `TrainerLost`: its process ended meanwhile.
        """
        config, deadline = self._config, self._config.run.start_deadline_s
        # Past every deadline for the ranks and the look at them: one that has left its collective waits for nobody any
        # more. Twice the look, as the coordinator's clock begins later.
        timeout_s = max(deadline, config.run.step_deadline_s) + 2 * LOOK_DEADLINE_S
        remote = ray.remote(TrainerRank)
        fixed: dict[str, Any] = {"num_cpus": 1, "num_gpus": int(self.on_gpu), "max_restarts": 0}
        given = self._run_dir, config.actor.threads
        self._ranks = [remote.options(**fixed, **placement.at(each)).remote(*given) for each in placement.trainer]
        # Which GPU of a node a process gets is Ray's choice, so it gets its number after that.
        places = await self._all_of("start", deadline, [rank.place.remote() for rank in self._ranks])
        order = by_node_and_gpu([(node, gpu) for node, gpu, *_ in places])
        self._ranks, self.gpus = [self._ranks[at] for at in order], tuple(places[at][1] for at in order)
        self._homes = [(placement.at(placement.trainer[at]), places[at][3]) for at in order]
        rendezvous = places[order[0]][2]
        built = [rank.build.remote(config, at, rendezvous, timeout_s) for at, rank in enumerate(self._ranks)]
        described, *_ = await self._all_of("build", deadline, built)
        self._watch = asyncio.create_task(self._until_lost())
        if self.on_gpu:  # a forward of the longest sequences: what is broken or does not fit fails now, not hours later
            # Of many kinds of tokens, as experts expect.
            ids = np.arange(config.longest_prompt + config.longest_continuation) % self._model.vocab_size
            await self.log_probs(Responses.of([(ids[:1], ids[1:])] * config.actor.layout.data), temperature=1.0)
        return described

    async def log_probs(self, responses: Responses, temperature: float, *, reference: bool = False) -> LogProbs:
        """Log-probs and entropies of every response token, at `temperature`, under the current weights.

        `reference`: under the reference's.
        """
        plan = plan_for_actor(responses.sequence_lengths, self._config.actor, hidden_size=self._model.hidden_size)
        asked = replace(responses, routing=None) if reference else responses, plan, temperature
        if reference:
            return await self._everyone("reference_log_probs", lambda rank: rank.actor.reference_log_probs(*asked))
        return await self._everyone("log_probs", lambda rank: rank.actor.log_probs(*asked))

    async def update(self, batches: list[MiniBatch], objective: Objective, temperature: float) -> list[UpdateMetrics]:
        """One optimizer step a mini-batch, in order, of responses that were drawn at `temperature`."""
        self.weight_changes += 1
        write_count(self._run_dir, 0, len(batches))
        given = objective, temperature
        return await self._everyone("update", lambda rank: rank.actor.update(rank.counted(batches), *given))

    async def reset_reference(self, *, optimizer: bool) -> None:
        """The current weights become the reference; `optimizer`: its moments begin anew."""
        await self._everyone("reset_reference", lambda rank: rank.actor.reset_reference(optimizer=optimizer))

    async def load_reference(self, folder: Path) -> None:
        """The reference becomes the weights in `folder`, in Hugging Face format."""
        await self._everyone("load_reference", lambda rank: rank.actor.load_reference(folder))

    async def device_memory(self) -> list[GpuMemory]:
        """Each rank's GPU now; nothing on the CPU."""
        found = await self._each("memory", lambda rank: rank.device_memory())
        return [memory for memory in found if memory is not None]

    async def suspend_communicators(self) -> None:
        """Servers get NCCL's memory with `actor.offload.communicators`, until the next call that all ranks make."""
        if self._config.actor.offload.communicators:
            await self._each("communicators", lambda rank: rank.actor.communicators.suspend())

    async def export_hf(self, folder: Path) -> None:
        """Write the weights in Hugging Face format."""
        await self._everyone("export_hf", lambda rank: rank.actor.export_hf(folder))

    async def write_weights(self, folder: Path, kinds: Sequence[ServerInfo]) -> dict[ServerInfo, Checksums]:
        """Write the weights in Hugging Face format; the checksums that each kind of server must have of them."""
        return await self._everyone("write", lambda rank: rank.weights.write(folder, kinds))

    async def send_weights(self, request: SendRequest, kinds: Sequence[ServerInfo]) -> Sent:
        """Send the weights to servers that are paused, and compute the same checksums."""
        return await self._everyone("send", lambda rank: rank.weights.send(request, kinds))

    async def save_checkpoint(self, folder: Path) -> None:
        await self._everyone("save_checkpoint", lambda rank: rank.actor.save_checkpoint(folder))

    async def begin_checkpoint(self, folder: Path) -> bool:
        """Returns when everything is copied, whether it is still to be written; `finish_checkpoint` follows."""
        return await self._everyone("begin_checkpoint", lambda rank: rank.actor.begin_checkpoint(folder))

    async def checkpoint_finished(self) -> bool:
        """Whether the checkpoint that was begun is whole."""
        # Asked again and again while one is written, also while servers write: no part of a timeline.
        return (await self._each("finish_checkpoint", lambda rank: rank.actor.finish_checkpoint(wait=False)))[0]

    async def load_checkpoint(self, folder: Path) -> None:
        self.weight_changes += 1
        await self._everyone("load_checkpoint", lambda rank: rank.actor.load_checkpoint(folder))

    async def close(self) -> None:
        """End every rank. Never raises: it is called on the way out."""
        if self._watch is not None:
            self._watch.cancel()
        for rank in self._ranks:
            ray.kill(rank)
        self._ranks = []

    async def _everyone(self, name: str, call: Callable[[TrainerRank], T | None]) -> T:
        """Rank 0's answer to a call that all ranks make, and write into the timeline as `name`. Not while servers have
        the ranks' GPUs."""

        def collective(rank: TrainerRank) -> T | None:
            rank.actor.communicators.resume()
            return call(rank)

        return (await self._each(name, collective, self.recorded_step))[0]

    async def _each(self, name: str, call: Callable[[TrainerRank], Any], step: int | None = None) -> list[Any]:
        """All ranks' answers. The call travels by value, with all that it refers to; so it must not refer to `self`."""
        shared = ray.put(call)
        calls = [rank.perform.remote(name, step, shared) for rank in self._ranks]
        return await self._all_of(name, self._config.run.step_deadline_s, calls)

    async def _all_of(self, what: str, deadline_s: float, calls: list[Any]) -> list[Any]:
        """All ranks' answers; the first failure ends the wait, since the others then wait in vain."""
        what, owner = f"trainer {what}", f"{len(calls)} trainer rank(s)"
        answers = [asyncio.ensure_future(call) for call in calls]
        first = asyncio.wait(answers, return_when=asyncio.FIRST_EXCEPTION)

        def count() -> Count:
            if what == "trainer update":
                return Count(*read_count(self._run_dir), "mini-batches")
            return Count(sum(answer.done() for answer in answers), len(answers), "ranks")

        try:
            await self._waits.wait_for(what, owner, deadline_s, first, count=count)
            if reasons := _errors(answers):
                # The loss of one rank shows first as an error of a rank that talked to it.
                raise self._error(what, reasons, await self._dead_ranks(DEATH_SHOWS_S))
            return [answer.result() for answer in answers]
        except Stalled as error:
            silent = ", ".join(str(rank) for rank, answer in enumerate(answers) if not answer.done())
            raise TrainerStalled(f"{error}\nno answer from rank {silent}{await self._states()}") from None
        finally:
            for answer in answers:
                answer.cancel()

    async def _states(self) -> str:
        """A line for each state that ranks are in; those that wait for others stand last."""
        look, ranks = ray.remote(state_of), defaultdict[str, list[str]](list)

        async def ask(rank: int, place: dict[str, Any], pid: int) -> None:
            state = "its node gives no answer"
            with suppress(TimeoutError, RayError):
                asked = look.options(num_cpus=0, **place).remote(self._run_dir, rank, pid)
                state = await asyncio.wait_for(asked, LOOK_DEADLINE_S)
            ranks[state].append(str(rank))

        await asyncio.gather(*(ask(rank, *home) for rank, home in enumerate(self._homes)))
        ordered = sorted(ranks, key=lambda state: (state.startswith(WAITS), len(ranks[state])))
        return "".join(f"\n  rank {', '.join(sorted(ranks[state], key=int))}: {state}" for state in ordered)

    async def _until_lost(self) -> None:
        """Ends every wait of the run as soon as a rank is gone, also while the ranks have nothing to do.

        A rank answers between two calls; one that is at work lets the question wait.
        """
        while True:
            if dead := await self._dead_ranks(None):
                self._waits.lose(self._error("trainer", dead, dead))
                return
            await asyncio.sleep(WATCH_INTERVAL_S)

    async def _dead_ranks(self, timeout_s: float | None) -> dict[int, BaseException]:
        """Ranks whose process is gone. Returns at the first one, when all have answered, or after `timeout_s`."""
        answers = [asyncio.ensure_future(rank.__ray_ready__.remote()) for rank in self._ranks]
        try:
            await asyncio.wait(answers, timeout=timeout_s, return_when=asyncio.FIRST_EXCEPTION)
            errors = _errors(answers)
        finally:
            for answer in answers:
                answer.cancel()
        return {rank: error for rank, error in errors.items() if isinstance(error, RayActorError)}

    def _error(self, what: str, reasons: dict[int, BaseException], dead: dict[int, BaseException]) -> TrainerError:
        """What a rank said before it died stands in the message."""
        causes = {rank: getattr(error, "cause", None) or error for rank, error in (dead | reasons).items()}
        lines = [f"  rank {rank}: {in_words(cause)}" for rank, cause in causes.items()]
        kind = TrainerError
        if any(isinstance(cause, step_data.NonFiniteUpdateError) for cause in causes.values()):
            kind = Diverged
        elif any(isinstance(cause, step_data.CheckpointDamagedError) for cause in causes.values()):
            kind = CheckpointUnreadable
        elif any(isinstance(e, RayActorError) and not e.actor_init_failed for e in (*reasons.values(), *dead.values())):
            kind = TrainerLost
        return kind(f"{what} failed\n" + "\n".join(lines) + f"\nlogs: {self._run_dir / 'logs'}/trainer-rank*.log")


def _errors(answers: "Sequence[asyncio.Future[Any]]") -> dict[int, BaseException]:
    """Of the ranks that have answered with one."""
    done = {rank: answer.exception() for rank, answer in enumerate(answers) if answer.done()}
    return {rank: error for rank, error in done.items() if error is not None}


def in_words(error: BaseException) -> str:
    """Of Ray's, in a line."""
    if isinstance(error, RayActorError):
        return f"its process ended: {' '.join(str(error).split()).partition(' Some common causes')[0]}"
    return f"{type(error).__name__}: {error}"
