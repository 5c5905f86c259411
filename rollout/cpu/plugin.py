"""SGLang plugin, entry point group `sglang.srt.plugins`: batched attention and deterministic inference on a CPU.

SGLang calls `register` in its main process before it reads the arguments, and at the start of each scheduler. It only
logs a plugin that fails. A failure of this one ends the server: without it the names of the attention backends are
unknown, and the backend's constructor checks that each hook is in place.

The hooked functions are internals of SGLang 0.5.17, the version that this project pins.

Deterministic inference needs a seeded sampler's hash and matmuls that ignore the batch. On a GPU SGLang has Triton
kernels for both. `attention.padded_keys` makes attention independent of the batch.
"""

import multiprocessing
import pkgutil
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from rollout.cpu import DECODE_BACKEND, PREFILL_BACKEND, CpuMode, cpu_mode
from rollout.murmur import fmix32, rotate, signed

ROWS = 16
"""With fewer rows the matmul library uses other kernels, and a row gets other last bits. From 16 rows up to 4096, the
most that were tried, the result of a row did not depend on the number of rows, in float32 with one thread."""


def nothing_to_do(*args: object, **kwargs: object) -> None:
    """Replaces functions for GPUs only, such as `enable_batch_invariant_mode`, which installs Triton kernels."""


def murmur_hash32(seed: Tensor, positions: Tensor, col_indices: Tensor) -> Tensor:
    """SGLang's Triton kernel of this name: the 32-bit murmur hash of seed, position, token.

    It is computed for the whole vocabulary at each response token. int32 wraps as the hash needs it, and takes a
    quarter of the time of int64 with masks.

    Args:
        seed: [n] uint64 or int64, `sampling_seed` of each request.
        positions: [n] position of the token to draw.
        col_indices: [m] token ids.

    Returns:
        [n, m] int64 in 0 .. 2**32 - 1; the sampler's noise is made of it.
    """
    seed = seed.view(torch.int64) if seed.dtype == torch.uint64 else seed.to(torch.int64)
    state = torch.zeros_like(seed, dtype=torch.int32)
    for block in (seed, seed >> 32, positions):
        state = _mix(state, block)
    state = _mix(state[:, None], col_indices[None, :])
    state ^= 16  # length in bytes: seed 8, position 4, token 4
    return fmix32(state).to(torch.int64).bitwise_and_(0xFFFFFFFF)


def _mix(state: Tensor, block: Tensor) -> Tensor:
    """`block`: its low 32 bits count."""
    block = rotate(block.to(torch.int32) * signed(0xCC9E2D51), 15) * signed(0x1B873593)
    return rotate(state ^ block, 13).mul_(5).add_(signed(0xE6546B64))


def linear_in_full_rows(apply: Callable[..., Tensor], method: Any, layer: Any, x: Tensor, bias: Any = None) -> Tensor:
    """Around `UnquantizedLinearMethod.apply`: x [T, in] is padded to `ROWS` rows."""
    return apply(method, layer, _padded(x), bias)[: x.shape[0]]


def head_in_full_rows(head: Callable[..., Tensor], processor: Any, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Around `LogitsProcessor._compute_lm_head`: hidden [T, width] is padded to `ROWS` rows."""
    return head(processor, _padded(hidden), *args, **kwargs)[: hidden.shape[0]]


def experts_in_full_rows(experts: Callable[..., Tensor], layer: Any, x: Tensor, topk: Any, config: Any) -> Tensor:
    """Around `moe_forward_native`: x [T, in] gets rows of zeros so that every expert has `ROWS` rows or more."""
    count, top_k = layer.num_experts, topk.topk_ids.shape[1]
    ids = torch.arange(-(-count // top_k) * top_k, dtype=topk.topk_ids.dtype) % count
    more = ids.view(-1, top_k).repeat(ROWS, 1)
    weights = torch.cat([topk.topk_weights, torch.zeros_like(more, dtype=topk.topk_weights.dtype)])
    filled = topk._replace(topk_ids=torch.cat([topk.topk_ids, more]), topk_weights=weights)
    return experts(layer, pad(x, (0, 0, 0, len(more))), filled, config)[: x.shape[0]]


def _padded(x: Tensor) -> Tensor:
    missing = ROWS - x.shape[0]
    return pad(x, (0, 0, 0, missing)) if x.dim() == 2 and missing > 0 else x


def host_cache(cache: Any, num_tokens: int, num_layers: int, topk_size: int, name: str) -> None:
    """`BaseHostCache.__init__`, for the experts of each token in the KV cache, without pinning the memory."""
    cache.buffer = torch.zeros((num_tokens, num_layers, topk_size), dtype=torch.int32)
    cache.num_tokens, cache.num_layers, cache.topk_size, cache.name = num_tokens, num_layers, topk_size, name


def fork_children(prepare: Callable[..., None], *args: Any) -> None:
    """Around `_set_envs_and_config`, which has children spawned: a CPU server's scheduler and detokenizer are forked
    and need not import SGLang again. The process has one thread then, and no CUDA that a fork would break."""
    prepare(*args)
    multiprocessing.set_start_method("fork", force=True)


_LAYERS = "sglang.srt.layers"
Hooks = dict[str, tuple[Callable[..., Any], str]]
"""{SGLang's name: (our function, "replace" or "around")}"""

_FAST: Hooks = {
    "sglang.srt.entrypoints.engine._set_envs_and_config": (fork_children, "around"),
    "sglang.srt.state_capturer.base.BaseHostCache.__init__": (host_cache, "replace"),
    "torch.cuda.synchronize": (nothing_to_do, "replace"),  # called by SGLang's weight checker
    # It collects garbage of the whole heap at each publish, which frees nothing: PyTorch counts references.
    "sglang.srt.platforms.cpu.CpuDeviceMixin.empty_cache": (nothing_to_do, "replace"),
}
_DETERMINISTIC: Hooks = {
    "sglang.srt.batch_invariant_ops.enable_batch_invariant_mode": (nothing_to_do, "replace"),
    f"{_LAYERS}.sampler.murmur_hash32": (murmur_hash32, "replace"),
    f"{_LAYERS}.quantization.unquant.UnquantizedLinearMethod.apply": (linear_in_full_rows, "around"),
    f"{_LAYERS}.logits_processor.LogitsProcessor._compute_lm_head": (head_in_full_rows, "around"),
    f"{_LAYERS}.moe.fused_moe_native.moe_forward_native": (experts_in_full_rows, "around"),
}
HOOKS = {CpuMode.OFF: {}, CpuMode.FAST: _FAST, CpuMode.DETERMINISTIC: _FAST | _DETERMINISTIC}


def register() -> None:
    """Adds the backends and hooks of this process's mode; without effect unless our launcher started a CPU server."""
    mode = cpu_mode()
    if mode is CpuMode.OFF:
        return
    from sglang.srt import server_args
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for name in (PREFILL_BACKEND, DECODE_BACKEND):
        register_attention_backend(name)(create_backend)
    server_args.add_attention_backend_choices([PREFILL_BACKEND, DECODE_BACKEND])
    server_args.add_deterministic_attention_backend_choices(["torch_native"])
    for target, (function, kind) in HOOKS[mode].items():
        HookRegistry.register(target, function, HookType(kind))


def create_backend(model_runner: Any) -> Any:
    """The attention backend, made by each scheduler while it starts.

    Raises:
        RuntimeError: a hook that this mode needs is not in place; SGLang itself only logs that.
    """
    if missing := [name for name in HOOKS[cpu_mode()] if not hasattr(pkgutil.resolve_name(name), "__wrapped__")]:
        raise RuntimeError(f"SGLang did not apply hooks of rollout.cpu.plugin: {missing}; see the log for the reason")
    from rollout.cpu.attention import backend_for

    return backend_for(model_runner)
