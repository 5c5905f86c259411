"""Host memory of a load: what a rank's largest resident set grows by while its model is built and filled.

python -m tests.actor.weights.measure_load > table.md        (docs/measurements.md)

A random model of 2.3 GiB (bfloat16, several files) is written to a temporary folder and loaded by the actor's own
loader on the ranks of a few layouts, all on the CPU. Bound: the rank's weights + the model's largest tensor + 0.5 GiB.
Exit code 1: a rank was above it.
"""

import math
import tempfile
from pathlib import Path

import typer

from megatron_dapo.config.actor_config import ActorConfig, LayoutConfig
from tests.actor.peak_memory import begin_peak, peak_resident
from tests.benchmarks.random_model import write_random_model
from tools.rank_pool import RankPlace, RankPool

GIB = 2**30
SLACK = 0.5 * GIB
LAYOUTS = (LayoutConfig(), LayoutConfig(tensor=2), LayoutConfig(pipeline=2))


def main(folder: Path | None = None) -> None:
    """Print a row a rank; exit code 1 if one was above its bound. FOLDER: where the temporary model goes."""
    worst = 0.0
    print("| layout | rank | weights, GiB | largest tensor, GiB | peak, GiB | bound, GiB |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(dir=folder) as name:
        model = Path(name)
        write_random_model(model)
        for layout in LAYOUTS:
            # Fresh processes each: what an allocator kept of one load would hide the next one's growth.
            with RankPool() as pool:
                for rank, row in enumerate(pool.run(layout.world_size, load, model, layout, timeout_s=600)):
                    weights, largest, peak = row
                    bound = weights + largest + SLACK
                    worst = max(worst, peak / bound)
                    cells = " | ".join(f"{size / GIB:.2f}" for size in (weights, largest, peak, bound))
                    print(f"| TP{layout.tensor} PP{layout.pipeline} | {rank} | {cells} |", flush=True)
    raise typer.Exit(int(worst > 1))


def load(place: RankPlace, folder: Path, layout: LayoutConfig) -> tuple[int, int, int]:
    """(bytes of this rank's weights, of the model's largest tensor, growth of the peak) of one load."""
    from megatron_dapo.actor.device import prepare

    device = prepare("cpu")
    from megatron_dapo.actor.device import process_groups
    from megatron_dapo.actor.model.hf_config import HFModelConfig
    from megatron_dapo.actor.model.model_chunks import build_model
    from megatron_dapo.actor.weights.hf_weights import load_hf_weights
    from megatron_dapo.actor.weights.model_tensors import hf_shapes

    process_groups.initialise(
        layout,
        rank=place.rank,
        world_size=place.world_size,
        rendezvous=place.rendezvous,
        device=device,
        timeout_s=600,
        seed=0,
    )
    hf = HFModelConfig.load(folder)
    before = begin_peak()
    chunks = build_model(hf, ActorConfig(layout=layout), "bfloat16", device)
    load_hf_weights(chunks, hf, folder)
    peak = peak_resident() - before
    weights = sum(parameter.nbytes for chunk in chunks for parameter in chunk.parameters())
    return weights, 2 * max(math.prod(shape) for shape in hf_shapes(hf).values()), peak


if __name__ == "__main__":
    typer.run(main)
