"""Compares a Hugging Face folder with a Megatron checkpoint: every tensor's bytes, and the logits of random tokens.

The bytes come from the files. For the logits each side is loaded by its own library: Megatron-Core's distributed
checkpointing at a given layout, and transformers.
"""

import functools
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megatron_dapo.actor.checkpoint.checkpoint_pickles import refuse_foreign_code
from megatron_dapo.actor.device import prepare, process_groups
from megatron_dapo.actor.model.hf_config import HFModelConfig, check_layout
from megatron_dapo.actor.model.model_chunks import build_model
from megatron_dapo.actor.model.packed_attention import PackedSequences
from megatron_dapo.actor.weights.hf_files import SafetensorsReader
from megatron_dapo.config.actor_config import ActorConfig, LayoutConfig
from tools.conversion.megatron_files import CheckpointReader
from tools.conversion.stored import Stored, in_dtype, share, stored_parameters
from tools.conversion.workers import DEADLINE_S, Counter, Progress, run_parts
from tools.rank_pool import RankPlace, RankPool

LENGTHS = (17, 48, 33)
"""Of the sequences of random tokens whose logits are compared."""
LOGIT_TOLERANCE = 1e-4
"""Largest difference in float32, as a share of the largest logit."""


class VerifyError(RuntimeError):
    """The two sides are not the same model; the message says where."""


def verify_tensors(folder: Path, checkpoint: Path, *, dtype: torch.dtype, workers: int, pool: RankPool) -> int:
    """Compare the bytes of every Hugging Face tensor, brought to `dtype`; how many there are.

    Raises:
        VerifyError: some differ.
    """
    parameters = stored_parameters(HFModelConfig.load(folder))
    total = sum(stored.elements for stored in parameters) * dtype.itemsize
    progress = Progress("verify")
    compare = functools.partial(compare_part, folder, checkpoint, dtype)
    answers = run_parts(pool, compare, share(parameters, workers), progress, total)
    different = [name for names, _ in answers for name in names]
    if different:
        raise VerifyError(
            f"{len(different)} tensors differ between {folder} and {checkpoint}, the first: {different[0]}"
        )
    count = sum(compared for _, compared in answers)
    progress.close(f"{count} tensors are equal, bit for bit")
    return count


def compare_part(
    folder: Path, checkpoint: Path, dtype: torch.dtype, place: RankPlace, parameters: list[Stored], counter: Counter
) -> tuple[list[str], int]:
    """(tensors that differ, tensors compared)."""
    different, compared = [], 0
    reader = CheckpointReader(checkpoint)
    with SafetensorsReader(folder) as other:
        for stored in parameters:
            for name, tensor in stored.full(reader.read(stored)).items():
                pair = (tensor, other.read(name, 0, 0, tensor.shape[0]))
                if not torch.equal(*(in_dtype(each, dtype).contiguous().view(torch.uint8) for each in pair)):
                    different.append(name)
                compared += 1
                counter.add(place, tensor.numel() * dtype.itemsize)
    return different, compared


def verify_logits(
    folder: Path, checkpoint: Path, *, layout: LayoutConfig, pool: RankPool, dtype: torch.dtype = torch.float32
) -> float:
    """Compare the logits of random tokens in float32; the largest difference as a share of the largest logit.

    Each side needs the model in float32 in memory, one after the other.

    Args:
        dtype: of the weights that were written; both sides' are rounded to it.

    Raises:
        VerifyError: they differ by more than LOGIT_TOLERANCE.
        ConfigError: the layout does not divide the model.
    """
    hf = HFModelConfig.load(folder)
    check_layout(hf, layout)
    progress = Progress("verify")
    random = torch.Generator().manual_seed(0)
    sequences = [torch.randint(hf.vocab_size, (length,), generator=random).tolist() for length in LENGTHS]
    [expected] = pool.run(1, hf_logits, folder, sequences, dtype, timeout_s=DEADLINE_S)
    parts = pool.run(
        layout.world_size, megatron_logits, folder, checkpoint, layout, sequences, dtype, timeout_s=DEADLINE_S
    )
    pieces = [part for part in parts if part]
    differences = []
    for index, reference in enumerate(expected):
        got = torch.cat([piece[index] for piece in pieces], dim=1)[: reference.shape[0], : reference.shape[1]]
        differences.append(float((got - reference).abs().max() / reference.abs().max()))
    worst = max(differences)
    if not all(difference <= LOGIT_TOLERANCE for difference in differences):  # which a NaN is not
        raise VerifyError(
            f"the logits of {folder} and {checkpoint} differ by {worst:.1e} of the largest one on random tokens; "
            f"{LOGIT_TOLERANCE:g} is allowed"
        )
    progress.close(f"logits of {sum(LENGTHS)} tokens differ by at most {worst:.1e} of the largest one")
    return worst


def hf_logits(place: RankPlace, folder: Path, sequences: list[list[int]], dtype: torch.dtype) -> list[Tensor]:
    """[tokens, vocabulary] logits of each sequence, by transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    _round(model, dtype)
    with torch.no_grad():
        return [model(torch.tensor([sequence])).logits[0] for sequence in sequences]


def _round(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Give the weights, in float32, the values that they have in `dtype`."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(dtype))


def megatron_logits(
    place: RankPlace,
    folder: Path,
    checkpoint: Path,
    layout: LayoutConfig,
    sequences: list[list[int]],
    dtype: torch.dtype,
) -> list[Tensor]:
    """[tokens, vocabulary / TP] logits of each sequence, and of padding behind it, on the last pipeline stage, by
    Megatron; elsewhere nothing."""
    device = prepare("cpu")
    process_groups.initialise(layout, **asdict(place), device=device, timeout_s=DEADLINE_S, seed=0)
    cut = layout.tensor if layout.sequence_parallel else 1  # into equal parts
    longest = max(map(len, sequences)) if layout.pipeline > 1 else 0  # a stage receives rows of one length
    padded = [[*sequence, *[0] * (longest - len(sequence))] for sequence in sequences]
    padded = [row + [0] * (-len(row) % cut) for row in padded]
    [chunk] = build_model(HFModelConfig.load(folder), ActorConfig(layout=layout), "float32", device)
    load_model(chunk, checkpoint)
    _round(chunk, dtype)

    def forward_step(batches: Iterator, model: torch.nn.Module) -> tuple:
        ids = next(batches)
        packed = PackedSequences(padded_lengths=[ids.shape[1]], device=device.device)
        return model(ids, torch.zeros_like(ids), None, packed_seq_params=packed), lambda output, **_: output[0]

    with torch.no_grad():
        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter([torch.tensor([sequence]) for sequence in padded]),
            model=chunk,
            num_microbatches=len(padded),
            seq_length=max(map(len, padded)),
            micro_batch_size=1,
            forward_only=True,
            collect_non_loss_data=True,
        )


def load_model(chunk: GPTModel, checkpoint: Path) -> None:
    """Fill a rank's model from a distributed checkpoint, with Megatron's own loader."""
    refuse_foreign_code(checkpoint)
    metadata = {
        "singleton_local_shards": False,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    loaded = dist_checkpointing.load({"model": chunk.sharded_state_dict(metadata=metadata)}, str(checkpoint))
    chunk.load_state_dict(loaded["model"])
