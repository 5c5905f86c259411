"""Checksums against an independent transcription: transformers' own state dict, joined by hand, and hashlib."""

import hashlib
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rollout.checksums import expected_checksums, verify
from rollout.client import ServerInfo
from rollout.errors import WeightMismatch
from rollout.hashes import cpu_hash, cuda_hash
from tests.rollout.folders import VOCABULARY, save_model

CPU = ServerInfo(version="0.5.17", device="cpu", dtype="float32", tensor_parallel=1)


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
    info = ServerInfo(version="x", device="cuda", dtype="bfloat16", tensor_parallel=4)
    checksums = expected_checksums(tmp_path, info)
    layer = "model.layers.0."

    def same(rank: int, name: str, tensor: torch.Tensor) -> bool:
        return checksums[rank][name] == cuda_hash(tensor.to(torch.bfloat16))

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
        "c is not reported",
        "d is not in the published files",
    )
    assert "http://here: 3 tensors" in str(caught.value)
    with pytest.raises(WeightMismatch, match=r"a \(rank 1\) is not reported"):
        verify({0: {"a": "1"}, 1: {"a": "1"}}, {0: {"a": "1"}})


def test_what_is_not_known_is_refused(tmp_path: Path) -> None:
    save_model(tmp_path, "qwen3", seed=0, num_hidden_layers=1, num_key_value_heads=1)
    with pytest.raises(ValueError, match=r"tensor_parallel = 2.*1 key heads"):
        expected_checksums(tmp_path, ServerInfo(version="x", device="cpu", dtype="float32", tensor_parallel=2))
    with pytest.raises(ValueError, match="int8"):
        expected_checksums(tmp_path, ServerInfo(version="x", device="cpu", dtype="int8", tensor_parallel=1))
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"model\.norm\.weight, which is in none"):
        expected_checksums(tmp_path, CPU)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace("Qwen3ForCausalLM", "MambaForCausalLM"))
    with pytest.raises(ValueError, match="MambaForCausalLM"):
        expected_checksums(tmp_path, CPU)


def test_the_cpu_hash_is_sha256() -> None:
    tensor = torch.randn(7, 5)
    assert cpu_hash(tensor) == sha(tensor)
    assert cpu_hash(tensor.t()) == sha(tensor.t())


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
    assert cuda_hash(_counting(size, dtype)) == GOLDEN[size, dtype]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_the_golden_hashes_are_sglangs() -> None:
    """Runs SGLang's kernels, loaded from their file alone, in Triton's interpreter."""
    script = Path(__file__).with_name("gpu_hash_by_triton.py")
    arguments = [f"{size}:{dtype}" for size, dtype in GOLDEN]
    done = subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert dict(zip(GOLDEN, done.stdout.split(), strict=True)) == GOLDEN
