"""`python -m tests.end_to_end.ended_in_rollout HOW STEP ARGUMENTS ...`: megatron-dapo that ends in the middle of STEP's
rollout, with some groups finished: by `kill`, SIGKILL after a save by time, or by `stop`, SIGTERM."""

import os
import signal
import sys
from typing import Any

from megatron_dapo.cli.main import main
from megatron_dapo.cli.train import prepare_environment

FINISHED = 2
"""Groups at the end."""


def end(how: str, step: int) -> None:
    from megatron_dapo.coordinator import checkpoints, sampler

    write, finish, seen = checkpoints.Checkpoints._write_rollout, sampler.DynamicSampler._finish, set[int]()

    def written(self: Any, progress: Any) -> None:
        write(self, progress)
        if how == "kill" and progress.rollout_step == step - 1 and len(progress.sampler.carried) >= FINISHED:
            os.kill(os.getpid(), signal.SIGKILL)

    async def finished(self: Any, position: int, rollout_step: int, weight_version: int) -> Any:
        group = await finish(self, position, rollout_step, weight_version)
        if how == "stop" and rollout_step == step:
            seen.add(position)
            if len(seen) == FINISHED:
                os.kill(os.getpid(), signal.SIGTERM)
        return group

    checkpoints.Checkpoints._write_rollout = written  # type: ignore[method-assign]
    sampler.DynamicSampler._finish = finished  # type: ignore[method-assign]


if __name__ == "__main__":
    prepare_environment()  # Ray reads its settings when it is imported
    end(sys.argv[1], int(sys.argv[2]))
    sys.argv[1:3] = []
    main()
