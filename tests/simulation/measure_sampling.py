"""Ways to fill a batch with useful groups, compared in virtual time: tokens, wall-clock, bias, staleness.

python -m tests.simulation.measure_sampling --json figures.json > table.md        (docs/measurements/sampling.md)

Batches are filled one after the other on modelled servers, each policy on the same prompts; between two batches lie
the training and the new weights. Ours is the product's own sampler, in `sync` (no prompt is sent then; what is in
flight goes on, or is given up), in `colocated` (it is interrupted until the new weights are there) and in `async`
(`ahead` groups of the next batches stay in flight).
simulation/modelled_engine.py states the model of a server, simulation/policies.py the other policies,
megatron_dapo/plan/rollout.py the lengths and verdicts.
"""

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_dapo.config.algorithm_config import AlgorithmConfig, DynamicSamplingConfig
from megatron_dapo.plan.rollout import Workload
from tests.simulation.modelled_engine import Speed
from tests.simulation.modelled_fleet import Prompts
from tests.simulation.policies import BatchSynchronous, FirstCompleted, Ours
from tests.simulation.sampling_figures import Conditions, Figures, MakePolicy, Reference, measure, reference

YARDSTICK = "batch-synchronous, 3x"
"""What wall-clock is compared with."""

WORKLOAD = Workload(
    mean_response=5200.0,  # before any response is cut off
    sigma=0.9,
    difficulty_share=0.5,
    mean_prompt=200.0,
    pass_rate=0.72,
    longest=20480,
    group_size=16,
)

_COLUMNS = ("policy", "step, s", "times faster", "rollout, s", "tokens, M", "/ least", "aborted, M", "length", "stale")


def policies(wanted: int) -> dict[str, MakePolicy]:
    """By name."""

    def ours(share: float, max_staleness: int, surplus: float, *, hold: bool = False) -> MakePolicy:
        sampling = DynamicSamplingConfig(max_staleness=max_staleness, surplus=surplus)
        config = AlgorithmConfig(
            prompts_per_step=wanted,
            group_size=WORKLOAD.group_size,
            mini_batch_responses=WORKLOAD.group_size,
            dynamic_sampling=sampling,
        )
        return lambda fleet, folder: Ours(fleet, config, folder, ahead=math.ceil(share * wanted), hold=hold)

    def batch_synchronous(factor: float) -> MakePolicy:
        return lambda fleet, _: BatchSynchronous(fleet, wanted, factor)

    def first_completed(factor: float) -> MakePolicy:
        return lambda fleet, _: FirstCompleted(fleet, wanted, factor)

    return {
        YARDSTICK: batch_synchronous(3.0),
        **{f"first completed, {factor:g}x, abort": first_completed(factor) for factor in (1.5, 2.0, 3.0)},
        "ours, sync, defaults": ours(0, 0, DynamicSamplingConfig().surplus),
        "ours, sync, max_staleness 0, surplus 0": ours(0, 0, 0),
        "ours, sync, max_staleness 0, surplus 1": ours(0, 0, 1),
        "ours, sync, max_staleness 1, surplus 0": ours(0, 1, 0),
        "ours, sync, max_staleness 1, surplus 2": ours(0, 1, 2),
        "ours, sync, max_staleness 1, surplus 16": ours(0, 1, 16),
        "ours, sync, max_staleness 1, surplus 24": ours(0, 1, 24),
        "ours, sync, max_staleness 2, surplus 32": ours(0, 2, 32),
        "ours, colocated, max_staleness 1, surplus 16": ours(0, 1, 16, hold=True),
        "ours, colocated, max_staleness 1, surplus 24": ours(0, 1, 24, hold=True),
        "ours, async, ahead N/2, max_staleness 1": ours(0.5, 1, 0),
        "ours, async, ahead N, max_staleness 1": ours(1, 1, 0),
        "ours, async, ahead N, max_staleness 2": ours(1, 2, 0),
        "ours, async, ahead 2N, max_staleness 4": ours(2, 4, 0),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table, a row as soon as it is known."""
    options = _options(arguments)
    conditions = Conditions(
        workload=WORKLOAD,
        speed=Speed(drafted=options.drafted, accepted=options.accepted),
        engines=options.engines,
        slots=options.slots,
        train_s=432.0,
        sync_s=3.0,
        steps=options.steps,
        warm_steps=options.warm_steps,
        seed=options.seed,
    )
    known = reference(Prompts(conditions.workload, conditions.seed))
    least = known.least_tokens(options.prompts)
    print(f"{options.engines} engines x {options.slots} slots, N = {options.prompts}, G = {WORKLOAD.group_size}")
    print(
        f"P(0 < k < G) = {known.useful_share:.3f}; a group has {known.group_tokens:.0f} tokens; least tokens a batch: "
        f"{least / 1e6:.1f} M; useful groups: length {known.useful_length:.0f}\n"
    )
    print(f"| {' | '.join(_COLUMNS)} |\n|{'---|' * len(_COLUMNS)}", flush=True)
    found: dict[str, Figures] = {}
    for name, make in policies(options.prompts).items():
        if options.only in name or name == YARDSTICK:
            found[name] = measure(make, conditions)
            print(_row(name, found[name], found[YARDSTICK], known, least), flush=True)
    if options.json is not None:
        tree = {
            "conditions": dataclasses.asdict(conditions) | {"prompts": options.prompts},
            "reference": dataclasses.asdict(known) | {"least_tokens": least},
            "policies": {name: dataclasses.asdict(figures) for name, figures in found.items()},
        }
        options.json.write_text(json.dumps(tree, indent=2) + "\n", encoding="utf-8")
    return 0


def _row(name: str, figures: Figures, yardstick: Figures, known: Reference, least: float) -> str:
    cells = (
        name,
        f"{figures.step_s:.0f}",
        f"{yardstick.step_s / figures.step_s:.2f}",
        f"{figures.rollout_s:.0f}",
        f"{figures.generated_tokens / 1e6:.1f}",
        f"{figures.generated_tokens / least:.3f}",
        f"{figures.aborted_tokens / 1e6:.1f}",
        f"{figures.length / known.useful_length:.3f}",
        f"{figures.stale_share:.2f}",
    )
    return f"| {' | '.join(cells)} |"


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=512, help="N: useful groups of a batch")
    parser.add_argument("--engines", type=int, default=16)
    parser.add_argument("--slots", type=int, default=128, help="responses that one engine runs at once")
    parser.add_argument("--steps", type=int, default=8, help="that count")
    parser.add_argument("--warm-steps", type=int, default=3, help="before them")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--drafted", type=int, default=1, help="tokens of a response that a decode step checks")
    parser.add_argument("--accepted", type=float, default=1.0, help="of them kept, on average")
    parser.add_argument("--only", default="", help="policies with this in their name, and the first")
    parser.add_argument("--json", type=Path, help="file for all figures")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
