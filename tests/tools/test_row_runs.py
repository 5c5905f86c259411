"""Bytes that go from file to file: they are the rows that the tensors' own way would put there."""

import os
from contextlib import ExitStack
from functools import partial

import pytest
import torch
from tools.conversion.row_runs import copy_bytes, runs_of

from megatron_dapo.actor.weights.safetensors_file import WeightsError, bytes_of
from megatron_dapo.actor.weights.shards import GateUp, QueryKeyValue, Replicated, Split
from tools.conversion import row_runs
from tools.convert_checkpoint import import_megatron

SHARDS = {
    "replicated": Replicated(name="norm", size=7),
    "rows": Split(name="embedding", shape=(11, 3), dim=0),
    "columns": Split(name="projection", shape=(5, 4), dim=1),
    "qkv": QueryKeyValue(query="q", key="k", value="v", groups=3, queries_per_group=2, head_dim=2, columns=(5,)),
    "qkv bias": QueryKeyValue(query="q", key="k", value="v", groups=2, queries_per_group=3, head_dim=2, columns=()),
    "gate and up": GateUp(gate="gate", up="up", shape=(4, 3)),
}


@pytest.mark.parametrize("kind", SHARDS)
def test_runs_are_the_rows_of_the_parameter(kind):
    """`full` splits the parameter by another way."""
    shards = SHARDS[kind]
    shape = shards.local_shape(1)
    parameter = torch.arange(torch.Size(shape).numel()).view(shape)
    tensors = shards.full([parameter])
    for start in range(shape[0]):
        for stop in range(start, shape[0] + 1):
            found = list(runs_of(shards, start, stop))
            rows = [tensors[run.name][run.start : run.start + run.rows] for run in found]
            assert torch.equal(torch.cat(rows) if rows else parameter[:0], parameter[start:stop])


def test_padding_rows_are_none():
    assert [run.rows for run in runs_of(SHARDS["rows"], 8, 12)] == [3]
    assert list(runs_of(SHARDS["rows"], 11, 12)) == []


def test_bytes_are_copied_to_their_place_and_a_short_source_is_found(tmp_path):
    (tmp_path / "source").write_bytes(bytes(range(100)))
    (tmp_path / "target").write_bytes(bytes(100))
    with (tmp_path / "source").open("rb") as source, (tmp_path / "target").open("r+b") as target:
        assert sum(copy_bytes(source.fileno(), 10, target.fileno(), 50, 20)) == 20
        with pytest.raises(OSError, match="10 of them lie behind"):
            list(copy_bytes(source.fileno(), 95, target.fileno(), 0, 15))
        assert os.pread(target.fileno(), 40, 40) == bytes(10) + bytes(range(10, 30)) + bytes(10)


@pytest.mark.parametrize("cuts", [(8,), (3, 5), (2, 4, 2)])
@pytest.mark.parametrize("piece_bytes", [1, 20, 2**20])
def test_strips_side_by_side_become_whole_rows(tmp_path, monkeypatch, cuts, piece_bytes):
    monkeypatch.setattr(row_runs, "PIECE_BYTES", piece_bytes)
    matrix = torch.arange(6 * 8, dtype=torch.uint8).view(6, 8)
    (tmp_path / "target").write_bytes(bytes(100))
    with (tmp_path / "target").open("r+b") as target, ExitStack() as stack:
        strips, begin = [], 0
        for number, cut in enumerate(cuts):
            source = stack.enter_context((tmp_path / str(number)).open("w+b"))
            source.write(b"head" + bytes(bytes_of(matrix[:, begin : begin + cut].contiguous())))
            source.flush()
            strips.append(row_runs.Strip(file=source.fileno(), offset=4, begin=begin, width=cut))
            begin += cut
        assert sum(row_runs.copy_rows(strips, 1, 4, target.fileno(), 50)) == 32
        assert os.pread(target.fileno(), 34, 49) == bytes(1) + bytes(bytes_of(matrix[1:5])) + bytes(1)
        with pytest.raises(OSError, match="behind the file's end"):
            list(row_runs.copy_rows(strips, 5, 2, target.fileno(), 0))


def test_a_streamed_tensor_is_the_same_file_as_a_saved_one(tmp_path):
    import_megatron()
    from tools.conversion.megatron_files import PartWriter

    tensor = torch.randn(1, 60, 50, dtype=torch.bfloat16)
    whole = bytes_of(tensor)
    written = []
    for name in ("saved", "streamed"):
        writer = PartWriter(tmp_path / name)
        writer.add("before", None, [None])
        if name == "saved":
            writer.add("weight", (3, 0, 0), tensor)
        else:
            pieces = (whole[start : start + 777] for start in range(0, len(whole), 777))
            writer.add_streamed("weight", (3, 0, 0), torch.empty_like(tensor), pieces)
        results, digest = writer.close()
        written.append(([(result.storage_data.offset, result.size_in_bytes) for result in results], digest))
    assert written[0] == written[1]
    assert (tmp_path / "saved").read_bytes() == (tmp_path / "streamed").read_bytes()
    short = PartWriter(tmp_path / "short")
    with pytest.raises(ValueError, match="5999 bytes of a tensor that has 6000"):
        short.add_streamed("weight", (0, 0, 0), torch.empty_like(tensor), iter([whole[1:]]))


@pytest.mark.parametrize("streamed", [True, False])
def test_a_disk_that_is_full_is_the_reason_that_is_given(tmp_path, streamed):
    """`torch.save` fails a second time while it closes what it has begun."""
    import_megatron()
    from tools.conversion.megatron_files import PartWriter

    (tmp_path / "full").symlink_to("/dev/full")
    writer, tensor = PartWriter(tmp_path / "full"), torch.zeros(1, 2**20)
    arguments = ("key", (0, 0), tensor)
    add = (
        partial(writer.add_streamed, *arguments, iter([bytes_of(tensor)]))
        if streamed
        else partial(writer.add, *arguments)
    )
    with pytest.raises(OSError, match="No space left"):
        add()


def test_a_source_that_ends_early_is_the_reason_that_is_given(tmp_path):
    import_megatron()
    from tools.conversion.megatron_files import PartWriter

    def pieces():
        yield memoryview(bytes(10))
        raise WeightsError("tensor x ends with the file")

    with pytest.raises(WeightsError, match="tensor x ends"):
        PartWriter(tmp_path / "part").add_streamed("key", (0, 0), torch.zeros(1, 20), pieces())
