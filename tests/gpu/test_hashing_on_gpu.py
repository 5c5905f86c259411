"""The checksums of weights: what a GPU and a CPU thread hash a second, and that ours is SGLang's on the device."""

import importlib.util
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from rollout.weights import checksums
from rollout.weights.checksums import cpu_hash
from tests.gpu.place import DEVICE, ON_CPU

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(50)]
CPU_BYTES = 16 << 20


def cuda_hash(parts: Sequence[torch.Tensor]) -> str:
    """What a server on a GPU reports."""
    return checksums._text(int(checksums.cuda_sum(parts)))


def test_speed(record: Callable[[str, Any], None]) -> None:
    """Weights of a large layer; on the CPU a part of them, for its time is that of its bytes."""
    generator = torch.Generator().manual_seed(0)
    small = torch.randint(-(1 << 15), 1 << 15, (CPU_BYTES // 2,), generator=generator, dtype=torch.int16)
    small = small.view(torch.bfloat16)
    large = small.to(DEVICE).repeat(1 if ON_CPU else 128)  # 2 GiB
    found = {
        "a GPU server's hash on the device": _speed(cuda_hash, large),
        "a GPU server's hash on a CPU thread": _speed(cuda_hash, small),
        "a CPU server's hash (SHA-256)": _speed(cpu_hash, small),
    }
    record("GB/s", found)
    assert cuda_hash([small.to(DEVICE)]) == cuda_hash([small])
    if not ON_CPU:
        assert found["a GPU server's hash on the device"] > 10 * found["a GPU server's hash on a CPU thread"]


@pytest.mark.parametrize("size", [0, 1, 8191, 8192 * 2, 100_003])
def test_it_is_sglangs(size: int) -> None:
    if ON_CPU or importlib.util.find_spec("sglang") is None:
        pytest.skip("SGLang's kernel wants a GPU")
    from sglang.kernels.ops.memory.gpu_tensor_hash import gpu_tensor_hash

    tensor = torch.randn(size, device=DEVICE).bfloat16()
    if size:
        assert int(cuda_hash([tensor]), 16) == gpu_tensor_hash(tensor) & (1 << 64) - 1
    assert cuda_hash([tensor]) == cuda_hash([tensor.cpu()])


def _speed(function: Callable[[list[torch.Tensor]], str], tensor: torch.Tensor) -> float:
    """GB/s, the better of two. The result is text, so that the device has finished."""
    seconds = []
    for _ in range(2):
        began = time.perf_counter()
        function([tensor])
        seconds.append(time.perf_counter() - began)
    return tensor.numel() * tensor.element_size() / 1e9 / min(seconds)
