"""Weights between Hugging Face's names and Megatron's shards: load, gather, export, and pass on in buckets of a byte
budget. Gathered parameter by parameter, nowhere whole."""

import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor

from megatron_dapo.actor.device.process_groups import gather_objects
from megatron_dapo.actor.model.hf_config import HFModelConfig
from megatron_dapo.actor.offload import to_pageable
from megatron_dapo.actor.weights.buckets import plan_buckets
from megatron_dapo.actor.weights.hf_files import FolderPlan, SafetensorsReader, WeightsError, partial_folder
from megatron_dapo.actor.weights.model_tensors import EMBEDDINGS, OUTPUT_LAYER, check_weights, hf_shapes, model_shards
from megatron_dapo.actor.weights.quantize import quantized
from megatron_dapo.actor.weights.shards import Shards

EXPORT_FILE_BYTES = 5 * 10**9

LAYER_NAME = re.compile(r"(decoder\.layers\.)(\d+)\.(.+)")
# In Megatron's sequence of experts, or in TransformerEngine's group; the numbers are those of a rank.
_EXPERT_NAME = re.compile(r"mlp\.experts\.(?:local_experts\.(?P<local>\d+)\.)?(?P<part>\w+)\.weight(?P<grouped>\d*)")
# TransformerEngine's layer spec fuses a norm into the linear after it, under another name.
FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}


def load_hf_weights(chunks: Sequence[torch.nn.Module], hf: HFModelConfig, folder: Path) -> None:
    """Fill this rank's parameters from the safetensors in `folder`; only its own slices are read.

    Wrapped chunks (Float16Module, DistributedDataParallel) are fine. An optimizer that keeps its own copy of the
    weights must be told afterwards (`reload_model_params`). No rank waits for another.

    Raises:
        WeightsError: the folder does not hold the model (`check_weights`).
    """
    shards_of = model_shards(hf)
    dense = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()
    of_expert = parallel_state.get_expert_tensor_parallel_rank(), parallel_state.get_expert_tensor_parallel_world_size()
    with SafetensorsReader(folder) as reader, torch.no_grad():
        check_weights(reader, hf)
        for name, parameter in named_parameters(chunks, hf):
            if ".lora." not in name:
                shards = shards_of[name]
                shards.load(parameter, reader.read, *(dense if shards.expert is None else of_expert))


def hf_tensors(
    chunks: Sequence[torch.nn.Module], hf: HFModelConfig, *, dtype: torch.dtype, **what: Any
) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, full tensor, a copy) of the whole model on global rank 0, on the device that it was gathered
    on; nothing on the others.

    Collective: every rank must iterate to the end. Experts come from all ranks that hold them, the rest from the
    tensor- and pipeline-parallel ranks that share rank 0's data. One parameter is gathered at a time. Under tied
    weights the first stage's copy counts. `what`: `value` and `shards` of `gathered_parameters`.
    """
    for each, stacked in gathered_parameters(chunks, hf, dtype=dtype, **what):
        if stacked is not None:
            yield from each.full(stacked, stacked.device).items()
        del stacked


def gathered_parameters(
    chunks: Sequence[torch.nn.Module],
    hf: HFModelConfig,
    *,
    dtype: torch.dtype,
    value: Callable[[torch.nn.Parameter], Tensor] = torch.nn.Parameter.detach,
    shards: Mapping[str, Shards] | None = None,
    by_stage: bool = False,
) -> Iterator[tuple[Shards, Tensor | None]]:
    """(how a parameter is split, all its shards [ranks, *shape]) in the order of `model_shards`; None elsewhere than on
    global rank 0, and nothing at all on ranks that hold only what others hold too. `by_stage`: `shards` are the
    rank's `stage_shards`, and come to the stage's first rank.

    Collective as `hf_tensors`. `value` gives what is gathered for a parameter, of its shape, in any type: its weight,
    or for example `lambda parameter: parameter.main_grad`; it arrives as `dtype`. `shards`: what is gathered, by name;
    None: `model_shards`. The shards are on the device they were gathered to, and may be the live parameter; let
    go of them before the next ones, so that one parameter is held at a time.
    """
    sends_dense = parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
    sends_experts = hf.experts is not None and parallel_state.get_expert_data_parallel_rank() == 0
    if not sends_dense and not sends_experts:
        return
    own, shards = dict(named_parameters(chunks, hf)), model_shards(hf) if shards is None else shards
    stages = _stages(own, shards)
    for name, each in shards.items():
        stage = stages[name]
        group, holders = _holders(hf, each)
        stacked = None
        sends = sends_dense if each.expert is None else sends_experts
        if sends and stage == parallel_state.get_pipeline_model_parallel_rank():
            shard = value(own[name]).to(dtype).contiguous() if name in own else None
            stacked = _stack(shard, each.local_shape(len(holders)), dtype, group, holders)
        if not by_stage:
            stacked = _to_rank_zero(stacked, stage, (len(holders), *each.local_shape(len(holders))), dtype)
        yield each, stacked
        del stacked


def export_hf(
    chunks: Sequence[torch.nn.Module],
    hf: HFModelConfig,
    folder: Path,
    source_folder: Path,
    *,
    dtype: torch.dtype,
    max_file_bytes: int = EXPORT_FILE_BYTES,
    watch: Callable[[str, Tensor], None] | None = None,
    besides: Mapping[str, bytes] | None = None,
    quantization: Mapping[str, Any] | None = None,
) -> None:
    """Write the model to `folder` in Hugging Face format; every rank calls, rank 0 writes.

    `watch`, on rank 0, is handed each tensor on the device, before it is copied to the host and written.
    `besides`, on rank 0: other files by path in the folder, with their content.
    `quantization`: what config.json says of FP8 weights (actor.weights.quantize); None: nothing is quantized.

    `model.safetensors`, or shards of at most `max_file_bytes` with an index; config, generation config and tokenizer
    are those of `source_folder`. Written aside and renamed: whoever sees `folder` sees all of it.

    Raises:
        RuntimeError: rank 0 could not write; raised on every rank, with the reason.
    """
    shapes = hf_shapes(hf, quantize=quantization is not None)
    plan, partial = FolderPlan(shapes=shapes, dtype=dtype, max_bytes=max_file_bytes), partial_folder(folder)
    tensors, failure = hf_tensors(chunks, hf, dtype=dtype), list[str | None]([None])
    if dist.get_rank() == 0:
        try:
            plan.create(partial)
            for path, content in (besides or {}).items():
                (partial / path).parent.mkdir(exist_ok=True)
                (partial / path).write_bytes(content)
            for name, tensor in tensors:
                for stored_name, stored in quantized({name: tensor}, shapes).items():
                    if watch is not None:
                        watch(stored_name, stored)
                    plan.write(partial, stored_name, to_pageable(stored))
            plan.finish(partial, folder, source_folder, quantization)
        except (OSError, WeightsError) as error:
            failure = [str(error)]
            shutil.rmtree(partial, ignore_errors=True)  # a full disk should be no fuller than before
    for _ in tensors:
        pass  # the other ranks send all of them, also after a failure on rank 0
    dist.broadcast_object_list(failure, src=0)
    if failure[0] is not None:
        raise RuntimeError(f"{folder}: the model could not be exported: {failure[0]}")


def stream_weights(
    chunks: Sequence[torch.nn.Module],
    hf: HFModelConfig,
    *,
    dtype: torch.dtype,
    bucket_bytes: int,
    sink: Any,
    quantize: bool = False,
    by_stage: bool = False,
) -> None:
    """Hand the whole model to `sink` (rollout.weights.sender.WeightSender) on global rank 0; every rank calls, the
    others with None. It gives a buffer, uint8 [size], on any device, which is filled and put with its tensors as views.
    A sink on another rank has its buffers put as they are, each at the same time. `quantize`: to FP8, with scales.
    `by_stage`: the first rank of each pipeline stage has a sink, for what the stage holds.

    A rank with such a sink then holds one gathered parameter besides the model and the sink's buffers, two at a time;
    any other rank at most one parameter.

    Raises:
        Exception: what the sink raised, on its rank, after the other ranks have sent everything.
    """
    chosen = stage_shards(chunks, hf) if by_stage else model_shards(hf)
    stream = gathered_parameters(chunks, hf, dtype=dtype, shards=chosen, by_stage=by_stage)
    try:
        if sink is not None:
            if by_stage:
                sink.expect(hf_shapes(hf, quantize=quantize, shards=chosen))
            for bucket in plan_buckets(chosen.values(), dtype, bucket_bytes, quantize=quantize):
                views = bucket.views(sink.buffer(bucket.size))
                for shards, stacked in islice(stream, bucket.parameters):
                    if stacked is not None and not quantize:
                        shards.fill(views, stacked)
                    elif stacked is not None:
                        for name, tensor in quantized(shards.full(stacked, stacked.device), views).items():
                            views[name].copy_(tensor)
                    del stacked  # before the next parameter is gathered
                sink.put(bucket, views)
                del views
    finally:
        for _ in stream:
            pass  # the other ranks send all of them, also after a failure of the sink


def stage_shards(chunks: Sequence[torch.nn.Module], hf: HFModelConfig) -> dict[str, Shards]:
    """Those of `model_shards` that are sent from this rank's pipeline stage. Collective over a pipeline's ranks."""
    shards, own = model_shards(hf), parallel_state.get_pipeline_model_parallel_rank()
    stages = _stages(dict(named_parameters(chunks, hf)), shards)
    return {name: each for name, each in shards.items() if stages[name] == own}


def _stages(own: Collection[str], names: Collection[str]) -> dict[str, int]:
    """The pipeline stage that each parameter is gathered from; of tied weights the first one has the embedding. `own`:
    the rank's parameters. Collective over a pipeline's ranks."""
    held = gather_objects({place_of(name) for name in own}, parallel_state.get_pipeline_model_parallel_group())
    return {name: next(at for at, places in enumerate(held) if place_of(name) in places) for name in names}


def named_parameters(chunks: Sequence[torch.nn.Module], hf: HFModelConfig) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """(name as in `model_shards`, parameter) of every parameter that this rank holds.

    Under tied weights the last pipeline stage holds a copy of the embedding as its head: it has the embedding's name.
    """
    each = hf.experts.count // parallel_state.get_expert_model_parallel_world_size() if hf.experts else 0
    first_expert = each * parallel_state.get_expert_model_parallel_rank()
    for chunk in chunks:
        model = get_attr_wrapped_model(chunk, "decoder", return_model_obj=True)
        for name, parameter in model.named_parameters():
            if in_layer := LAYER_NAME.fullmatch(name):
                prefix, index, rest = in_layer.groups()
                layer = model.decoder.layers[int(index)].layer_number - 1
                if in_expert := _EXPERT_NAME.fullmatch(rest):
                    part, number = in_expert["part"], first_expert + int(in_expert["local"] or in_expert["grouped"])
                    rest = f"mlp.experts.{number}.{part}.weight"
                yield f"{prefix}{layer}.{FUSED_NORMS.get(rest, rest)}", parameter
            else:
                yield EMBEDDINGS if name == OUTPUT_LAYER and hf.tied else name, parameter


def place_of(name: str) -> str:
    """What a whole stage has or has not: the parameter, or the layer that it is in."""
    in_layer = LAYER_NAME.fullmatch(name)
    return "".join(in_layer.groups()[:2]) if in_layer else name


def _holders(hf: HFModelConfig, shards: Shards) -> tuple[dist.ProcessGroup, range]:
    """A group of one stage whose first rank is also the stage's first, and which of its ranks hold the shards."""
    if shards.expert is None or hf.experts is None:
        ranks = parallel_state.get_tensor_model_parallel_world_size() if shards.split else 1
        return parallel_state.get_tensor_model_parallel_group(), range(ranks)
    each = hf.experts.count // parallel_state.get_expert_model_parallel_world_size()
    ranks = parallel_state.get_expert_tensor_parallel_world_size()
    first = shards.expert // each * ranks
    return parallel_state.get_expert_tensor_and_model_parallel_group(), range(first, first + ranks)


def _stack(
    shard: Tensor | None, shape: Sequence[int], dtype: torch.dtype, group: dist.ProcessGroup, holders: range
) -> Tensor | None:
    """The shards of the group's ranks `holders`, [holders, *shape], on the group's first rank; None on the others."""
    rank, first = dist.get_rank(group), dist.get_global_rank(group, 0)
    if rank > 0:
        if rank in holders:
            assert shard is not None
            dist.send(shard, dst=first, group=group)
        return None
    if holders == range(1):
        return None if shard is None else shard[None]
    # Not `dist.gather`: gloo's receives into a second buffer of this size.
    stacked = torch.empty((len(holders), *shape), dtype=dtype, device=_device_of(group))
    for index, holder in enumerate(holders):
        if holder > 0:
            dist.recv(stacked[index], src=dist.get_global_rank(group, holder), group=group)
        elif shard is not None:
            stacked[index].copy_(shard)
    return stacked


def _device_of(group: dist.ProcessGroup) -> torch.device:
    """Where tensors are that travel within the group."""
    return torch.device("cpu") if dist.get_backend(group) == "gloo" else torch.device("cuda")


def _to_rank_zero(stacked: Tensor | None, stage: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
    """Bring what the first rank of pipeline stage `stage` has stacked to global rank 0; None on the others."""
    group = parallel_state.get_pipeline_model_parallel_group()
    if dist.get_global_rank(group, 0) > 0:
        return None
    holder = dist.get_global_rank(group, stage)
    if holder == 0:
        return stacked
    if dist.get_rank() == 0:
        stacked = torch.empty(shape, dtype=dtype, device=_device_of(group))
        dist.recv(stacked, src=holder, group=group)
        return stacked
    if stacked is not None:
        dist.send(stacked, dst=0, group=group)
    return None
