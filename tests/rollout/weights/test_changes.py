"""What travels of a bucket, against the dense reference, and copies under which only it is put in place."""

import pytest
import torch

from rollout.weights import changes
from rollout.weights.changes import decode, encode

KINDS = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "BLOCK", 64)


def pair(size: int, kind: torch.dtype, share: float) -> tuple[torch.Tensor, torch.Tensor]:
    """[size] before and after; `share` of it is drawn anew."""
    random = torch.Generator().manual_seed(size)
    before = torch.randn(size, generator=random).to(kind)
    after = torch.where(
        torch.rand(size, generator=random) < share, torch.randn(size, generator=random).to(kind), before
    )
    return before, after


def bits(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(torch.uint8)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 7, 63, 64, 65, 128, 1000])
@pytest.mark.parametrize("share", [0.0, 0.02, 0.2])
def test_what_is_decoded_is_new_where_a_bit_changed_and_nan_elsewhere(kind, size, share):
    before, after = pair(size, kind, share)
    changed = (bits(before) != bits(after)).view(size, -1).any(1)
    found = encode(after, before)
    if 2 * (int(changed.sum()) * kind.itemsize + -(-size // 8)) > size * kind.itemsize:
        assert found is None
        return
    data, counts = found
    assert counts == [int(each.sum()) for each in changed.split(64)]
    assert data.numel() == int(changed.sum()) * kind.itemsize + -(-size // 8)
    held = decode(data, counts, size, kind)
    assert held.dtype == kind
    assert torch.equal(bits(held[changed]), bits(after[changed]))
    assert held[~changed].isnan().all()


def test_nothing_of_no_values():
    data, counts = encode(torch.empty(0), torch.empty(0))
    assert (data.numel(), counts, decode(data, counts, 0, torch.float32).numel()) == (0, [0], 0)


@pytest.mark.parametrize("kind", KINDS)
def test_most_of_it_or_a_nan_goes_whole(kind):
    before, after = pair(1000, kind, 1.0)
    assert encode(after, before) is None
    before, after = pair(1000, kind, 0.02)
    after[77] = torch.nan
    assert encode(after, before) is None
    before[77] = torch.nan  # which does not travel
    assert encode(after, before) is not None


def test_signs_of_zeros_and_subnormal_numbers_are_changes():
    before = torch.zeros(200)
    after = before.clone()
    after[3], after[100] = -0.0, 1e-45
    data, counts = encode(after, before)
    assert counts == [1, 1, 0, 0]
    assert decode(data, counts, 200, torch.float32)[[3, 100]].view(torch.int32).tolist() == [-(1 << 31), 1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("inference", [True, False])
def test_copies_of_a_loader_bring_only_changes(kind, inference):
    """As SGLang's loaders copy: whole, into a slice, transposed, over an expert of three dimensions, with another
    type."""
    before, after = (each.view(8, 6) for each in pair(48, kind, 0.2))
    changed = before != after
    sent = torch.where(changed, after, torch.nan)
    whole, fused, turned = before.clone(), torch.zeros(24, 6, dtype=kind), before.t().contiguous()
    experts, wide = torch.zeros(3, 8, 6, dtype=kind), before.to(torch.float64)
    fused[8:16] = experts[1] = before
    with torch.inference_mode(inference), changes._OnlyChanges():
        torch.nn.Parameter(whole, requires_grad=False).data.copy_(sent)
        fused.narrow(0, 8, 8).copy_(sent)
        turned.copy_(sent.t())
        experts.data[1].copy_(sent)
        wide[:] = sent
    for held in (whole, fused[8:16], turned.t(), experts[1], wide):
        assert torch.equal(held.to(kind), after)
    assert not fused[:8].any()
    assert not experts[0].any()
