"""What the tests run on each rank: a model of the actor, built, loaded and run over packed micro-batches."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_dapo.config.actor_config import Recompute
from tests.actor.gloo import RankPlace
from tests.actor.stream_layout import local_rows, padded_lengths


@dataclass(frozen=True, kw_only=True, slots=True)
class PartialLogits:
    """What one rank knows of the logits of one micro-batch: its vocabulary columns of its context-parallel rows."""

    tensor_rank: int
    rows: torch.Tensor
    """[t] their rows in the stream."""

    padded_lengths: list[int]
    """Of the stream's sequences."""

    logits: torch.Tensor
    """[t, V / TP]"""


@dataclass(frozen=True, kw_only=True)
class Built:
    """A model on one rank, its process groups up."""

    actor: object
    hf: object
    device: object
    chunks: list


def build(
    place: RankPlace, folder: Path, layout: dict, *, recompute: Recompute = "none", dtype: str = "float32"
) -> Built:
    """Process groups (once in a call) and the model of `folder`, loaded."""
    from megatron_dapo.actor.device import prepare

    device = prepare("cpu")
    from megatron_dapo.actor.device import process_groups
    from megatron_dapo.actor.model.hf_config import HFModelConfig
    from megatron_dapo.actor.model.model_chunks import build_model
    from megatron_dapo.actor.weights.hf_weights import load_hf_weights
    from megatron_dapo.config.actor_config import ActorConfig, LayoutConfig

    actor = ActorConfig(layout=LayoutConfig(**layout), recompute=recompute)
    if not torch.distributed.is_initialized():
        process_groups.initialise(
            actor.layout,
            rank=place.rank,
            world_size=place.world_size,
            rendezvous=place.rendezvous,
            device=device,
            timeout_s=60,
            seed=1,
        )
    hf = HFModelConfig.load(folder)
    chunks = build_model(hf, actor, dtype, device)
    load_hf_weights(chunks, hf, folder)
    return Built(actor=actor, hf=hf, device=device, chunks=chunks)


def in_rows(built: Built, micro_batches: Sequence[Sequence[Sequence[int]]]) -> tuple[list[Any], int]:
    """`micro_batch` of each, and the tokens of the longest row; between pipeline stages all have as many."""
    longest = max(sum(micro_batch(built, sequences)[1].padded_lengths) for sequences in micro_batches)
    least = longest if built.actor.layout.pipeline > 1 else 0
    return [micro_batch(built, sequences, least) for sequences in micro_batches], longest


def micro_batch(built: Built, sequences: Sequence[Sequence[int]], least: int = 0):
    """(input ids [1, t] of this rank, packed sequence params) of one packed micro-batch."""
    from megatron.core import parallel_state

    from megatron_dapo.actor.model.packed_attention import PackedSequences

    layout = built.actor.layout
    lengths = padded_lengths(
        [len(sequence) for sequence in sequences],
        context_parallel=layout.context,
        tensor_parallel=layout.tensor if layout.sequence_parallel else 1,
        least=least,
    )
    stream = torch.zeros(sum(lengths), dtype=torch.long)
    start = 0
    for sequence, length in zip(sequences, lengths, strict=True):
        stream[start : start + len(sequence)] = torch.tensor(list(sequence))
        start += length
    place = {"context_parallel": layout.context, "context_rank": parallel_state.get_context_parallel_rank()}
    return stream[local_rows(lengths, **place)][None], PackedSequences(
        padded_lengths=lengths, device=built.device.device, **place
    )


def logits_of(
    place: RankPlace, folders: Sequence[Path], layout: dict, micro_batches: list, recompute: Recompute = "none"
) -> list[list[PartialLogits]]:
    """For each model its logits of each micro-batch, on the ranks of the last pipeline stage (elsewhere empty
    lists)."""
    return [_logits(build(place, folder, layout, recompute=recompute), micro_batches) for folder in folders]


def _logits(built: Built, micro_batches: list) -> list[PartialLogits]:
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    def forward_step(batches: Iterator, chunk: torch.nn.Module):
        ids, packed = next(batches)
        return chunk(ids, torch.zeros_like(ids), None, packed_seq_params=packed), lambda output, **_: output[0]

    prepared, tokens = in_rows(built, micro_batches)
    iterators = [iter(prepared) for _ in built.chunks]
    with torch.no_grad():
        outputs = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=built.chunks,
            num_microbatches=len(prepared),
            seq_length=tokens,
            micro_batch_size=1,
            forward_only=True,
            collect_non_loss_data=True,
        )
    return [
        PartialLogits(
            tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
            rows=local_rows(
                packed.padded_lengths, context_parallel=packed.context_parallel, context_rank=packed.context_rank
            ),
            padded_lengths=list(packed.padded_lengths),
            logits=logits,
        )
        for logits, (_, packed) in zip(outputs, prepared, strict=bool(outputs))
    ]


def assemble(parts: Sequence[Sequence[PartialLogits]], micro_batches: list) -> list[list[torch.Tensor]]:
    """For each micro-batch the logits [L, V padded] of each sequence, from all ranks' partial ones."""
    assembled = []
    for index, sequences in enumerate(micro_batches):
        of_batch = sorted((part[index] for part in parts if part), key=lambda part: part.tensor_rank)
        lengths = of_batch[0].padded_lengths
        ranks = max(part.tensor_rank for part in of_batch) + 1
        columns = of_batch[0].logits.shape[1]
        whole = torch.full((sum(lengths), ranks * columns), torch.nan)
        for part in of_batch:
            whole[part.rows, part.tensor_rank * columns : (part.tensor_rank + 1) * columns] = part.logits
        streams = whole.split(lengths)
        assembled.append([rows[: len(sequence)] for rows, sequence in zip(streams, sequences, strict=True)])
    return assembled
