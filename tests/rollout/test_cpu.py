"""The CPU support by itself: stand-ins, sampler hash, padding, and that it stays out of everybody's way."""

import os
import struct
import subprocess
import sys

import pytest
import torch

from rollout.cpu import SWITCH, plugin

MASK = 0xFFFFFFFF


def murmur3_32(data: bytes) -> int:
    """MurmurHash3_x86_32 with seed 0, as published, on bytes in blocks of four."""
    state = 0
    for (block,) in struct.iter_unpack("<I", data):
        block = block * 0xCC9E2D51 & MASK
        block = (block << 15 | block >> 17) & MASK
        state ^= block * 0x1B873593 & MASK
        state = (state << 13 | state >> 19) & MASK
        state = state * 5 + 0xE6546B64 & MASK
    state ^= len(data)
    state = (state ^ state >> 16) * 0x85EBCA6B & MASK
    state = (state ^ state >> 13) * 0xC2B2AE35 & MASK
    return state ^ state >> 16


def test_the_samplers_hash_is_murmurhash3() -> None:
    seeds = [0, 1, 42, 2**31, 2**32 + 7, 2**63 - 1]
    positions = [0, 1, 77, 40000, 2**31 - 1, 5]
    tokens = [0, 1, 199, 151935]
    hashed = plugin.murmur_hash32(
        torch.tensor(seeds, dtype=torch.int64).to(torch.uint64), torch.tensor(positions), torch.tensor(tokens)
    )
    for row, (seed, position) in enumerate(zip(seeds, positions, strict=True)):
        for column, token in enumerate(tokens):
            assert hashed[row, column].item() == murmur3_32(struct.pack("<QII", seed, position, token))
    # A vector of the published test suite, so that the reference above is no invention of ours.
    assert murmur3_32(b"test") == 0xBA6BD213


def test_the_hash_is_spread_evenly() -> None:
    hashed = plugin.murmur_hash32(torch.arange(100), torch.arange(100), torch.arange(1000)).double() / MASK
    assert abs(hashed.mean().item() - 0.5) < 0.005
    assert torch.histc(hashed, 10, 0, 1).std() < 200


@pytest.mark.parametrize("rows", [1, 3, 15, 16, 40])
def test_a_row_of_a_product_does_not_depend_on_the_others(rows: int) -> None:
    weight, x = torch.randn(48, 384), torch.randn(64, 384)

    def apply(method: object, layer: object, x: torch.Tensor, bias: object) -> torch.Tensor:
        assert x.shape[0] >= plugin.ROWS
        return torch.nn.functional.linear(x, weight)

    whole = plugin.linear_in_full_rows(apply, None, None, x)
    part = plugin.linear_in_full_rows(apply, None, None, x[:rows])
    assert part.shape == (rows, 48)
    assert torch.equal(part, whole[:rows])


def python(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        env={name: value for name, value in os.environ.items() if name != SWITCH} | environment,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_stand_in_can_be_imported_decorated_with_and_subclassed_but_not_called() -> None:
    out = python(
        "import sys\n"
        "from rollout.cpu import standins\n"
        "before = len(sys.meta_path)\n"
        "assert standins.install(('json', 'gpu_only_a', 'gpu_only_b')) == ['gpu_only_a', 'gpu_only_b']\n"
        "import json, gpu_only_a, gpu_only_a.language as tl\n"
        "from gpu_only_b.runtime.jit import Kernel\n"
        "class Mine(Kernel): pass\n"
        "assert json.loads('1') == 1 and not gpu_only_a.anything and tl.float32 is tl.float32\n"
        "try:\n"
        "    gpu_only_b.empty(3)\n"
        "except NameError:\n"
        "    import gpu_only_b\n"
        "try:\n"
        "    gpu_only_b.empty(3)\n"
        "except standins.GpuOnlyError as error:\n"
        "    print(error)\n"
    )
    assert out == "gpu_only_b.empty was called, but gpu_only_b is not installed here"


@pytest.mark.parametrize(("library", "stood_in"), [("sm90/common_ops.abi3.so", True), ("common_ops.abi3.so", False)])
def test_the_cuda_build_of_sgl_kernel_is_replaced_and_the_cpu_build_is_not(library, stood_in, tmp_path) -> None:
    """The CUDA build cannot be imported without a driver, and lacks functions that SGLang asks of it on a CPU."""
    place = tmp_path / "sgl_kernel" / library
    place.parent.mkdir(parents=True)
    place.touch()
    (tmp_path / "sgl_kernel" / "__init__.py").write_text("real = True")
    out = python(
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from rollout.cpu import standins\n"
        "print(standins.install(('sgl_kernel',)))\n"
        "from sgl_kernel import real\n"
        "print(real is True)\n"
    )
    assert out == ("['sgl_kernel']\nFalse" if stood_in else "[]\nTrue")


def test_a_kernel_of_an_absent_triton_is_a_plain_function_that_cannot_be_launched() -> None:
    out = python(
        "import importlib.util, sys\n"
        "from rollout.cpu import standins\n"
        "importlib.util.find_spec = lambda name: None\n"
        "standins.install(('triton',))\n"
        "import triton, triton.language as tl\n"
        "@triton.autotune(configs=[triton.Config({'BLOCK': 4}, num_warps=2)], key=['n'])\n"
        "@triton.jit(do_not_specialize=['n'])\n"
        "def kernel(x, n, BLOCK: tl.constexpr): return x\n"
        "assert triton.cdiv(7, 2) == 4 and [triton.next_power_of_2(n) for n in (1, 3, 8)] == [1, 4, 8]\n"
        "try:\n"
        "    kernel[(1,)](1, 2)\n"
        "except TypeError:\n"
        "    print('not launched')\n"
    )
    assert out == "not launched"


def test_the_plugin_does_nothing_in_a_process_that_our_launcher_did_not_start() -> None:
    code = (
        "import sys\n"
        "from rollout.cpu import cpu_mode, plugin\n"
        "plugin.register()\n"
        "print(cpu_mode(), plugin.HOOKS[cpu_mode()], any(name.startswith('sglang') for name in sys.modules))\n"
    )
    assert python(code) == "off {} False"


def test_attention_in_groups_is_torch_natives() -> None:
    """A batch of prompts, parts of prompts after cached ones, and single tokens, against SGLang's own backend."""
    out = python(ATTENTION, SGLANG_USE_CPU_ENGINE="1", OMP_NUM_THREADS="1", **{SWITCH: "fast"}).splitlines()
    assert float(out[-1]) < 1e-5
    # A request's padding is decided by its own lengths: neighbours cannot change its last bits.
    assert out[-2] == "{(1, 64): [0, 2], (1, 128): [1], (1, 512): [3], (32, 64): [4]}"
    assert out[-3] == "16 [2, 2, 1]"


ATTENTION = """
from types import SimpleNamespace as Named
from rollout.cpu import standins
standins.install()
import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from rollout.cpu import attention
from rollout.cpu.attention import BatchedAttention, backend_for

attention.MASK_ELEMENTS, attention.KEY_ELEMENTS = 16 * 128 * 2, 128 * 2 * 8 * 2  # so that groups are split
torch.manual_seed(0)
HEADS, KEY_HEADS, WIDTH, SLOTS = 6, 2, 8, 4000

class Pool:
    def __init__(self):
        self.k, self.v = torch.zeros(SLOTS, KEY_HEADS, WIDTH), torch.zeros(SLOTS, KEY_HEADS, WIDTH)
    def set_kv_buffer(self, layer, loc, k, v):
        where = loc.loc if hasattr(loc, "loc") else loc[0]
        self.k[where], self.v[where] = k.view(-1, KEY_HEADS, WIDTH), v.view(-1, KEY_HEADS, WIDTH)
    def get_key_buffer(self, layer_id): return self.k
    def get_value_buffer(self, layer_id): return self.v

def runner():
    table = torch.randperm(SLOTS - 1)[: 9 * 400].view(9, 400).int() + 1
    requests = Named(req_to_token=table)
    model = torch.nn.Module()
    model.layer = RadixAttention(HEADS, WIDTH, 0.3, KEY_HEADS, 0)
    return Named(device="cpu", dtype=torch.float32, req_to_token_pool=requests, token_to_kv_pool=Pool(), model=model,
                 server_args=Named(pp_size=1, enable_lora=None, speculative_algorithm=None))

layer = Named(layer_id=0, tp_q_head_num=HEADS, tp_k_head_num=KEY_HEADS, qk_head_dim=WIDTH, v_head_dim=WIDTH,
              scaling=0.3, is_cross_attention=False, attn_type=AttentionType.DECODER, sliding_window_size=None)
worst = 0.0
for prefix, new, mode in [
    ([0, 0, 0, 0], [5, 1, 70, 128], ForwardMode.EXTEND),
    ([0, 40, 63, 300, 7], [1, 1, 30, 99, 16], ForwardMode.EXTEND),
    ([0, 63, 64, 399, 20], [1] * 5, ForwardMode.DECODE),
    ([9, 10], [1, 1], ForwardMode.DECODE),
    ([0] * 6, [90, 91, 92, 93, 94, 95], ForwardMode.EXTEND),
]:
    torch.manual_seed(1)
    results = []
    for backend in (TorchNativeAttnBackend, backend_for):
        torch.manual_seed(2)
        its = runner()
        its.token_to_kv_pool.k.normal_(); its.token_to_kv_pool.v.normal_()
        requests = torch.randperm(9)[: len(new)]
        lengths = torch.tensor(prefix) + torch.tensor(new)
        table = its.req_to_token_pool.req_to_token
        places = torch.cat([table[r, p : p + n] for r, p, n in zip(requests, prefix, new)]).long()
        batch = Named(forward_mode=mode, seq_lens=lengths, seq_lens_cpu=lengths, encoder_lens=None,
                      req_pool_indices=requests, out_cache_loc=places, extend_seq_lens=torch.tensor(new),
                      extend_prefix_lens=torch.tensor(prefix), extend_seq_lens_cpu=new, extend_prefix_lens_cpu=prefix,
                      input_ids=torch.zeros(sum(new), dtype=torch.long), input_embeds=None, replace_embeds=None)
        tokens = sum(new)
        q, k, v = (torch.randn(tokens, heads * WIDTH) for heads in (HEADS, KEY_HEADS, KEY_HEADS))
        made = backend(its)
        made.init_forward_metadata(batch)
        forward = made.forward_decode if mode.is_decode() else made.forward_extend
        results.append(forward(q, k.view(-1, KEY_HEADS, WIDTH), v.view(-1, KEY_HEADS, WIDTH), layer, batch))
    assert results[0].shape == results[1].shape, (results[0].shape, results[1].shape)
    worst = max(worst, (results[0] - results[1]).abs().max().item())

made = backend_for(runner())
made.init_forward_metadata(Named(forward_mode=ForwardMode.DECODE, seq_lens=torch.tensor([70] * 5), seq_lens_cpu=None,
                                 req_pool_indices=torch.arange(5), input_embeds=None, replace_embeds=None))
print(made.key_width, [len(group.bias) for group in made.groups])  # two requests of 128 tokens fill up KEY_ELEMENTS
for change in ({"sliding_window_size": 4}, {"is_cross_attention": True}, {"attn_type": AttentionType.ENCODER_ONLY}):
    other = runner()
    vars(other.model.layer).update(change)
    assert type(backend_for(other)) is TorchNativeAttnBackend
assert type(backend_for(runner())) is BatchedAttention
print(dict(attention.group_requests([64, 65, 3, 500, 40], [1, 1, 1, 1, 17], 512)))
print(worst)
"""
