"""SGLang plugin, entry point group `sglang.srt.plugins`: batched attention and deterministic inference on a CPU.

SGLang calls `register` in its main process before it reads the arguments, and at the start of each scheduler. It only
logs a plugin that fails. Ours is noticed: without it the names of the attention backends are unknown and the server
ends, and the backend's constructor looks whether each hook is in place.
"""

import pkgutil
from typing import Any

from rollout.cpu import CpuMode, cpu_mode

PREFILL_BACKEND = "batched_prefill"
DECODE_BACKEND = "batched_decode"
"""Two names for one class: of two equal names SGLang takes the backend for one of Triton's and calls its kernels."""

_LAYERS = "sglang.srt.layers"
FAST_HOOKS = {
    "torch.cuda.synchronize": ("nothing_to_do", "replace"),  # called by SGLang's weight checker
    # A garbage collection of the whole heap at each publish: PyTorch counts references, nothing of it is freed there.
    "sglang.srt.platforms.cpu.CpuDeviceMixin.empty_cache": ("nothing_to_do", "replace"),
}
DETERMINISTIC_HOOKS = {
    "sglang.srt.batch_invariant_ops.enable_batch_invariant_mode": ("nothing_to_do", "replace"),
    f"{_LAYERS}.sampler.murmur_hash32": ("murmur_hash32", "replace"),
    f"{_LAYERS}.quantization.unquant.UnquantizedLinearMethod.apply": ("linear_in_full_rows", "around"),
    f"{_LAYERS}.logits_processor.LogitsProcessor._compute_lm_head": ("head_in_full_rows", "around"),
}


def hooks_of(mode: CpuMode) -> dict[str, tuple[str, str]]:
    """What is hooked in `mode`: {SGLang's name: (our function in `rollout.cpu.deterministic`, kind of hook)}."""
    match mode:
        case CpuMode.OFF:
            return {}
        case CpuMode.FAST:
            return FAST_HOOKS
        case CpuMode.DETERMINISTIC:
            return FAST_HOOKS | DETERMINISTIC_HOOKS


def register() -> None:
    """Adds the backends and hooks of this process's mode; without effect unless our launcher started a CPU server."""
    mode = cpu_mode()
    if mode is CpuMode.OFF:
        return
    from sglang.srt import server_args
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from rollout.cpu import deterministic

    for name in (PREFILL_BACKEND, DECODE_BACKEND):
        register_attention_backend(name)(create_backend)
    server_args.add_attention_backend_choices([PREFILL_BACKEND, DECODE_BACKEND])
    server_args.add_deterministic_attention_backend_choices(["torch_native"])
    for target, (function, kind) in hooks_of(mode).items():
        HookRegistry.register(target, getattr(deterministic, function), HookType(kind))


def create_backend(model_runner: Any) -> Any:
    """The attention backend, made by each scheduler while it starts.

    Raises:
        RuntimeError: a hook that this mode needs is not in place; SGLang itself only logs that.
    """
    missing = [name for name in hooks_of(cpu_mode()) if not hasattr(pkgutil.resolve_name(name), "__wrapped__")]
    if missing:
        raise RuntimeError(f"SGLang did not apply hooks of rollout.cpu.plugin: {missing}; see the log for the reason")
    from rollout.cpu.attention import BatchedAttention

    return BatchedAttention(model_runner)
