"""What a checkpoint holds beside the trainer's own files: counters, pass rate and the carried groups."""

from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_dapo.algorithm.dynamic_sampling import PassRate
from megatron_dapo.coordinator.sampler import SamplerState
from megatron_dapo.storage.group_files import GroupFileError, load_groups, save_groups


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """Where the run stands after `rollout_step` steps."""

    rollout_step: int
    optimizer_step: int
    weight_version: int
    sampler: SamplerState


def save_progress(progress: Progress, folder: Path) -> None:
    """Write `progress.json` and `progress.npz` into `folder`."""
    extra = {
        "rollout_step": progress.rollout_step,
        "optimizer_step": progress.optimizer_step,
        "weight_version": progress.weight_version,
        "cursor": progress.sampler.cursor,
        "pass_rate": asdict(progress.sampler.pass_rate),
    }
    save_groups(folder, "progress", progress.sampler.carried, extra)


def load_progress(folder: Path) -> Progress:
    """Read back what `save_progress` wrote, equal in every bit.

    Raises:
        GroupFileError: a file is missing or damaged.
    """
    carried, extra = load_groups(folder, "progress")
    try:
        return Progress(
            rollout_step=extra["rollout_step"],
            optimizer_step=extra["optimizer_step"],
            weight_version=extra["weight_version"],
            sampler=SamplerState(cursor=extra["cursor"], pass_rate=PassRate(**extra["pass_rate"]), carried=carried),
        )
    except (KeyError, TypeError) as error:
        raise GroupFileError(f"{folder / 'progress.json'}: written by another version ({error})") from None
