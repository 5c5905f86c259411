"""What the plan says of a job before it is queued: whether it fits, how long saving takes, what a lost job costs."""

from megatron_dapo.config import Config, ConfigError
from megatron_dapo.plan.planner import Plan, make_plan
from megatron_dapo.plan.rank_state import MASTER_BYTES, MOMENT_BYTES, trained_parameters
from megatron_dapo.plan.scenario import Scenario, load_calibration, model_dimensions

LEAST_WARN_S = 600
MARGIN = 1.5
"""The plan is a model, and the warning may come a minute late."""


def warning_and_notes(config: Config, warn_s: int | None, *, gpus: bool) -> tuple[int, list[str]]:
    """(seconds before the time limit at which the run is told to save, what the user should know).

    Args:
        warn_s: what the user asks for; None: `MARGIN` times what the plan says.
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
        parts = "; ".join(f"{one.part}, {one.what}: needs {one.needed / 1e9:.0f} GB" for one in plan.misfits)
        return warn_s or LEAST_WARN_S, [f"`megatron-dapo plan` says that this run does not fit its GPUs: {parts}"]
    seconds, step_h, run = saving_seconds(plan), plan.step.seconds / 3600, config.run
    every, minutes = run.checkpoint_every or run.rollout_steps, run.checkpoint_minutes
    lost_h = min(every, max(1, minutes / 60 // step_h) if minutes else every) * step_h
    notes = []
    if warn_s and warn_s < seconds:
        killed = "a job killed at its limit is not requeued"
        notes.append(f"--warn {warn_s}: by the plan update and checkpoint take {seconds:.0f} s; {killed}")
    if lost_h > max(1, step_h):
        less = f"with run.checkpoint_minutes=60 up to {max(1, 1 // step_h) * step_h:.1f}"
        keys = f"run.checkpoint_every = {run.checkpoint_every}, run.checkpoint_minutes = {run.checkpoint_minutes:g}"
        notes.append(f"{keys}: by the plan a lost job costs up to {lost_h:.1f} hours; {less}")
    warn_s = warn_s or min(65535, max(LEAST_WARN_S, int(MARGIN * seconds)))  # no more than Slurm takes
    return warn_s, notes


def saving_seconds(plan: Plan) -> float:
    """From a warning at the worst time, the end of a rollout, to the end of the checkpoint. An earlier one may be under
    way; both are taken to be written at the rate of one process."""
    case, step = plan.case, plan.step
    assert step is not None
    trained = trained_parameters(case.hf, case.config.actor.lora)
    writing = trained * (MASTER_BYTES + MOMENT_BYTES + case.dtype_bytes) / case.constants.disk_write
    return step.log_prob_s + step.update_s + step.sync_s + 2 * (step.handover_s + writing)
