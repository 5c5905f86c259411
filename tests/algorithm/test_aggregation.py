"""The denominators against means of means written as loops, and law 1: micro-batches only sum."""

import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from megatron_dapo.algorithm.aggregation import kl_scale, token_weights

MEANS = ["token_mean", "prompt_token_mean", "sequence_mean", "verl_legacy"]
ALL = [*MEANS, "sequence_sum_constant"]
CONSTANT = 40


def reference_loss(losses: list[list[float]], groups, micro, mask, aggregation) -> float:
    """The aggregated loss straight from the definitions: losses[i][t] of response i, as nested means."""
    kept = [i for i in range(len(losses)) if mask[i] and losses[i]]
    if aggregation == "sequence_sum_constant":
        return math.fsum(math.fsum(losses[i]) / CONSTANT for i in kept) / len(kept)
    if aggregation == "sequence_mean":
        return math.fsum(math.fsum(losses[i]) / len(losses[i]) for i in kept) / len(kept)
    key = {"token_mean": [0] * len(losses), "prompt_token_mean": groups, "verl_legacy": micro}[aggregation]
    means, sizes = [], []
    for part in sorted({key[i] for i in kept}):
        tokens = [loss for i in kept if key[i] == part for loss in losses[i]]
        means.append(math.fsum(tokens) / len(tokens))
        sizes.append(sum(key[i] == part for i in kept) if aggregation == "verl_legacy" else 1)
    return math.fsum(mean * size for mean, size in zip(means, sizes, strict=True)) / sum(sizes)


@st.composite
def mini_batches(draw):
    """(losses, groups, micro-batches, mask): up to 12 responses of 0 to 9 tokens."""
    count = draw(st.integers(1, 12))
    losses = [draw(st.lists(st.floats(-3, 3), min_size=0, max_size=9)) for _ in range(count)]
    groups, micro = ([draw(st.integers(0, 3)) for _ in range(count)] for _ in range(2))
    mask = [draw(st.booleans()) for _ in range(count)]
    assume(any(kept and loss for kept, loss in zip(mask, losses, strict=True)))
    return losses, groups, micro, mask


def weights_of(losses, groups, micro, mask, aggregation) -> torch.Tensor:
    return token_weights(
        torch.tensor([len(loss) for loss in losses]),
        torch.tensor(groups),
        aggregation,
        mask=torch.tensor(mask),
        constant_length=CONSTANT,
        micro_batch_index=torch.tensor(micro),
        dtype=torch.float64,
    )


def flat(losses: list[list[float]]) -> torch.Tensor:
    return torch.tensor([value for loss in losses for value in loss], dtype=torch.float64)


@pytest.mark.parametrize("aggregation", ALL)
@given(batch=mini_batches())
def test_weighted_sum_equals_the_nested_means(aggregation, batch):
    total = (weights_of(*batch, aggregation) * flat(batch[0])).sum().item()
    assert total == pytest.approx(reference_loss(*batch, aggregation), rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("aggregation", MEANS)
@given(batch=mini_batches())
def test_weights_of_a_mean_sum_to_one(aggregation, batch):
    weights = weights_of(*batch, aggregation)
    assert weights.sum().item() == pytest.approx(1, rel=1e-12)
    assert (weights >= 0).all()


@pytest.mark.parametrize("aggregation", ALL)
@given(batch=mini_batches(), random=st.randoms())
def test_the_order_of_responses_does_not_matter(aggregation, batch, random):
    order = list(range(len(batch[0])))
    random.shuffle(order)
    shuffled = tuple([column[i] for i in order] for column in batch)
    one = (weights_of(*batch, aggregation) * flat(batch[0])).sum().item()
    other = (weights_of(*shuffled, aggregation) * flat(shuffled[0])).sum().item()
    assert one == pytest.approx(other, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("aggregation", ALL)
@given(batch=mini_batches())
def test_masked_and_empty_responses_are_as_if_they_were_not_there(aggregation, batch):
    losses, _, _, mask = batch
    kept = [i for i in range(len(losses)) if mask[i] and losses[i]]
    without = weights_of(*([column[i] for i in kept] for column in batch), aggregation)
    inside = torch.tensor([mask[i] for i in range(len(losses)) for _ in losses[i]])
    weights = weights_of(*batch, aggregation)
    assert (weights[~inside] == 0).all()
    torch.testing.assert_close(weights[inside], without, rtol=1e-12, atol=0)


@pytest.mark.parametrize("aggregation", ["token_mean", "prompt_token_mean", "sequence_mean", "sequence_sum_constant"])
@given(batch=mini_batches())
def test_gradients_of_micro_batches_add_up_to_that_of_the_mini_batch(aggregation, batch):
    losses, _, micro, _ = batch
    weights = weights_of(*batch, aggregation)
    owner = torch.tensor([micro[i] for i in range(len(losses)) for _ in losses[i]])
    whole, parts = (flat(losses).requires_grad_() for _ in range(2))
    (weights * whole.square()).sum().backward()
    for part in owner.unique():
        (weights[owner == part] * parts[owner == part].square()).sum().backward()
    torch.testing.assert_close(parts.grad, whole.grad, rtol=1e-12, atol=0)


def test_verl_legacy_depends_on_the_packing_and_the_token_mean_does_not():
    lengths, group = torch.tensor([1, 3]), torch.tensor([0, 0])

    def weights(aggregation, micro):
        return token_weights(lengths, group, aggregation, micro_batch_index=torch.tensor(micro)).tolist()

    assert weights("verl_legacy", [0, 1]) == pytest.approx([1 / 2, 1 / 6, 1 / 6, 1 / 6])
    assert weights("verl_legacy", [0, 0]) == pytest.approx([1 / 4] * 4)
    assert weights("token_mean", [0, 1]) == weights("token_mean", [0, 0]) == [1 / 4] * 4


def test_verl_legacy_weighs_a_micro_batch_by_its_responses_as_the_reproduction_did():
    lengths, one = torch.tensor([100, 10, 10, 10]), torch.tensor([0, 1, 1, 1])
    weights = token_weights(lengths, torch.zeros_like(one), "verl_legacy", micro_batch_index=one)
    assert weights[0].item() == pytest.approx(0.0025)
    assert weights[-1].item() == pytest.approx(0.025)


@given(batch=mini_batches(), aggregation=st.sampled_from(ALL))
def test_a_kl_of_its_own_average_is_that_average_whatever_the_losss_weights_are(batch, aggregation):
    losses, _, _, mask = batch
    weights, lengths = weights_of(*batch, aggregation), torch.tensor([len(loss) for loss in losses])
    kept = [math.fsum(loss) for loss, carries in zip(losses, mask, strict=True) if carries and loss]
    sizes = [len(loss) for loss, carries in zip(losses, mask, strict=True) if carries and loss]
    wanted = {
        "response_mean": math.fsum(total / size for total, size in zip(kept, sizes, strict=True)) / len(kept),
        "response_sum": math.fsum(kept) / len(kept),
    }
    for name, value in wanted.items():
        scale = kl_scale(weights, lengths, name, mask=torch.tensor(mask))
        assert (weights * scale * flat(losses)).sum().item() == pytest.approx(value, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("aggregation", ALL)
def test_all_masked_weighs_nothing(aggregation):
    weights = weights_of([[1.0, 2.0], [3.0]], [0, 1], [0, 1], [False, False], aggregation)
    assert weights.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("aggregation", ALL)
def test_an_empty_mini_batch_has_no_weights(aggregation):
    empty = torch.zeros(0, dtype=torch.int64)
    assert token_weights(empty, empty, aggregation, constant_length=8, micro_batch_index=empty).shape == (0,)


def test_group_labels_may_be_any_integers():
    lengths = torch.tensor([2, 1, 1])
    some = token_weights(lengths, torch.tensor([7, -3, 7]), "prompt_token_mean")
    assert some.tolist() == pytest.approx([1 / 6, 1 / 6, 1 / 2, 1 / 6])


def test_float32_weights_are_computed_in_float64():
    lengths = torch.tensor([20480, 1])
    weights = token_weights(lengths, torch.tensor([0, 1]), "token_mean")
    assert weights.dtype == torch.float32
    assert weights.double().sum().item() == pytest.approx(1, rel=1e-7)


def test_a_missing_argument_is_named():
    lengths = torch.tensor([2])
    with pytest.raises(ValueError, match="constant_length"):
        token_weights(lengths, lengths, "sequence_sum_constant")
    with pytest.raises(ValueError, match="micro_batch_index"):
        token_weights(lengths, lengths, "verl_legacy")
