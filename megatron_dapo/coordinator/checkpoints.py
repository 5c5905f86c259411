"""Checkpoints of a run: trainer, sampler and counters together, so that a resumed run knows of every prompt.

A checkpoint is begun at the end of a step and counts as soon as its folder has its final name. In between, the
trainer's ranks write it while the run goes on, one checkpoint at a time. If a file of the checkpoint that a run resumes
from is damaged, the error names the file and the newest intact checkpoint before it.

Between two checkpoints `rollout` of the run directory holds what the rollout under way has drawn: the state of the
sampler in the checkpoint before it, which it belongs to, with finished groups and the tokens of others. A resume
decides the same groups again, and draws only what is missing. It needs no trainer, is written while the run goes on,
and ends with the next checkpoint, or when a run goes on from another.

The KL term's reference, where `algorithm.kl.reset_every` renews it (ProRL, arXiv 2505.24864), stands beside them, in
`references/step_<N>` of the run directory and in Hugging Face format: a checkpoint names the step, and a resume reads
the same weights, bit for bit, into any layout. It is written before the checkpoint of its step: what a kill leaves
without a checkpoint is written again.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from megatron_dapo.actor.checkpoint.checkpoint_files import check_whole, read_manifest, read_state
from megatron_dapo.actor.step_data import CheckpointDamagedError
from megatron_dapo.algorithm.dynamic_sampling import PassRate
from megatron_dapo.cluster.gpu_handover import GpuHandover
from megatron_dapo.cluster.trainer import Diverged, Trainer, TrainerError, TrainerLost, TrainerStalled
from megatron_dapo.cluster.waits import Stalled, StopRequested, Waits
from megatron_dapo.config.actor_config import ActorConfig
from megatron_dapo.config.algorithm_config import KLConfig
from megatron_dapo.config.run_config import RunConfig
from megatron_dapo.coordinator.batch import MismatchStop
from megatron_dapo.coordinator.sampler import NothingKept, Refresh, nothing_new
from megatron_dapo.experience.groups import SamplerState, ScoredGroup
from megatron_dapo.monitor.console import Console
from megatron_dapo.monitor.timeline import StepTimer
from megatron_dapo.storage.durable import remove_folder, replace_folder, sync_tree
from megatron_dapo.storage.group_files import GroupFileError, load_groups, save_groups
from megatron_dapo.storage.ledger import Event, Ledger
from megatron_dapo.storage.run_dir import Checkpoint, CheckpointDamaged, RunDir, newest_step

POLL_S = 0.5
"""Between two questions whether the ranks have finished writing."""

READ_FIRST = 4 << 30
"""Bytes of the trainer's files up to which they are compared with their checksums before anything starts: it takes
seconds. The ranks compare them in any case."""

Look = Callable[[], SamplerState]
"""Gives what a rollout has: `coordinator.sampler.DynamicSampler.under_way`."""

GRACE_S = 60.0
"""For a checkpoint under way when a trainer rank fails: the others may wait for that rank, and never answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """Where the run stands after `rollout_step` steps."""

    rollout_step: int
    optimizer_step: int
    weight_version: int
    sampler: SamplerState
    entropy_coefficient: float | None = None
    """Weight of the next step's entropy bonus, where `algorithm.entropy_control` moves it. None: the config's."""
    reference_step: int = 0
    """Rollout step after which the KL term's reference was reset. 0: it holds the weights that the run began with."""


JUDGED = (
    *("reward.verifier", "reward.by_source", "reward.code_reads", "reward.remote.url", "reward.remote_environment.url"),
    *("data.path", "data.schema", "data.verifier_key", "data.source_key", "data.mixture"),
    *("algorithm.overlong.", "algorithm.turn_rewards"),
)
"""Beginnings of keys that verdicts and rewards rest on. Limits are none: they say how long a verdict may take."""

NOT_SAVED = "could not be saved"

COUNTERS = ("rollout_step", "optimizer_step", "weight_version")
CONTROL = ("entropy_coefficient", "reference_step")


def save_progress(progress: Progress, folder: Path) -> None:
    """Write `progress` (.json, .npz) into `folder`, and `unfinished` if there are such groups."""
    sampler = progress.sampler
    if sampler.unfinished:
        save_groups(folder, "unfinished", sampler.unfinished, {})
    extra = {name: getattr(progress, name) for name in (*COUNTERS, *CONTROL)}
    extra |= {name: getattr(sampler, name) for name in ("cursor", "next", "passed_over", "sent_with")}
    extra["pass_rate"] = asdict(sampler.pass_rate)
    extra["unfinished"] = len(sampler.unfinished)
    extra["history"] = [[prompt, step, rates] for prompt, (step, rates) in sampler.history.items()]
    save_groups(folder, "progress", sampler.carried, extra)


def load_progress(folder: Path) -> Progress:
    """Read back what `save_progress` wrote, equal in every bit.

    Raises:
        GroupFileError: a file is missing or damaged.
    """
    carried, extra = load_groups(folder, "progress")
    try:
        history = {prompt: (step, tuple(rates)) for prompt, step, rates in extra["history"]}
        about: dict[str, Any] = {name: tuple(extra[name]) for name in ("passed_over", "sent_with")}
        about |= {"cursor": extra["cursor"], "next": extra["next"], "pass_rate": PassRate(**extra["pass_rate"])}
        unfinished = load_groups(folder, "unfinished")[0] if extra["unfinished"] else ()
        state = SamplerState(carried=carried, history=history, unfinished=unfinished, **about)
        return Progress(**{name: extra[name] for name in (*COUNTERS, *CONTROL)}, sampler=state)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise GroupFileError(f"{folder / 'progress.json'}: written by another version ({error})") from None


async def load_counters(run_dir: RunDir, checkpoint: Checkpoint, config: ActorConfig) -> Progress:
    """What the coordinator keeps in a checkpoint; and the trainer's files are there, and whole if they are small.

    Raises:
        CheckpointDamaged: a file is missing or damaged.
        CheckpointError: another `config` wrote it, with which alone the trainer can read it.
    """
    try:
        actor = checkpoint.folder / "actor"
        if sum((actor / name).stat().st_size for name in read_manifest(actor)) <= READ_FIRST:
            await asyncio.to_thread(check_whole, actor)
        progress = load_progress(checkpoint.folder)
        read_state(actor, optimizer=config.optimizer, lora=config.lora)
        return progress
    except (CheckpointDamagedError, GroupFileError) as error:
        raise await damaged_checkpoint(run_dir, checkpoint, str(error)) from None


def with_rollout(progress: Progress, run_dir: RunDir, changes: Sequence[str], console: Console) -> SamplerState:
    """The sampler's state of `progress`, a checkpoint's, and what was saved of the rollout after it; without anything
    that can be used, the same object.

    Args:
        changes: of the config, as `check_resume` gives them.
    """
    if not run_dir.rollout.exists():
        return progress.sampler
    try:
        saved = load_progress(run_dir.rollout)
        if saved.rollout_step != progress.rollout_step or any(change.startswith(JUDGED) for change in changes):
            raise GroupFileError(f"{run_dir.rollout}: other weights drew it, or other rules judged it")
    except GroupFileError as error:
        console.note(f"{error}; this rollout is drawn again, and nothing else is lost")
        return progress.sampler

    def of_these_weights(group: ScoredGroup) -> bool:
        """Others were published after the rollout, and are lost: what they wrote meanwhile is too."""
        return all((one.generation.weight_versions <= progress.weight_version).all() for one in group.responses)

    finished = zip(saved.sampler.carried, saved.sampler.sent_with, strict=True)
    drawn = tuple(one for one in finished if of_these_weights(one[0]))
    unfinished = tuple(filter(of_these_weights, saved.sampler.unfinished))
    console.note(f"its rollout goes on: {len(drawn)} groups are finished, {len(unfinished)} begun")
    return replace(progress.sampler, unfinished=unfinished, drawn=drawn)


async def damaged_checkpoint(run_dir: RunDir, checkpoint: Checkpoint, reason: str) -> CheckpointDamaged:
    """The error to raise over `checkpoint`. Reads earlier ones whole, the newest first, until one is intact."""
    for earlier in reversed(run_dir.checkpoints()):
        if earlier.step < checkpoint.step:
            with suppress(CheckpointDamagedError, GroupFileError):
                await asyncio.to_thread(load_progress, earlier.folder)
                await asyncio.to_thread(check_whole, earlier.folder / "actor")
                return CheckpointDamaged(reason, earlier.step)
    return CheckpointDamaged(reason, None)


async def reset_reference(trainer: Trainer, run_dir: RunDir, config: KLConfig, step: int, timer: StepTimer) -> bool:
    """If it is time, the weights after rollout step `step` become the reference. Whether it was. Earlier ones that no
    checkpoint names are removed."""
    if config.reset_every is None or step % config.reset_every:
        return False
    run_dir.check_there()
    folder = run_dir.reference(step)
    with timer.measure("checkpoint"):
        await trainer.export_hf(folder)
        await asyncio.to_thread(sync_tree, folder)
        await trainer.reset_reference(optimizer=config.reset_optimizer)
        await asyncio.to_thread(_remove_unnamed, run_dir)
    return True


def _remove_unnamed(run_dir: RunDir) -> None:
    """Later ones than the checkpoints' stay: one that is under way may name them."""
    named = []
    for checkpoint in run_dir.checkpoints():
        with suppress(GroupFileError):
            named.append(load_progress(checkpoint.folder).reference_step)
    for each in (run_dir.path / "references").glob("step_*"):
        step = int(each.name.removeprefix("step_"))
        if step not in named and step < max(named, default=0):
            remove_folder(each)


@dataclass
class Checkpoints(AbstractAsyncContextManager["Checkpoints"]):
    """The run's checkpoints. A context: at its end the checkpoint under way is finished or reported as lost."""

    config: RunConfig
    run_dir: RunDir
    trainer: Trainer
    handover: GpuHandover
    ledger: Ledger
    waits: Waits
    console: Console
    clock: Callable[[], float] = time.monotonic
    refresh: Refresh = nothing_new
    """Before a look at the rollout."""
    _writing: asyncio.Task[None] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._step_ended = self._state_of = self._rollout_of = self.clock()
        """When the last step ended, when the state of the newest checkpoint was reached, when a rollout was saved."""

    def due(self, step: int) -> bool:
        """Whether to begin a checkpoint after `step`, which has just ended. Asked once a step.

        By time, one step ahead: at the end of the next one, taken to be as long, it would be too late.
        """
        now = self.clock()
        every, most = self.config.checkpoint_every, 60 * self.config.checkpoint_minutes
        next_end, self._step_ended = 2 * now - self._step_ended, now
        return bool(every and step % every == 0) or 0 < most < next_end - self._state_of

    async def begin(self, progress: Progress, *, wait: bool) -> Callable[[], Awaitable[None]]:
        """Take what a checkpoint holds; the trainer's weights must be those of `progress`. An earlier one is finished
        first. It counts once what this returns has been called.

        Args:
            wait: until everything is written, whatever the config says.

        Raises:
            TrainerError: this one, or an earlier one, could not be written.
        """
        self._state_of = self.clock()
        await self.finish()
        folder = self.run_dir.aside(self.run_dir.path / "checkpoints" / f"step_{progress.rollout_step}")
        background = self.config.checkpoint_in_background and not wait
        save = self.trainer.begin_checkpoint if background else self.trainer.save_checkpoint
        background = bool(await save(folder / "actor"))
        await asyncio.to_thread(save_progress, progress, folder)  # seconds, with the tokens of a whole batch
        return partial(self._publish, progress, folder, background)

    async def _publish(self, progress: Progress, folder: Path, in_background: bool) -> None:
        """Give it its final name as soon as it is written: from then on a resume starts here.

        The ledger's event comes before the rename: a kill in between leaves an event without a folder, which the next
        resume voids. The other order would leave a folder that the ledger does not know.
        """
        self.ledger.record(Event.CHECKPOINT, **{name: getattr(progress, name) for name in COUNTERS})
        self.ledger.commit()
        self._writing = asyncio.create_task(self._complete(progress.rollout_step, folder))
        if not in_background:
            await self.finish()

    async def finish(self) -> None:
        """Wait for the checkpoint that is under way, if there is one.

        Raises:
            TrainerError: it could not be written. Earlier ones stand.
            Stalled: a rank did not get it written in time.
        """
        if self._writing is not None:
            writing, self._writing = self._writing, None
            await writing

    @asynccontextmanager
    async def kept_on_failure(self, progress: Progress, look: Look, *, updating: bool = False) -> AsyncIterator[None]:
        """Around a part of a step: if it fails or is asked to stop, the state before the step is saved, and with it
        what the rollout has; that also every `run.checkpoint_minutes`.

        Args:
            updating: the body changes weights: the state before can only be there already.
        """
        over = asyncio.get_running_loop().create_future()
        saving = asyncio.create_task(self._save_in_time(progress, look, over))
        try:
            try:
                yield
            finally:  # a save under way is awaited: two would write the same files
                over.set_result(None)
                await saving
        except Exception as failure:
            try:
                if not (updating or isinstance(failure, TrainerError | TrainerStalled)):  # else nobody can
                    await self.save(progress)
                await self._save_rollout(progress, look)
            except Exception as error:
                if isinstance(failure, StopRequested):
                    raise  # "stopped" says that everything is saved
                self.console.note(f"what stood when this step ended {NOT_SAVED} ({type(error).__name__}: {error})")
            if isinstance(failure, MismatchStop | NothingKept):  # its groups would stop the next run too
                self.run_dir.drop_rollout()
            raise  # why the run ends

    async def _save_in_time(self, progress: Progress, look: Look, over: "asyncio.Future[None]") -> None:
        while (every := 60 * self.config.checkpoint_minutes) and not over.done():
            left = every + max(self._state_of, self._rollout_of) - self.clock()
            await asyncio.wait([over], timeout=max(left, POLL_S))
            if not over.done():
                try:
                    await self._save_rollout(progress, look)
                except Exception as error:  # the rollout goes on all the same
                    self.console.note(f"what the rollout has {NOT_SAVED} ({type(error).__name__}: {error})")

    async def _save_rollout(self, progress: Progress, look: Look) -> None:
        """Unless no resume would begin at `progress`."""
        self._rollout_of, deadline = self.clock(), self.config.step_deadline_s
        if newest_step(self.run_dir.path) == progress.rollout_step:
            await self.refresh()
            progress = replace(progress, sampler=look())
            self.ledger.commit()  # an empty one would say that no run began here
            with self.waits.register("save of the rollout", "the disk of run.dir", deadline):
                writing = asyncio.to_thread(self._write_rollout, progress)
                try:  # not `waits.wait_for`: a process that is lost ends that, and no disk needs one
                    await asyncio.wait_for(writing, deadline)
                except TimeoutError:
                    raise Stalled(f"save of the rollout: the disk of run.dir took over {deadline:g} s") from None

    def _write_rollout(self, progress: Progress) -> None:
        aside = self.run_dir.aside(self.run_dir.rollout)
        save_progress(progress, aside)
        replace_folder(aside, self.run_dir.rollout, durable=True)

    async def save(self, progress: Progress) -> None:
        """Save the state between two rollout steps unless it is saved already; before the first step there is none."""
        await self.finish()
        if progress.rollout_step > newest_step(self.run_dir.path):
            await self.handover.to_trainer()
            await (await self.begin(progress, wait=True))()

    async def __aexit__(self, _: object, error: BaseException | None, *__: object) -> None:
        """Never raises: it is called on the way out."""
        if self._writing is None:
            return
        writing, self._writing = self._writing, None
        await asyncio.wait([writing], timeout=self._patience(error))
        writing.cancel()
        (lost,) = await asyncio.gather(writing, return_exceptions=True)
        if lost is not None and lost is not error:
            reason = "the run ended first" if isinstance(lost, asyncio.CancelledError) else lost
            self.console.note(f"the checkpoint that was being written is lost: {reason}")

    def _patience(self, error: BaseException | None) -> float | None:
        """Seconds that the checkpoint under way may take when the run ends with `error`."""
        if isinstance(error, asyncio.CancelledError | TrainerLost | TrainerStalled):
            return 0.0
        # None: its own deadline.
        return GRACE_S if isinstance(error, TrainerError) and not isinstance(error, Diverged) else None

    async def _complete(self, step: int, folder: Path) -> None:
        """Put a checkpoint in its place once it is written. A failure ends whatever the run waits for."""
        # A question that comes while the ranks are at work waits until they are done.
        what, deadline = f"checkpoint of step {step}", 2 * self.config.step_deadline_s
        try:
            await self.waits.wait_for(what, "the trainer ranks' writers", deadline, self._until_written())
            self.run_dir.publish_checkpoint(folder, step)
            await asyncio.to_thread(self.run_dir.keep_newest, self.config.keep_checkpoints)
        except Exception as error:
            self.waits.lose(error)
            raise

    async def _until_written(self) -> None:
        while not await self.trainer.checkpoint_finished():
            await asyncio.sleep(POLL_S)
