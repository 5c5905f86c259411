"""What the plan says of a job before it is queued: whether it fits, how long saving takes, what a lost job costs."""

from megatron_dapo.config import Config, ConfigError
from megatron_dapo.plan.planner import make_plan
from megatron_dapo.plan.scenario import Scenario, load_calibration, model_dimensions
from megatron_dapo.plan.step_plan import StepPlan

LEAST_WARN_S = 600
MARGIN = 1.5
"""The plan is a model, and the warning may come a minute late."""


def warning_and_notes(config: Config, warn_s: int | None, limit: int | None, *, gpus: bool) -> tuple[int, list[str]]:
    """(seconds before the time limit at which the run is told to save, what the user should know).

    Args:
        warn_s: what the user asks for; None: `MARGIN` times what the plan says.
        limit: seconds of one job; None: without.
        gpus: whether the run is on GPUs: the plan knows nothing else.
    """
    unknown = f"--warn is {LEAST_WARN_S}, and should be longer than an update and a checkpoint"
    try:
        if not gpus:
            raise ConfigError("it knows GPUs only")
        plan = make_plan(Scenario(config, model_dimensions(config.model.path)[0], load_calibration()))
    except ConfigError as error:
        return warn_s or LEAST_WARN_S, [] if warn_s else [f"no plan of this run ({error}): {unknown}"]
    if plan.step is None:
        parts = [f"{m.part}, {m.what}: needs {m.needed / 1e9:.0f} of {m.there / 1e9:.0f} GB" for m in plan.misfits]
        return warn_s or LEAST_WARN_S, [f"`megatron-dapo plan` says that this run does not fit: {'; '.join(parts)}"]
    seconds, step_h, run = saving_seconds(plan.case, plan.step), plan.step.seconds / 3600, config.run
    every, minutes = run.checkpoint_every or run.rollout_steps, run.checkpoint_minutes
    lost_h = min(every, max(1, minutes / 60 // step_h) if minutes else every) * step_h
    notes = []
    if warn_s and warn_s < seconds:
        notes.append(f"--warn {warn_s}: by the plan update and checkpoint take {seconds:.0f} s; raise it")
    if lost_h > max(1, step_h):
        notes.append(f"run.checkpoint_every, checkpoint_minutes: by the plan a lost job costs up to {lost_h:.1f} hours")
    warn_s = warn_s or min(65535, max(LEAST_WARN_S, int(MARGIN * seconds)))  # no more than Slurm takes
    if limit and limit - warn_s < plan.step.seconds:
        notes.append(f"--time: by the plan a step takes {step_h:.1f} hours; jobs end in rollouts, and go on there")
    return warn_s, notes


def saving_seconds(case: Scenario, step: StepPlan) -> float:
    """From a warning at the worst time, the end of a rollout, to the end of the checkpoint. An earlier one may be under
    way; both are taken to be written at the rate of one process. Before that end the update is not waited for, and what
    the rollout has, 16 bytes a token, is written in less time than it takes."""
    writing = case.checkpoint_bytes / case.constants.disk_write
    return step.log_prob_s + step.update_s + step.sync_s + 2 * (step.handover_s + writing)
