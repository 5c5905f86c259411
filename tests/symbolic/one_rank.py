"""One rank of a config, traced: `python -m tests.symbolic.one_rank JOB`, under `stub_environment`.

What is replaced here is replaced in this process alone, which does nothing else.
"""

import dataclasses
import json
import os
import sys
import tempfile
import time
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed import distributed_c10d

from megatron_dapo.actor.model.hf_config import HFModelConfig
from megatron_dapo.config import Config, load_config
from megatron_dapo.config.actor_config import LayoutConfig
from megatron_dapo.plan.memory import row_tokens
from megatron_dapo.plan.scenario import model_dimensions
from rollout.server import end_with
from tests.symbolic import te_layers
from tests.symbolic.findings import RankTrace, Wait
from tests.symbolic.meter import Meter
from tests.symbolic.recording_groups import RecordingGloo, RecordingGroup


def trace_rank(config: Config, rank: int, *, transformer_engine: bool) -> RankTrace:
    """Build the actor of `rank` and take it through log-probs, two updates, a checkpoint's plan and the export."""
    start = time.monotonic()
    meter = RecordingGroup.meter = Meter()
    hf = model_dimensions(config.model.path)[0]
    _replace_torch(meter, hf, config.actor.layout)
    if transformer_engine:
        te_layers.install()
    else:
        sys.modules["transformer_engine"] = None  # type: ignore[assignment]  # as if it were not installed
    from megatron_dapo.actor import device

    choice = device.prepare("cuda")
    _replace_files(config, hf)
    # torch.tensor(..., device="cuda") shall make a CPU tensor and then copy it, which the meter sees.
    torch._C._set_only_lift_cpu_tensors(True)
    with FakeTensorMode(allow_non_fake_inputs=True), meter:
        actor = _run(config, rank, meter)
    return RankTrace(
        rank=rank,
        place=actor.place(),
        kernels="\n".join(f"{part}: {kernel}" for part, kernel in choice.kernels.items()),
        calls=RecordingGroup.calls,
        waits=[Wait(*wait, count) for wait, count in sorted(meter.waits.items())],
        peaks=dict(meter.peaks),
        seconds=time.monotonic() - start,
        added_gradients=len(te_layers.added_gradients),
    )


def _run(config: Config, rank: int, meter: Meter) -> Any:
    from megatron.core import parallel_state

    from megatron_dapo.actor.actor import MegatronActor
    from megatron_dapo.actor.checkpoint import checkpoint
    from megatron_dapo.coordinator.batch import objective_of

    actor = MegatronActor(
        dataclasses.replace(config.actor, device="cuda"),
        config.model,
        rank=rank,
        world_size=config.actor.layout.world_size,
        rendezvous=f"file://{tempfile.mkdtemp()}/rendezvous",  # in the folder of the trace, which goes with it
        steps_per_rollout=1,
        seed=config.run.seed,
        timeout_s=600,
        keep_reference=config.algorithm.kl.coefficient > 0,
    )
    batch = _mini_batch(config, reference=actor.reference is not None)
    temperature = config.rollout.temperature
    objective, step = objective_of(config.algorithm), actor.optimizer.step

    def measured_step() -> Any:
        with meter.measured("optimizer step" if name == "update" else "first optimizer step"):
            return step()

    actor.optimizer.step = measured_step  # type: ignore[method-assign]
    for name in ("first update", "log-probs", "reference log-probs", "update"):
        # The first update makes the moments, which are there ever after.
        with meter.measured(name):
            if name.endswith("update"):
                actor.update([batch], objective, temperature)
            elif name == "log-probs":
                actor.log_probs(batch.responses, batch.plan, temperature)
            elif actor.reference is not None:
                actor.reference_log_probs(batch.responses, batch.plan, temperature)
    with meter.measured("rollout"):
        pass  # at rest
    with meter.measured("checkpoint"), actor.memory.resident("parameters", "optimizer"):
        checkpoint._sharded_state(actor.optimizer, loading=False)
    with meter.measured("weight sync"):
        # Where rank 0's weights go, or those of each stage's first rank: a new buffer for each bucket, while the one
        # before is sent; a file takes them one by one.
        way = config.way_of_weights(on_gpus=True)
        to_disk, by_stage = way == "disk", way in ("distributed", "delta")
        stages = parallel_state.get_pipeline_model_parallel_group()
        gathers = dist.get_global_rank(stages, 0) == 0 if by_stage else rank == 0
        held: deque[torch.Tensor] = deque()

        def buffer(size: int) -> torch.Tensor:
            if len(held) == (1 if to_disk else 2):
                held.popleft()
            held.append(torch.empty(size, dtype=torch.uint8, device=actor.device.device))
            return held[-1]

        sink: Any = SimpleNamespace(buffer=buffer, put=lambda bucket, tensors: None, expect=lambda names: None)
        budget = 1 if to_disk else config.rollout.sync_bucket_mb << 20
        actor.stream_weights(sink if gathers else None, budget, by_stage=by_stage)
    return actor


def _mini_batch(config: Config, *, reference: bool) -> Any:
    """Full rows, as many on each data-parallel rank as fill the pipeline: responses of the longest length and, where
    the row has room, one of the rest."""
    from megatron_dapo.actor.packing import MicroBatchPlan
    from megatron_dapo.actor.step_data import MiniBatch, Responses

    layout, longest = config.actor.layout, config.model.context_length
    whole, rest = divmod(row_tokens(config) * layout.context, longest)
    lengths = [longest] * whole + ([rest] if rest >= 2 else [])
    rows = max(2, layout.pipeline) * (layout.virtual_pipeline or 1)
    indices = np.arange(layout.data * rows * len(lengths)).reshape(layout.data, rows, len(lengths))
    responses = Responses(
        token_ids=np.zeros(layout.data * rows * sum(lengths), np.int32),
        sequence_lengths=np.tile(np.array(lengths, np.int32), layout.data * rows),
        prompt_lengths=np.ones(indices.size, np.int32),
    )
    plan = MicroBatchPlan(micro_batches=tuple(tuple(rank) for rank in indices), num_responses=indices.size)
    names = ["weights", "advantages", "old_log_probs"] + ["reference_log_probs"] * reference
    columns = dict.fromkeys(names, np.ones(responses.num_response_tokens, np.float32))
    return MiniBatch(responses=responses, plan=plan, **columns)


def _replace_torch(meter: Meter, hf: HFModelConfig, layout: LayoutConfig) -> None:
    """Groups that note, waits that are counted, storages that tell when they are resized."""
    distributed_c10d.ProcessGroupNCCL = RecordingGroup  # type: ignore[misc]
    distributed_c10d.ProcessGroupGloo = RecordingGloo  # type: ignore[misc]
    FakeTensor.tolist = lambda self: self.cpu().tolist()  # type: ignore[method-assign]  # one copy, not one a number
    tensor = torch.tensor

    def numbers(data: Any) -> Any:
        if isinstance(data, list | tuple):
            return [numbers(one) for one in data]
        return data.item() if isinstance(data, FakeTensor) else data

    torch.tensor = lambda data, **options: tensor(numbers(data), **options)

    addmm = torch.addmm

    def product(total: Any, *factors: Any, out_dtype: Any = None, **options: Any) -> Any:
        """torch's, without numbers, takes `out_dtype` for a factor."""
        if out_dtype is None:
            return addmm(total, *factors, **options)
        te_layers.added_gradients.append(total.shape)
        return total

    torch.addmm = product

    owners: tuple[Any, ...] = (torch.cuda, torch.cuda.Stream, torch.cuda.Event)
    for owner in owners:
        what = f"{owner.__name__}.synchronize"
        owner.synchronize = lambda *args, what=what: meter.wait(what)
    resize = torch.UntypedStorage.resize_

    def resized(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        result = resize(storage, size)
        meter.resized(storage)
        return result

    torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign, assignment]

    def gathered(into: Any, value: Any, group: Any = None, **rest: Any) -> None:
        meter.wait("objects gathered")
        cast(RecordingGroup, group or dist.group.WORLD).note("all_gather_object", [])
        # Sets are of `gathered_parameters`: which stage holds which parameter. All else is equal on all ranks.
        into[:] = _names_by_stage(hf, layout) if isinstance(value, set) else [value] * len(into)

    def broadcast(values: Any, src: int = 0, group: Any = None, **rest: Any) -> None:
        meter.wait("objects broadcast")
        cast(RecordingGroup, group or dist.group.WORLD).note(f"broadcast_object_list from {src}", [])

    for module in (dist, distributed_c10d):
        module.all_gather_object = gathered  # type: ignore[attr-defined]
        module.broadcast_object_list = broadcast  # type: ignore[attr-defined]


def _replace_files(config: Config, hf: HFModelConfig) -> None:
    """No weight files."""
    from megatron_dapo.actor.weights import hf_weights as weights

    weights.load_hf_weights = lambda *args: None
    HFModelConfig.load = classmethod(lambda cls, folder: hf)  # type: ignore[method-assign, assignment]


def _names_by_stage(hf: HFModelConfig, layout: LayoutConfig) -> list[set[str]]:
    from megatron_dapo.actor.weights.hf_weights import place_of
    from megatron_dapo.actor.weights.model_tensors import model_shards

    found: list[set[str]] = [set() for _ in range(layout.pipeline)]
    layers = hf.num_layers // (layout.pipeline * (layout.virtual_pipeline or 1))
    for name in model_shards(hf):
        _, of_layer, rest = name.partition("decoder.layers.")
        outside = 0 if name.startswith("embedding.") else -1
        found[int(rest.split(".")[0]) // layers % layout.pipeline if of_layer else outside].add(place_of(name))
    return found


def main() -> None:
    """Do the job (JSON), write the trace to the file that it names."""
    job = json.loads(sys.argv[1])
    end_with(job["parent"])
    config = load_config(Path(job["config"]), job["overrides"])
    trace = trace_rank(config, job["rank"], transformer_engine=job["layers"] == "te")
    Path(job["out"]).write_text(json.dumps(dataclasses.asdict(trace)))
    os._exit(0)  # torch's own end would wait for a device


if __name__ == "__main__":
    main()
