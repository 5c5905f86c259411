"""What was learnt: each prompt over its groups; how held-out accuracy follows compute (ScaleRL, arXiv 2510.13786)."""

from collections.abc import Mapping, Sequence
from itertools import accumulate

import numpy as np

from megatron_dapo.monitor.statistics import WAYS, Z95, Estimate
from megatron_dapo.report.source import Run
from megatron_dapo.storage.ledger import Event, LedgerError, effective_events, read_ledger

HARDEST, LAST = 10, 12
JUDGED = (Event.TRAINED, Event.FILTERED, Event.CHECKPOINT, Event.RESUMED)
"""Events that tell which groups were decided and stand."""

POINTS = 8
"""Fewer measurements after the first one do not tell three parameters."""

FORECAST_WIDTH = 0.05
"""Half of the widest interval that is still called a forecast."""


def groups_by_prompt(run: Run) -> dict[int, list[int]]:
    """Prompt -> right responses in each of its groups that was decided, oldest first, by the ledger's events that
    stand. Ledgers of older versions name positions alone."""
    path = run.path / "ledger.jsonl"
    try:
        events = effective_events(read_ledger(path, JUDGED)) if path.exists() else []
    except (LedgerError, KeyError, TypeError, OSError) as error:
        run.notes.append(f"{path.name} cannot be read: {error}")
        return {}
    groups: dict[int, list[int]] = {}
    for event in events:
        row, right = event.get("row"), event.get("correct")
        if event.get("event") in (Event.TRAINED, Event.FILTERED) and isinstance(row, int) and isinstance(right, int):
            groups.setdefault(row, []).append(right)
    return groups


def prompt_kinds(groups: Mapping[int, Sequence[int]]) -> dict[str, int]:
    """How many prompts are of each kind, by the right responses in each of their groups.

    Example: 0, 4 is newly solved; 4, 0 is forgotten; 0, 0 is never solved.
    """
    every, again = groups.values(), [right for right in groups.values() if len(right) > 1]
    return {
        "asked": len(every),
        "never solved": sum(not any(right) for right in every),
        "asked again": len(again),
        "newly solved: none right at first, some at last": sum(not right[0] and right[-1] > 0 for right in again),
        "forgotten: some right before, none at last": sum(any(right[:-1]) and not right[-1] for right in again),
    }


def hardest(groups: Mapping[int, Sequence[int]], run: Run) -> list[list[str]]:
    """[prompt, right responses in its last groups] of the prompts with the fewest over all groups, those asked most
    often first. A prompt is named by its place in its file, where a kept sample tells it."""
    places = {line["row"]: line.get("place") for line in run.samples if isinstance(line.get("row"), int)}
    rows = sorted(groups, key=lambda row: (np.mean(groups[row]), -len(groups[row]), row))[:HARDEST]
    return [
        [str(places.get(row) or f"prompt {row} of the set"), ", ".join(map(str, groups[row][-LAST:]))] for row in rows
    ]


def fit_scaling(hours: np.ndarray, accuracy: np.ndarray, start: float) -> dict[str, Estimate] | str:
    """R(C) = R_0 + (A - R_0) / (1 + (C_mid / C)^B), by least squares: A, B, C_mid, and the accuracy at 2, 4, 8 and 16
    times the hours as far as it is forecast. 95% intervals by the profile likelihood. A text says why there is none.

    Args:
        hours: [n] C of each measurement, above 0, increasing.
        accuracy: [n] R, in [0, 1].
        start: R_0, measured before training.
    """
    freedom = len(hours) - 3
    if len(hours) < POINTS:
        return (
            f"{len(hours)} measurements of held-out accuracy after the first; a fit needs {POINTS} (evaluation.every)"
        )
    student = Z95 + (Z95**3 + Z95) / (4 * freedom) + (5 * Z95**5 + 16 * Z95**3 + 3 * Z95) / (96 * freedom**2)
    gain, ends = accuracy - start, [(0.005, max(1 - start, 0.01)), (hours[0] / 4, 30 * hours[-1]), (0.25, 8.0)]
    total = middle = exponent = errors = likely = np.zeros(0)
    for _ in range(2):  # all there is, then closely where the errors are small
        total, middle, exponent = np.meshgrid(*(np.geomspace(*end, 100) for end in ends), indexing="ij")
        shapes = 1 / (1 + (middle[0, :, :, None] / hours) ** exponent[0, :, :, None])
        errors = total**2 * (shapes**2).sum(-1) - 2 * total * (shapes @ gain) + (gain**2).sum()
        # A perfect fit leaves rounding.
        likely = errors <= max(errors.min(), 1e-12) * (1 + student**2 / freedom)
        if likely[-1].any() or middle[likely].max() > hours[-1]:
            return f"accuracy over {hours[-1]:.3g} h does not show yet where it will end"
        ends = [(each[likely].min() / 1.15, each[likely].max() * 1.15) for each in (total, middle, exponent)]
    best = errors.argmin()

    def estimate(values: np.ndarray) -> Estimate:
        kept = values[likely]
        return Estimate(value=values.flat[best].item(), low=kept.min().item(), high=kept.max().item())

    values = {"A": estimate(start + total), "B": estimate(exponent), "C_mid": estimate(middle)}
    for times in (2, 4, 8, 16):
        later = estimate(start + total / (1 + (middle / (times * hours[-1])) ** exponent))
        if later.high - later.low > 2 * FORECAST_WIDTH:
            break
        values[f"at {times} x the hours"] = later
    return values


def scaling(run: Run) -> tuple[str, dict[str, Estimate]] | str:
    """What was measured, and `fit_scaling` of it over the hours of rollout steps without their evaluations."""
    way = next((way for way in WAYS if "before" in run.held_out.get(way, {})), None)
    if way is None:
        return "accuracy before training was not measured"
    hours = accumulate((line.get("timing/step") or 0) - (line.get("timing/evaluation") or 0) for line in run.lines)
    points = [(at / 3600, line.get(f"evaluation/{way}")) for at, line in zip(hours, run.lines, strict=True)]
    measured = np.array([point for point in points if point[0] > 0 and point[1] is not None]).reshape(-1, 2)
    before = run.held_out[way]["before"]
    fit = fit_scaling(measured[:, 0], measured[:, 1], before.accuracy)
    start = Estimate(value=before.accuracy, low=before.low, high=before.high)
    about = f"{way.capitalize()} answers, {len(measured)} measurements in {measured[:, 0].max(initial=0):.3g} hours"
    return fit if isinstance(fit, str) else (about, {"R_0": start, **fit})
