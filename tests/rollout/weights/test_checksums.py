"""Checksums against an independent transcription: transformers' own state dict, joined by hand, and hashlib."""

import hashlib
import importlib.util
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rollout.errors import WeightMismatch
from rollout.weights import checksums
from rollout.weights.checksums import ChecksumStream, cpu_hash, expected_checksums, verify
from rollout.wire.client import ServerInfo
from tests.rollout.folders import VOCABULARY, save_model

CPU = ServerInfo(device="cpu", dtype="float32", tensor_parallel=1)


def cuda_hash(parts: Sequence[torch.Tensor]) -> str:
    """What a server on a GPU reports."""
    return checksums._text(int(checksums.cuda_sum(parts)))


def sha(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize("tied", [False, True])
def test_the_names_and_hashes_of_a_whole_model(tmp_path: Path, kind: str, tied: bool) -> None:
    model = save_model(tmp_path, kind, seed=0, num_hidden_layers=2, tie_word_embeddings=tied)
    state = model.state_dict()
    expected = {}
    padding = torch.zeros(256 - VOCABULARY, 64)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if not (tied and name == "lm_head.weight"):
            expected[name] = sha(torch.cat([state.pop(name), padding]))
    state.pop("lm_head.weight", None)
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        for fused, parts in {"self_attn.qkv_proj": "qkv", "mlp.gate_up_proj": ("gate", "up")}.items():
            for kind_of in ("weight", "bias"):
                at = [f"{prefix}{fused.split('.')[0]}.{part}_proj.{kind_of}" for part in parts]
                if at[0] in state:
                    expected[f"{prefix}{fused}.{kind_of}"] = sha(torch.cat([state.pop(name) for name in at]))
    expected |= {name: sha(tensor) for name, tensor in state.items()}
    assert expected_checksums(tmp_path, CPU) == {0: expected}


def test_ranks_hold_heads_and_columns_of_their_own(tmp_path: Path) -> None:
    """Four heads of 16, two key heads, on four GPUs: a query head each, and each key head on two of them."""
    state = save_model(tmp_path, "qwen2", seed=1, num_hidden_layers=1).state_dict()
    info = ServerInfo(device="cuda", dtype="bfloat16", tensor_parallel=4)
    checksums = expected_checksums(tmp_path, info)
    layer = "model.layers.0."

    def same(rank: int, name: str, tensor: torch.Tensor) -> bool:
        return checksums[rank][name] == cuda_hash([tensor.to(torch.bfloat16)])

    for rank in range(4):
        query = state[layer + "self_attn.q_proj.weight"][16 * rank : 16 * (rank + 1)]
        at = slice(16 * (rank // 2), 16 * (rank // 2 + 1))
        key, value = (state[f"{layer}self_attn.{part}_proj.weight"][at] for part in "kv")
        assert same(rank, layer + "self_attn.qkv_proj.weight", torch.cat([query, key, value]))
        output = state[layer + "self_attn.o_proj.weight"][:, 16 * rank : 16 * (rank + 1)]
        assert same(rank, layer + "self_attn.o_proj.weight", output)
        gate, up = (state[f"{layer}mlp.{part}_proj.weight"][24 * rank : 24 * (rank + 1)] for part in ("gate", "up"))
        assert same(rank, layer + "mlp.gate_up_proj.weight", torch.cat([gate, up]))
        assert same(rank, layer + "input_layernorm.weight", state[layer + "input_layernorm.weight"])
        head = torch.cat([state["lm_head.weight"], torch.zeros(56, 64)])[64 * rank : 64 * (rank + 1)]
        assert same(rank, "lm_head.weight", head)


@pytest.mark.parametrize("published", [True, False])
def test_the_experts_of_a_layer_are_two_tensors(tmp_path: Path, published: bool) -> None:
    """Gate and up of each expert in turn, and the down projections: transformers holds a layer's experts the same way.
    On a CPU a rank's 20 rows of an expert are filled up to 32."""
    state = save_model(tmp_path, "qwen3_moe", seed=1, num_hidden_layers=2).state_dict()
    if published:
        text = (tmp_path / "config.json").read_text()
        (tmp_path / "config.json").write_text(text.replace("num_local_experts", "num_experts"))
    on_gpu = ServerInfo(device="cuda", dtype="float32", tensor_parallel=2)
    on_cpu = ServerInfo(device="cpu", dtype="float32", tensor_parallel=2)
    found = {info: expected_checksums(tmp_path, info) for info in (CPU, on_gpu, on_cpu)}
    for layer in ("model.layers.0.mlp.", "model.layers.1.mlp."):
        gate_up, down = (state[f"{layer}experts.{name}_proj"] for name in ("gate_up", "down"))
        gate, up = gate_up.chunk(2, 1)
        assert found[CPU][0][layer + "gate.weight"] == sha(state[layer + "gate.weight"])
        padded = [torch.cat([part, torch.zeros(6, 24, 64)], 1) for part in (gate, up)]
        assert found[CPU][0][layer + "experts.w13_weight"] == sha(torch.cat(padded, 1))
        assert found[CPU][0][layer + "experts.w2_weight"] == sha(torch.cat([down, torch.zeros(6, 64, 24)], 2))
        for rank in range(2):
            at = slice(20 * rank, 20 * (rank + 1))
            w13 = torch.cat([gate[:, at], up[:, at]], 1)
            assert found[on_gpu][rank][layer + "experts.w13_weight"] == cuda_hash([w13])
            assert found[on_gpu][rank][layer + "experts.w2_weight"] == cuda_hash([down[:, :, at]])
        # Two times 32 hold 40: the second rank has 8 of its own.
        w13 = torch.cat([part for each in (gate, up) for part in (each[:, 32:], torch.zeros(6, 24, 64))], 1)
        assert found[on_cpu][1][layer + "experts.w13_weight"] == sha(w13)
    assert len(found[CPU][0]) == 2 * 9 + 3
    assert not [name for name in found[CPU][0] if name.endswith((".down_proj.weight", ".gate_up_proj.weight"))]


def test_of_experts_no_more_is_kept_than_one_layers_gates(tmp_path: Path) -> None:
    """In the trainer's order, a tensor at a time; the names of a changed expert's tensors are in the message."""
    save_model(tmp_path, "qwen3_moe", seed=1, num_hidden_layers=2)
    tensors, config = load_file(tmp_path / "model.safetensors"), json.loads((tmp_path / "config.json").read_text())
    names = sorted(tensors, key=lambda name: ("down_proj" in name, name))
    names.sort(key=lambda name: name.split("experts.")[0])  # of each layer the down projections last
    kept = []
    with ChecksumStream(config, names, [CPU]) as stream:
        for name in names:
            stream.add({name: tensors[name]})
            stream.flush()
            assert all(stream._incomplete[name] is each for name, each in stream._copied.items())
            kept.append(sum(each.nbytes for each in stream._copied.values()))
        assert stream.finish()[CPU] == expected_checksums(tmp_path, CPU)
    assert max(kept) < 2 * 6 * 40 * 64 * 4
    assert kept[-1] == 0
    tensors["model.layers.1.mlp.experts.5.up_proj.weight"][0, 0] += 1
    changed = tmp_path / "changed"
    changed.mkdir()
    save_file(tensors, changed / "model.safetensors", {"format": "pt"})
    (changed / "config.json").write_text(json.dumps(config))
    with pytest.raises(WeightMismatch) as caught:
        verify(expected_checksums(tmp_path, CPU), expected_checksums(changed, CPU))
    assert [problem.split()[0] for problem in caught.value.problems] == ["model.layers.1.mlp.experts.w13_weight"]


def test_several_files_are_one_model(tmp_path: Path) -> None:
    save_model(tmp_path, "qwen3", seed=2, num_hidden_layers=1)
    whole = expected_checksums(tmp_path, CPU)
    tensors = load_file(tmp_path / "model.safetensors")
    names = sorted(tensors)
    (tmp_path / "model.safetensors").unlink()
    for number, share in enumerate((names[::2], names[1::2])):
        save_file({name: tensors[name] for name in share}, tmp_path / f"model-{number}.safetensors")
    assert expected_checksums(tmp_path, CPU) == whole


def test_a_difference_is_named() -> None:
    expected = {0: {"a": "1", "b": "2", "c": "3"}}
    verify(expected, {0: {"c": "3", "b": "2", "a": "1"}})
    with pytest.raises(WeightMismatch) as caught:
        verify(expected, {0: {"a": "1", "b": "9", "d": "4"}}, "http://here")
    assert caught.value.problems == (
        "b has 9, published 2",
        "c has no checksum, published 3",
        "d has 4, published nothing",
    )
    assert "http://here: 3 tensors" in str(caught.value)
    with pytest.raises(WeightMismatch, match=r"a \(rank 1\) has no checksum"):
        verify({0: {"a": "1"}, 1: {"a": "1"}}, {0: {"a": "1"}})


def test_what_is_not_known_is_refused(tmp_path: Path) -> None:
    save_model(tmp_path, "qwen3", seed=0, num_hidden_layers=1, num_key_value_heads=1)
    with pytest.raises(ValueError, match=r"tensor_parallel = 2.*1 key heads"):
        expected_checksums(tmp_path, ServerInfo(device="cpu", dtype="float32", tensor_parallel=2))
    with pytest.raises(ValueError, match="int8"):
        expected_checksums(tmp_path, ServerInfo(device="cpu", dtype="int8", tensor_parallel=1))
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"model\.norm\.weight, which is not among"):
        expected_checksums(tmp_path, CPU)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace("Qwen3ForCausalLM", "MambaForCausalLM"))
    with pytest.raises(ValueError, match="MambaForCausalLM"):
        expected_checksums(tmp_path, CPU)


def test_the_cpu_hash_is_sha256() -> None:
    tensor = torch.randn(7, 5)
    assert cpu_hash([tensor]) == sha(tensor)
    assert cpu_hash([tensor.t()]) == sha(tensor.t())


# Made by SGLang 0.5.17's own Triton kernels in Triton's interpreter; the next test makes them again where Triton is.
GOLDEN = {
    (5, "float32"): "1476bcb00037c406",
    (9001, "bfloat16"): "c107969895bb484b",
    (25000, "float16"): "7c549d897fece711",
    (3 * 8192, "float32"): "cbb26e3540fbfdf5",
}


def _counting(size: int, dtype: str) -> torch.Tensor:
    return (torch.arange(size) % 977 - 400).to(getattr(torch, dtype)) / 16


@pytest.mark.parametrize(("size", "dtype"), GOLDEN)
def test_the_gpu_hash_is_that_of_sglangs_kernel(size: int, dtype: str) -> None:
    assert cuda_hash([_counting(size, dtype)]) == GOLDEN[size, dtype]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_the_golden_hashes_are_sglangs() -> None:
    """Runs SGLang's kernels, loaded from their file alone, in Triton's interpreter."""
    script = Path(__file__).with_name("gpu_hash_by_triton.py")
    arguments = [f"{size}:{dtype}" for size, dtype in GOLDEN]
    done = subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert dict(zip(GOLDEN, done.stdout.split(), strict=True)) == GOLDEN


def by_the_book(words: list[int]) -> str:
    """SGLang's formula word by word, in Python's own integers."""
    low = 0xFFFFFFFF

    def fmix(v: int) -> int:
        v = (v ^ (v >> 16)) * 0x85EBCA6B & low
        v = (v ^ (v >> 13)) * 0xC2B2AE35 & low
        return v ^ (v >> 16)

    seeds = (0x243F6A88, ((0x243F6A88 * 0x9E3779B1) ^ 0xDEADBEEF) & low)
    total = 0
    for begin in range(0, len(words), 8192):
        halves = []
        for seed, factor, bits in zip(seeds, (0x27D4EB2D, 0x165667B1), (15, 13), strict=True):
            mixed = 0
            for i in range(begin, min(begin + 8192, len(words))):
                mixed += fmix(words[i] ^ ((i * factor + seed) & low) ^ ((i << bits | i >> (32 - bits)) & low))
            halves.append(fmix(mixed & low ^ 4 * len(words)))
        total += halves[0] << 32 | halves[1]
    total &= (1 << 64) - 1
    total = (total ^ (total >> 30)) * 0xBF58476D1CE4E5B9 & ((1 << 64) - 1)
    total = (total ^ (total >> 27)) * 0x94D049BB133111EB & ((1 << 64) - 1)
    return f"{total ^ (total >> 31):016x}"


def test_parts_are_hashed_as_the_whole_they_make(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of odd sizes, columns of a wider matrix, blocks much smaller than a part."""
    monkeypatch.setattr(checksums, "BLOCK_BYTES", 40_000)
    torch.manual_seed(3)
    columns = torch.randn(300, 200)[:, 20:113]
    for dtype in (torch.float32, torch.bfloat16):
        parts = [torch.randn(7, 93), columns, torch.randn(1, 93), torch.zeros(11, 93)]
        parts = [part.to(dtype) for part in parts]
        whole = torch.cat(parts)
        raw = whole.contiguous().view(torch.uint8).numpy().tobytes()
        raw += b"\0" * (-len(raw) % 4)
        words = [int.from_bytes(raw[at : at + 4], "little") for at in range(0, len(raw), 4)]
        assert cuda_hash(parts) == cuda_hash([whole]) == by_the_book(words)
        assert cpu_hash(parts) == sha(whole)


def test_a_stream_gives_the_same_checksums_whatever_comes_first(tmp_path: Path) -> None:
    save_model(tmp_path, "qwen2", seed=3, num_hidden_layers=2)
    config = json.loads((tmp_path / "config.json").read_text())
    tensors = load_file(tmp_path / "model.safetensors")
    kinds = [
        CPU,
        ServerInfo(device="cpu", dtype="float32", tensor_parallel=2),
        ServerInfo(device="cuda", dtype="bfloat16", tensor_parallel=4),
    ]
    for names in (sorted(tensors), sorted(tensors, reverse=True)):
        buffer = torch.empty(max(tensor.numel() for tensor in tensors.values()))
        with ChecksumStream(config, names, kinds) as stream:
            for name in names:
                place = buffer[: tensors[name].numel()].view(tensors[name].shape)
                place.copy_(tensors[name])
                stream.add({name: place})
                stream.flush()  # the memory is used again for the next one
            found = stream.finish()
        assert found == {info: expected_checksums(tmp_path, info) for info in kinds}
    with ChecksumStream(config, names, [CPU]) as stream:
        stream.add({name: tensors[name] for name in names[1:]})
        with pytest.raises(ValueError, match="never whole"):
            stream.finish()
