"""`megatron-dapo` whose coordinator looks late at ranks that gave no answer, as on a busy machine."""

import asyncio

from megatron_dapo.cli.main import main
from megatron_dapo.cli.train import prepare_environment

LATE_S = 15.0


def look_late() -> None:
    from megatron_dapo.cluster.trainer import Trainer

    states = Trainer._states

    async def late(self: Trainer) -> str:
        await asyncio.sleep(LATE_S)
        return await states(self)

    Trainer._states = late  # type: ignore[method-assign]


if __name__ == "__main__":
    prepare_environment()  # Ray reads its settings when it is imported
    look_late()
    main()
