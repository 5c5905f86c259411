"""Buckets of the whole model: every tensor once and bit-exact in every layout, within the budget of memory."""

import ctypes
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.actor.gloo import RankPlace
from tests.actor.ranks import build
from tests.actor.tiny import save_tiny
from tests.actor.weights.test_hf_weights import assert_same_tensors, ranks_of

LAYOUTS = (
    {"tensor": 2, "pipeline": 2},
    {"data": 2},
    *(pytest.param(each, marks=pytest.mark.slow) for each in ({}, {"tensor": 2}, {"pipeline": 2})),
)
MIB = 1 << 20


class Kept:
    """A sink with one buffer, which is spoilt before it is used again."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.memory = torch.zeros(0, dtype=torch.uint8)
        self.tensors: dict[str, torch.Tensor] = {}
        self.sizes: list[tuple[int, int]] = []
        self.fails_at = fails_at

    def buffer(self, size: int) -> torch.Tensor:
        if self.fails_at == len(self.sizes):
            raise OSError("no room")
        self.memory.fill_(255)
        if self.memory.numel() < size:
            self.memory = torch.empty(size, dtype=torch.uint8)
        return self.memory[:size]

    def put(self, bucket, tensors: Mapping[str, torch.Tensor]) -> None:
        assert not self.tensors.keys() & tensors.keys(), "a tensor came twice"
        self.sizes.append((bucket.size, bucket.parameters))
        self.tensors |= {name: tensor.clone() for name, tensor in tensors.items()}


class Measured(Kept):
    """Keeps nothing."""

    def put(self, bucket, tensors: Mapping[str, torch.Tensor]) -> None:
        self.sizes.append((bucket.size, bucket.parameters))


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> list[Path]:
    kinds = (("qwen2", True), ("qwen3", False))
    return [save_tiny(tmp_path_factory.mktemp(kind), kind, tied=tied) for kind, tied in kinds]


def streamed(
    place: RankPlace, folder: Path, layout: dict, budget: int, dtype: torch.dtype, fails_at: int | None = None
) -> tuple[dict[str, torch.Tensor], list[tuple[int, int]]] | str:
    from megatron_dapo.actor.weights.hf_weights import stream_weights

    built = build(place, folder, layout)
    sink = Kept(fails_at) if place.rank == 0 else None
    try:
        stream_weights(built.chunks, built.hf, dtype=dtype, bucket_bytes=budget, sink=sink)
    except OSError as error:
        return str(error)
    return (sink.tensors, sink.sizes) if sink else ({}, [])


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_buckets_hold_the_model(gloo, models, layout):
    for folder in models:
        (tensors, sizes), *others = gloo(ranks_of(layout), streamed, folder, layout, 60_000, torch.float32)
        assert_same_tensors(tensors, load_file(folder / "model.safetensors"))
        assert all(size <= 60_000 or parameters == 1 for size, parameters in sizes)
        assert len(sizes) > 4
        assert max(parameters for _, parameters in sizes) > 1
        assert all(other == ({}, []) for other in others)


def test_the_servers_type_and_one_bucket_for_all(gloo, models):
    [(tensors, sizes)] = gloo(1, streamed, models[1], {}, 1 << 30, torch.bfloat16)
    expected = {name: tensor.bfloat16() for name, tensor in load_file(models[1] / "model.safetensors").items()}
    assert_same_tensors(tensors, expected)
    assert [size for size, _ in sizes] == [sum(tensor.nbytes for tensor in expected.values())]


def test_a_sink_that_fails_keeps_no_rank_waiting(gloo, models):
    results = gloo(2, streamed, models[0], {"tensor": 2}, 60_000, torch.float32, 2, timeout_s=60)
    assert results == ["no room", ({}, [])]


def extra_memory(place: RankPlace, folder: Path, layout: dict, budget: int) -> tuple[int, list[tuple[int, int]]]:
    """(bytes above what the process held before, buckets) of a rank, in the second of two passes."""
    from megatron_dapo.actor.weights.hf_weights import stream_weights

    _give_freed_memory_back()
    built = build(place, folder, layout)
    for _ in range(2):
        sink = Measured() if place.rank == 0 else None
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before = _memory("VmRSS")
        stream_weights(built.chunks, built.hf, dtype=torch.float32, bucket_bytes=budget, sink=sink)
        peak = _memory("VmHWM")
    return peak - before, sink.sizes if sink else []


def _give_freed_memory_back() -> None:
    """glibc would keep what is freed below a threshold that it raises by itself, to 32 MiB: noise of a parameter."""
    threshold = -3  # M_MMAP_THRESHOLD, malloc.h
    assert ctypes.CDLL(None).mallopt(threshold, 1 << 20) == 1


def _memory(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


@pytest.mark.parametrize("layout", [{"tensor": 2}, pytest.param({"pipeline": 2}, marks=pytest.mark.slow)], ids=str)
def test_no_rank_holds_more_than_two_buckets_besides_the_model(gloo, tmp_path, layout):
    folder = save_tiny(
        tmp_path,
        "qwen2",
        tied=False,
        vocab_size=4000,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=6,
        num_attention_heads=16,
        num_key_value_heads=8,
    )
    budget = 32 * MIB
    (rank_zero, sizes), (rank_one, _) = gloo(2, extra_memory, folder, layout, budget, timeout_s=300)
    assert sum(size for size, _ in sizes) > 280 * MIB
    assert len(sizes) > 8
    print(f"{layout}: rank 0 took {rank_zero / MIB:.0f} MiB, rank 1 {rank_one / MIB:.0f} MiB; bucket {budget / MIB}")
    assert budget < rank_zero < 2 * budget
    assert rank_one < 2 * budget
