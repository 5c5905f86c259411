"""Gradients through the model's layouts and recompute equal those of transformers' autograd, in Hugging Face's
names."""

import pytest
import torch

from megatron_dapo.config.actor_config import Recompute
from tests.actor.gloo import RankPlace
from tests.actor.ranks import build, in_rows
from tests.actor.stream_layout import local_rows
from tests.actor.tiny import load_reference, random_sequences, save_tiny

# The second is longer than an attention bucket, and short ones stand around it.
MICRO_BATCHES = [random_sequences(lengths, seed=i) for i, lengths in enumerate([[9, 80, 20], [41], [5, 31], [64, 3]])]

# tests/actor/test_step.py has one process and every layout, by the actor itself.
CASES = {
    "tensor + sequence, full recompute": ({"tensor": 2, "sequence_parallel": True}, "full"),
    "virtual pipeline": ({"pipeline": 2, "virtual_pipeline": 2}, "none"),
    "pipeline, one layer of two": ({"pipeline": 2}, 1),
    "tensor + sequence, parts": ({"tensor": 2, "sequence_parallel": True}, ("mlp",)),
    "context": ({"context": 2}, ("core_attn",)),
}


def weight_of(ids: torch.Tensor, positions: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
    """[t, columns] an arbitrary smooth weight of each logit, so that every logit has a gradient of its own."""
    return torch.sin(ids[:, None] * 0.7 + positions[:, None] * 0.3 + column * 0.11)


def gradients(place: RankPlace, folder, layout: dict, recompute: Recompute) -> dict[str, torch.Tensor]:
    """The gradient of sum(weight * logit) over the real tokens, through Megatron's DDP and pipeline schedules."""
    built = build(place, folder, layout, recompute=recompute)
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from megatron_dapo.actor.weights.hf_weights import hf_tensors

    config = built.chunks[0].config
    config.finalize_model_grads_func = lambda chunks, num_tokens, **_: finalize_model_grads(chunks)
    chunks = [
        DistributedDataParallel(config=config, ddp_config=DistributedDataParallelConfig(), module=chunk)
        for chunk in built.chunks
    ]

    def forward_step(batches, chunk):
        ids, packed, real = next(batches)

        def loss(logits):
            first = parallel_state.get_tensor_model_parallel_rank() * logits.shape[-1]
            columns = torch.arange(first, first + logits.shape[-1])
            weights = weight_of(ids[0], packed.plan.positions, columns) * (columns < built.hf.vocab_size)
            return (logits[0] * weights)[real].sum(), torch.tensor(1), {}

        return chunk(ids, torch.zeros_like(ids), None, packed_seq_params=packed), loss

    prepared, (rows, tokens) = [], in_rows(built, MICRO_BATCHES)
    for sequences, (ids, packed) in zip(MICRO_BATCHES, rows, strict=True):
        real = [torch.arange(p) < len(s) for p, s in zip(packed.padded_lengths, sequences, strict=True)]
        here = local_rows(
            packed.padded_lengths, context_parallel=packed.context_parallel, context_rank=packed.context_rank
        )
        prepared.append((ids, packed, torch.cat(real)[here]))
    iterators = [iter(prepared) for _ in chunks]
    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=chunks,
        num_microbatches=len(prepared),
        seq_length=tokens,
        micro_batch_size=1,
        forward_only=False,
    )
    return dict(hf_tensors(chunks, built.hf, dtype=torch.float32, value=lambda parameter: parameter.main_grad))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """(folder, gradients by transformers): untied with bias, tied with head norms and uneven head size."""
    found = []
    for family, tied in (("qwen2", False), ("qwen3", True)):
        folder = save_tiny(tmp_path_factory.mktemp(family), family, tied=tied)
        model = load_reference(folder)
        for sequence in (sequence for batch in MICRO_BATCHES for sequence in batch):
            ids = torch.tensor(sequence)
            logits = model(ids[None]).logits[0]
            (logits * weight_of(ids, torch.arange(len(ids)), torch.arange(logits.shape[1]))).sum().backward()
        found.append((folder, {name: parameter.grad for name, parameter in model.named_parameters()}))
    return found


@pytest.mark.parametrize(("layout", "recompute"), CASES.values(), ids=CASES.keys())
def test_gradients_equal_transformers(gloo, models, layout, recompute):
    ranks = layout.get("tensor", 1) * layout.get("pipeline", 1) * layout.get("context", 1)
    for folder, expected in models:
        got = gloo(ranks, gradients, folder, layout, recompute)[0]
        assert got.keys() == expected.keys()
        for name, gradient in expected.items():
            assert (got[name] - gradient).abs().max() <= 1e-5 * gradient.abs().max(), name
