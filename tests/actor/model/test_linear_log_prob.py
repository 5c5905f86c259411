"""Log-probs and entropies of a linear layer's output that is never held, against float64 and autograd."""

import pytest
import torch

from megatron_dapo.actor.model.log_prob import VocabularyShard, linear_token_log_probs

VOCABULARY, HIDDEN = 53, 16


def case(dtype: torch.dtype, columns: int = VOCABULARY):
    """Hidden states [40, 16], a weight [columns, 16], 17 of the rows in no order, targets, gradients to send back."""
    generator = torch.Generator().manual_seed(7)
    hidden = torch.randn(40, HIDDEN, generator=generator, dtype=torch.float64).to(dtype)
    weight = (torch.randn(columns, HIDDEN, generator=generator, dtype=torch.float64) * 2).to(dtype)
    rows = torch.randperm(40, generator=generator)[:17]
    targets = torch.randint(0, VOCABULARY, (17,), generator=generator)
    down = torch.randn(2, 17, generator=generator, dtype=torch.float64)
    return hidden, weight, rows, targets, down


def reference(hidden, weight, rows, targets, down, temperature):
    """Values, then gradients of hidden states and weight, by log_softmax and autograd in float64."""
    x, w = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    log_pi = torch.log_softmax((x[rows] @ w[:VOCABULARY].T) / temperature, dim=-1)
    log_probs = log_pi[torch.arange(len(rows)), targets]
    entropy = -(log_pi.exp() * log_pi).sum(-1)
    (log_probs * down[0] + entropy * down[1]).sum().backward()
    return log_probs.detach(), entropy.detach(), x.grad, w.grad


def ours(hidden, weight, rows, targets, down, temperature, shard, entropy_gradient=True, **options):
    x, w = hidden.detach().clone().requires_grad_(), weight.detach().clone().requires_grad_()
    log_probs, entropy = linear_token_log_probs(x, w, rows, targets, shard, temperature=temperature, **options)
    entropy = entropy if entropy_gradient else entropy.detach()
    (log_probs * down[0].to(log_probs) + entropy * down[1].to(entropy)).sum().backward()
    return log_probs.detach(), entropy.detach(), x.grad, w.grad


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("block", [1, 10, None])
@pytest.mark.parametrize(
    ("dtype", "value", "gradient"),
    [(torch.float64, 1e-13, 1e-12), (torch.float32, 2e-5, 2e-5), (torch.bfloat16, 0.2, 0.1)],
    ids=str,
)
def test_values_and_gradients(dtype, value, gradient, block, temperature):
    """In bfloat16 the product itself is rounded to 8 bits, of logits up to 30, as the output layer rounds it."""
    data = case(dtype, columns=64)  # 11 of them padding
    shard = VocabularyShard(start=0, size=VOCABULARY)
    got = ours(*data, temperature, shard, block=block)
    wanted = reference(*data, temperature)
    for mine, theirs in zip(got[:2], wanted[:2], strict=True):
        torch.testing.assert_close(mine.double(), theirs, atol=value, rtol=value)
    for mine, theirs in zip(got[2:], wanted[2:], strict=True):
        assert mine.dtype == dtype
        assert float((mine.double() - theirs).norm() / theirs.norm()) < gradient
    assert torch.count_nonzero(got[3][VOCABULARY:]) == 0


@pytest.mark.parametrize("block", [10, None])
def test_a_weight_in_bfloat16_is_multiplied_in_the_type_of_the_hidden_states(block):
    """An output layer in float32 below a trunk in bfloat16: float64's values and gradients within law 1's bound. Only
    the gradient of the weight is rounded, once, to the weight's type."""
    narrow = case(torch.bfloat16, columns=64)
    hidden, weight = narrow[0].float(), narrow[1]
    shard = VocabularyShard(start=0, size=VOCABULARY)
    got = ours(hidden, weight, *narrow[2:], 0.7, shard, block=block)
    assert [one.dtype for one in got] == [torch.float32] * 3 + [torch.bfloat16]
    wide = ours(hidden, weight.float(), *narrow[2:], 0.7, shard, block=block)
    for mine, theirs in zip(wide, reference(*narrow, 0.7), strict=True):
        assert float((mine.double() - theirs).norm() / theirs.norm()) < 1e-6
    for mine, theirs in zip(got, wide, strict=True):
        assert torch.equal(mine, theirs.to(mine.dtype))


def test_gradcheck():
    hidden, weight, _, targets, _ = case(torch.float64)
    shard = VocabularyShard(start=0, size=VOCABULARY)
    x, w = hidden[:4].requires_grad_(), (weight / 4).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x, w: linear_token_log_probs(x, w, torch.tensor([2, 0]), targets[:2], shard, temperature=0.8, block=20),
        (x, w),
    )


def test_without_entropy_gradient():
    data = case(torch.float64)
    shard = VocabularyShard(start=0, size=VOCABULARY)
    got = ours(*data, 1.0, shard, entropy_gradient=False)
    wanted = reference(*data[:4], data[4] * torch.tensor([[1.0], [0.0]]), 1.0)
    torch.testing.assert_close(got[2:], wanted[2:])


def test_no_rows_gives_nothing_and_gradients_of_zeros():
    hidden, weight, _, _, _ = case(torch.float32)
    none = torch.empty(0, dtype=torch.int64)
    shard = VocabularyShard(start=0, size=VOCABULARY)
    got = ours(hidden, weight, none, none, torch.empty(2, 0), 1.0, shard)
    assert got[0].shape == got[1].shape == (0,)
    assert torch.count_nonzero(got[2]) == torch.count_nonzero(got[3]) == 0


def test_the_logits_never_exist():
    """No tensor but the weight and its gradient, [997, 16], is larger than a block of logits, [256, 128]."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        most = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, tuple | list) else [out]:
                if isinstance(tensor, torch.Tensor):
                    self.most = max(self.most, tensor.numel())
            return out

    hidden, weight = torch.randn(256, 16, requires_grad=True), torch.randn(997, 16, requires_grad=True)
    every = torch.arange(256)
    shard = VocabularyShard(start=0, size=997)
    with Largest() as mode:
        log_probs, _ = linear_token_log_probs(hidden, weight, every, every, shard, block=128)
        log_probs.sum().backward()
    assert mode.most == 256 * 128


def shards_of(place, columns):
    """One rank's values and gradients; runs in a process of its own."""
    torch.distributed.init_process_group(
        "gloo", init_method=place.rendezvous, rank=place.rank, world_size=place.world_size
    )
    hidden, weight, rows, targets, down = case(torch.float64, columns=columns * place.world_size)
    mine = weight[place.rank * columns : (place.rank + 1) * columns].contiguous()
    start = place.rank * columns
    size = min(columns, VOCABULARY - start)
    shard = VocabularyShard(start=start, size=size, group=torch.distributed.group.WORLD)
    return ours(hidden, mine, rows, targets, down, 0.9, shard, block=7)


@pytest.mark.parametrize("columns", [27, 32], ids=["one column padded", "padded"])
def test_two_tensor_parallel_ranks(gloo, columns):
    """Values are the same on both; the gradients of hidden states add up, those of the weight stand one above the
    other."""
    first, second = gloo(2, shards_of, columns)
    wanted = reference(*case(torch.float64, columns=2 * columns), 0.9)
    for got in (first, second):
        torch.testing.assert_close(got[:2], wanted[:2])
    torch.testing.assert_close(first[2] + second[2], wanted[2])
    torch.testing.assert_close(torch.cat([first[3], second[3]]), wanted[3])
