"""Vocabulary-parallel log-probs and entropies, values and gradients, against a softmax in float64."""

import pytest
import torch

from megatron_dapo.actor.model.log_prob import VocabularyShard, token_log_probs

VOCABULARY = 53


def case(dtype: torch.dtype, columns: int = VOCABULARY):
    """Logits [40, columns] with a wide range, 17 rows of them in no order, targets, and gradients to send back."""
    generator = torch.Generator().manual_seed(7)
    logits = (torch.randn(40, columns, generator=generator, dtype=torch.float64) * 6 + 30).to(dtype)
    rows = torch.randperm(40, generator=generator)[:17]
    targets = torch.randint(0, VOCABULARY, (17,), generator=generator)
    down = torch.randn(2, 17, generator=generator, dtype=torch.float64)
    return logits, rows, targets, down


def reference(logits, rows, targets, down, temperature):
    """Values and gradient by torch's own log_softmax and autograd, in float64."""
    x = logits.detach().double().requires_grad_()
    log_pi = torch.log_softmax(x[rows, :VOCABULARY] / temperature, dim=-1)
    log_probs = log_pi[torch.arange(len(rows)), targets]
    entropy = -(log_pi.exp() * log_pi).sum(-1)
    (log_probs * down[0] + entropy * down[1]).sum().backward()
    return log_probs.detach(), entropy.detach(), x.grad


def ours(logits, rows, targets, down, temperature, shard, entropy_gradient=True, **options):
    x = logits.detach().clone().requires_grad_()
    before = x.detach().clone()
    log_probs, entropy = token_log_probs(x, rows, targets, shard, temperature=temperature, **options)
    entropy = entropy if entropy_gradient else entropy.detach()
    (log_probs * down[0].to(log_probs) + entropy * down[1].to(entropy)).sum().backward()
    assert torch.equal(x, before)
    return log_probs.detach(), entropy.detach(), x.grad


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk", [1, 5, 1024])
@pytest.mark.parametrize(
    ("dtype", "value", "gradient"),
    [(torch.float64, 1e-13, 1e-13), (torch.float32, 2e-5, 2e-6), (torch.bfloat16, 2e-5, 8e-3)],
    ids=str,
)
def test_values_and_gradients(dtype, value, gradient, chunk, temperature):
    """bfloat16's gradient is exact in float32 and then rounded to the type of the logits: 8 bits."""
    data = case(dtype)
    shard = VocabularyShard(start=0, size=VOCABULARY)
    got = ours(*data, temperature, shard, chunk=chunk)
    wanted = reference(*data, temperature)
    torch.testing.assert_close(got[0].double(), wanted[0], atol=value, rtol=value)
    torch.testing.assert_close(got[1].double(), wanted[1], atol=value, rtol=value)
    torch.testing.assert_close(got[2].double(), wanted[2], atol=gradient * 0.1, rtol=gradient)
    assert got[0].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert got[2].dtype == dtype


def test_padding_columns_and_other_rows_do_not_count():
    logits, rows, targets, down = case(torch.float64, columns=64)
    logits[:, VOCABULARY:] = 1e4
    shard = VocabularyShard(start=0, size=VOCABULARY)
    got = ours(logits, rows, targets, down, 1.0, shard)
    torch.testing.assert_close(got, reference(logits, rows, targets, down, 1.0))
    assert torch.count_nonzero(got[2][:, VOCABULARY:]) == 0
    assert torch.count_nonzero(got[2].abs().sum(1)) == len(rows)


def test_without_entropy_gradient():
    logits, rows, targets, down = case(torch.float64)
    shard = VocabularyShard(start=0, size=VOCABULARY)
    got = ours(logits, rows, targets, down, 1.0, shard, entropy_gradient=False)
    wanted = reference(logits, rows, targets, down * torch.tensor([[1.0], [0.0]]), 1.0)
    torch.testing.assert_close(got[2], wanted[2])
    torch.testing.assert_close(got[1], wanted[1])


def test_gradcheck():
    logits, rows, targets, _ = case(torch.float64)
    shard = VocabularyShard(start=0, size=VOCABULARY)
    small = (logits[:, :] / 6).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: token_log_probs(x, rows[:3], targets[:3], shard, temperature=0.8, chunk=2), (small,)
    )


def test_no_rows_gives_nothing_and_a_gradient_of_zeros():
    logits = torch.randn(4, VOCABULARY, requires_grad=True)
    none = torch.empty(0, dtype=torch.int64)
    shard = VocabularyShard(start=0, size=VOCABULARY)
    log_probs, entropy = token_log_probs(logits, none, none, shard)
    (log_probs.sum() + entropy.sum()).backward()
    assert log_probs.shape == entropy.shape == (0,)
    assert torch.equal(logits.grad, torch.zeros_like(logits))


def test_huge_and_tiny_logits_stay_finite():
    logits = torch.zeros(2, VOCABULARY)
    logits[0, 3] = 3e4
    logits[1, :] = -3e4
    rows, targets = torch.tensor([0, 1, 0]), torch.tensor([3, 8, 9])
    shard = VocabularyShard(start=0, size=VOCABULARY)
    log_probs, entropy = token_log_probs(logits, rows, targets, shard)
    torch.testing.assert_close(log_probs, torch.tensor([0.0, -float(torch.tensor(53.0).log()), -3e4]))
    torch.testing.assert_close(entropy, torch.tensor([0.0, float(torch.tensor(53.0).log()), 0.0]))


def peak_floats(rows: int, chunk: int) -> int:
    """Most float32 numbers that live at once while log-probs of bfloat16 logits go forward and backward."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        most = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, tuple | list) else [out]:
                if isinstance(tensor, torch.Tensor) and tensor.dtype == torch.float32:
                    self.most = max(self.most, tensor.numel())
            return out

    logits = torch.randn(rows, 997).bfloat16().requires_grad_()
    every = torch.arange(rows)
    shard = VocabularyShard(start=0, size=997)
    with Largest() as mode:
        log_probs, _ = token_log_probs(logits, every, every, shard, chunk=chunk)
        log_probs.sum().backward()
    return mode.most


def test_never_more_than_a_chunk_in_float32():
    assert peak_floats(rows=256, chunk=16) == 16 * 997


def shards_of(place, dtype, temperature, columns):
    """One rank's values and gradient on its columns; runs in a process of its own."""
    torch.distributed.init_process_group(
        "gloo", init_method=place.rendezvous, rank=place.rank, world_size=place.world_size
    )
    logits, rows, targets, down = case(dtype, columns=columns * place.world_size)
    logits[:, VOCABULARY:] = 99.0
    mine = logits[:, place.rank * columns : (place.rank + 1) * columns].contiguous()
    start = place.rank * columns
    size = min(columns, VOCABULARY - start)
    shard = VocabularyShard(start=start, size=size, group=torch.distributed.group.WORLD)
    return ours(mine, rows, targets, down, temperature, shard, chunk=4), (logits, rows, targets, down)


@pytest.mark.parametrize("columns", [27, 32], ids=["one column padded", "padded"])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-5)], ids=["float64", "float32"]
)
def test_two_tensor_parallel_ranks(gloo, dtype, tolerance, columns):
    results = gloo(2, shards_of, dtype, 0.9, columns)
    wanted = reference(*results[0][1], 0.9)
    for got, _ in results:
        torch.testing.assert_close(got[0].double(), wanted[0], atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(got[1].double(), wanted[1], atol=tolerance, rtol=tolerance)
    gradient = torch.cat([got[2] for got, _ in results], dim=1).double()
    torch.testing.assert_close(gradient, wanted[2], atol=tolerance * 0.1, rtol=tolerance)
    assert torch.equal(results[0][0][0], results[1][0][0])
