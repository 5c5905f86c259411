"""Where the tokens of a packed stream lie: padding, context-parallel parts, attention buckets."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dapo.actor.device import prepare

prepare("cpu")

from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding  # noqa: E402

from megatron_dapo.actor.model import packed_attention as sequences  # noqa: E402
from megatron_dapo.actor.model.packed_attention import PackedAttention, PackedSequences, Rotary  # noqa: E402
from tests.actor.stream_layout import local_rows, padded_lengths  # noqa: E402

LENGTHS = st.lists(st.integers(1, 200), min_size=1, max_size=12)
CPU = torch.device("cpu")


@given(LENGTHS, st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]))
@settings(max_examples=50, deadline=None)
def test_padding_serves_the_layout_and_no_more(lengths, context, tensor):
    padded = padded_lengths(lengths, context_parallel=context, tensor_parallel=tensor)
    chunks = 2 * context if context > 1 else 1
    assert all(p >= n and p % chunks == 0 for p, n in zip(padded, lengths, strict=True))
    assert all(p - n < chunks for p, n in zip(padded[:-1], lengths[:-1], strict=True))
    assert sum(padded) % (chunks * tensor) == 0
    assert padded[-1] - lengths[-1] < chunks * (tensor + 1)


@given(LENGTHS, st.sampled_from([1, 2, 3]))
@settings(max_examples=50, deadline=None)
def test_every_row_has_one_context_rank_and_plans_agree(lengths, ranks):
    padded = padded_lengths(lengths, context_parallel=ranks, tensor_parallel=1)
    rows = [local_rows(padded, context_parallel=ranks, context_rank=rank) for rank in range(ranks)]
    assert sorted(torch.cat(rows).tolist()) == list(range(sum(padded)))
    assert len({len(part) for part in rows}) == 1
    starts = torch.tensor([0, *padded]).cumsum(0)
    for rank, part in enumerate(rows):
        plan = PackedSequences(padded_lengths=padded, device=CPU, context_parallel=ranks, context_rank=rank).plan
        owner = torch.bucketize(part, starts, right=True) - 1
        assert torch.equal(plan.positions, part - starts[owner])
        # Each local row is the query of exactly one slot, and that is the slot where its output is looked up.
        own = torch.arange(len(part)).split(plan.lengths)
        if plan.equal:
            assert len(set(padded)) == 1
            continue
        queries = torch.cat([own[i] for i in plan.alone] + [bucket.queries.flatten() for bucket in plan.buckets])
        assert torch.equal(queries if plan.slots is None else queries[plan.slots], torch.arange(len(part)))


def attention(heads: int, groups: int, size: int) -> PackedAttention:
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=1, hidden_size=heads * size, num_attention_heads=heads, num_query_groups=groups, kv_channels=size
    )
    no_rotation = Rotary(torch.zeros(size // 2))
    # Any object with `cp` will do where no context parallelism is used.
    return PackedAttention(config, 1, rotary=no_rotation, pg_collection=type("Groups", (), {"cp": None}))


def float64_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """softmax(q k' / sqrt(D)) v by the formula, sequence by sequence and head by head."""
    outputs = []
    for q_s, k_s, v_s in zip(*(x.double().split(lengths) for x in (q, k, v)), strict=True):
        heads = []
        for head in range(q.shape[1]):
            group = head * k.shape[1] // q.shape[1]
            scores = q_s[:, head] @ k_s[:, group].T / math.sqrt(q.shape[2])
            visible = torch.ones_like(scores, dtype=torch.bool).tril()
            heads.append(scores.masked_fill(~visible, -math.inf).softmax(-1) @ v_s[:, group])
        outputs.append(torch.cat(heads, dim=-1))
    return torch.cat(outputs)


@given(
    st.lists(st.integers(1, 150), min_size=1, max_size=8),
    st.sampled_from([(4, 2), (3, 3), (4, 1)]),
    st.sampled_from([1, 32, 4096]),
)
@settings(max_examples=12, deadline=None)
def test_packed_attention_and_its_gradient_equal_the_formula(lengths, heads, longest_in_bucket):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sequences.BUCKET_LONGEST, "cpu", longest_in_bucket)
        check_attention(lengths, heads)


def check_attention(lengths: list[int], heads: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(sum(lengths))
    shapes = [(sum(lengths), heads[0], 8), (sum(lengths), heads[1], 8), (sum(lengths), heads[1], 8)]
    qkv = [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]
    upstream = torch.randn(sum(lengths), heads[0] * 8, generator=generator)
    ours = attention(*heads, 8)(*qkv, packed_seq_params=PackedSequences(padded_lengths=lengths, device=CPU))
    theirs = float64_attention(*qkv, lengths)
    torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=2e-6)
    gradients = torch.autograd.grad(ours, qkv, upstream), torch.autograd.grad(theirs, qkv, upstream.double())
    for our, their in zip(*gradients, strict=True):
        torch.testing.assert_close(our.double(), their.double(), rtol=1e-5, atol=5e-6)


@pytest.mark.parametrize("lengths", [[7], [40, 40, 40], [5, 5]])
def test_sequences_of_one_length_are_a_batch_as_they_lie(lengths):
    plan = PackedSequences(padded_lengths=lengths, device=CPU).plan
    assert plan.equal
    check_attention(lengths, (4, 2))


def test_many_short_sequences_take_few_calls():
    plan = PackedSequences(padded_lengths=[i % 30 + 1 for i in range(300)], device=CPU).plan
    assert len(plan.buckets) == 1
    assert not plan.alone


def test_megatron_finds_the_rotary_angles_of_an_earlier_micro_batch():
    """Where TransformerEngine's layers are: it keeps them by the length of the longest sequence."""
    embedding = RotaryEmbedding(16, rotary_percent=1.0, use_cpu_initialization=True)

    def angles(*lengths: int) -> torch.Tensor:
        packed = PackedSequences(padded_lengths=lengths, device=torch.device("cpu"))
        length = embedding.get_rotary_seq_len(None, None, None, None, packed)
        return embedding(length, packed_seq=True)

    first = angles(3, 900)
    assert len(first) >= 900
    assert angles(517, 17) is first
    assert angles(1024) is first
    assert len(angles(1025)) >= 1025
