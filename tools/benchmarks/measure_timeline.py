"""What a recorded rollout step costs a trainer rank: the actor's update with its timeline over the same without.

    python -m tools.benchmarks.measure_timeline

One process, one thread, the quickstart's base, small micro-batches (the more of them, the more there is to record).
Both ways take turns, and each turn gives one ratio of the process's CPU seconds; the median and the quartiles are
printed.
"""

import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from megatron_dapo.algorithm.policy_loss import PolicyObjective
from megatron_dapo.cluster.trainer_rank import RankTimeline
from megatron_dapo.diagnostics.rank_pool import RankPlace
from tools.benchmarks.actor_update import QUICKSTART, Lengths, actor_config, spread, start

TURNS = 41
WARM_UP = 3


def main(turns: int = TURNS) -> None:
    """Print one line."""
    lengths = Lengths(responses=32, shortest=24, longest=128)
    with tempfile.TemporaryDirectory() as folder:
        place = RankPlace(rank=0, world_size=1, rendezvous=f"file://{folder}/meet")
        actor, batch = start(place, QUICKSTART, lengths, actor_config(micro_batch_tokens=256, threads=1))
        timeline = RankTimeline(Path(folder), actor)

        def seconds(around: AbstractContextManager[None]) -> float:
            began = time.process_time()
            with around:
                actor.update([batch], PolicyObjective(), 1.0)
            return time.process_time() - began

        def ratios() -> Iterator[float]:
            for turn in range(WARM_UP + turns):
                recorded = seconds(timeline.call(turn, "update"))
                yield recorded / seconds(nullcontext())

        measured = list(ratios())[WARM_UP:]
        actor.close()
    passes = 2 * batch.plan.micro_batches_per_rank
    print(f"recorded / plain, with quartiles: {spread(measured, 3)}, {passes} passes an update")


if __name__ == "__main__":
    main()
