"""What the emulated device refuses of host tensors, and when the data of a collective is there."""

import ctypes
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.emulated.strict_ranks import GPU, full, join
from tools.rank_pool import RankPlace


def host_tensor(place: RankPlace, backend: str, call: str) -> None:
    join(place, backend)
    tensor = torch.ones(3)
    if call == "all_reduce":
        dist.all_reduce(tensor)
    elif call == "result of cpu()":
        dist.all_reduce(full(1, 3, backend=backend).cpu())
    elif call == "output":
        dist.all_gather_into_tensor(torch.empty(6), full(1, 3, backend=backend))


@pytest.mark.parametrize("call", ["all_reduce", "result of cpu()", "output"])
def test_a_host_tensor_is_refused(strict, gloo, call):
    assert gloo(2, host_tensor, "gloo", call) == [None, None]
    for rank, broken in enumerate(strict(2, host_tensor, "nccl", call)):
        assert broken.kind == "StrictError"
        assert f"rank {rank}: all_" in broken.text
        assert "is in host memory, and NCCL takes the GPU's only" in broken.text


def late(place: RankPlace, use: str) -> Any:
    """Rank 1 comes late to a sum, of which rank 0 already has the handle."""
    join(place, "nccl", bound=True)
    tensor = full(place.rank + 1, 3, backend="nccl")
    raw = torch.frombuffer((place_of := _memory(tensor)), dtype=torch.float32)
    dist.barrier()
    if place.rank == 1:
        time.sleep(1.0)
    work = dist.all_reduce(tensor, async_op=True)
    if use == "no wait":
        return (tensor + 1).tolist()
    began = time.monotonic()
    work.wait()
    waited, seen, done = time.monotonic() - began, raw.tolist(), work.is_completed()
    if use == "wait":
        found = tensor.tolist()
    elif use == "synchronize":
        torch.cuda.synchronize()
        found = raw.tolist()
    else:
        copy = torch.empty(3, pin_memory=True).copy_(tensor, non_blocking=True)
        if use == "pinned, synchronised":
            torch.cuda.current_stream().synchronize()
        found = copy.numpy().tolist()
    del place_of
    return {"waited": waited, "seen": seen, "done": done, "found": found}


def _memory(tensor: torch.Tensor) -> Any:
    """The tensor's bytes, as they are in memory: what no mode sees."""
    return (ctypes.c_char * (tensor.numel() * tensor.element_size())).from_address(tensor.data_ptr())


@pytest.mark.parametrize("use", ["wait", "synchronize", "pinned, synchronised"])
def test_wait_returns_before_the_data_is_there(strict, use):
    first = strict(2, late, use)[0]
    assert first["waited"] < 0.7, "the host went on"
    assert not first["done"]
    assert first["seen"] == [1.0] * 3, "memory still holds the old numbers"
    assert first["found"] == [3.0] * 3, "what is ordered behind the call sees the new ones"


def test_a_result_is_not_touched_before_wait(strict):
    broken = strict(2, late, "no wait")[0]
    assert broken.kind == "StrictError"
    assert "aten::add touches float32[3], its result, before all_reduce SUM of float32[3] was waited for" in broken.text


def test_pinned_memory_is_not_read_before_a_synchronisation(strict):
    broken = strict(2, late, "pinned")[0]
    assert broken.kind == "StrictError"
    assert "that a non-blocking copy from the device still fills" in broken.text


def overwritten(place: RankPlace, waits: bool) -> list[float]:
    """What is being sent is overwritten, after `wait` or without."""
    join(place, "nccl", bound=True)
    tensor = full(place.rank + 1, 3, backend="nccl")
    if place.rank == 1:
        dist.recv(tensor, 0)
        return tensor.tolist()
    work = dist.isend(tensor, 1)
    if waits:
        work.wait()
    tensor.zero_()
    return tensor.tolist()


def test_what_is_sent_is_not_overwritten_before_wait(strict):
    assert strict(2, overwritten, True) == [[0.0] * 3, [1.0] * 3]
    broken, _ = strict(2, overwritten, False, patience_s=3)  # the receiver waits in vain then
    assert "aten::zero_ touches float32[3], what it still sends, before send of float32[3] to 1" in broken.text


def views_of_late_data(place: RankPlace) -> list[list[float]]:
    """The views of a result are made before its data is there, and used in autograd afterwards."""
    join(place, "nccl", bound=True)
    whole = torch.empty(2, 3, device=GPU)
    dist.barrier()
    if place.rank == 1:
        time.sleep(0.5)
    dist.all_gather_into_tensor(whole, full(place.rank + 1, 3, backend="nccl"))
    first, second = whole.requires_grad_().unbind()
    (first * 2 + second * 3).sum().backward()
    return [second.tolist(), *whole.grad.tolist()]


def test_late_data_is_no_change_that_autograd_counts(strict):
    assert strict(2, views_of_late_data)[0] == [[2.0] * 3, [2.0] * 3, [3.0] * 3]


def both_sides(place: RankPlace) -> list[str]:
    """What CUDA refuses of one tensor there and one here."""
    there, here = torch.ones(3, device=GPU), torch.ones(3)
    answers = [str(there.device), str((there * 2).device), str(there.cpu().device), str(here.to(GPU).device)]
    for refused in (lambda: there + here, lambda: there.numpy(), lambda: torch.cat([there, here])):
        with pytest.raises(RuntimeError) as error:
            refused()
        answers.append(str(error.value))
    assert (there + torch.tensor(1.0)).tolist() == [2.0] * 3  # one number may come from the host
    assert there[torch.tensor([0, 1])].is_cuda  # so may an index
    return answers


def test_tensors_know_their_side(strict):
    ((where, product, back, moved, mixed, numpy, cat),) = strict(1, both_sides)
    assert (where, product, back, moved) == ("cuda:0", "cuda:0", "cpu", "cuda:0")
    assert "aten::add of tensors on both sides: device float32[3], host float32[3]" in mixed
    assert "numpy() of float32[3] on cuda:0" in numpy
    assert "aten::cat" in cat
