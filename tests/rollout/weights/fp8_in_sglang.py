"""SGLang's own model, layers and loaders with FP8 weights, as a process of its own on the CPU: no product is computed.

    python -m tests.rollout.weights.fp8_in_sglang ARGUMENTS RANK FOLDER...

The model is built as a server with ARGUMENTS (JSON: those of `server_arguments`) builds it on a Hopper GPU, for one
tensor-parallel rank. The first folder's weights are loaded, then those of each other one as `update_weights_from_disk`
does, then those again as the bucketed ways do, which only call `load_weights`. A line of JSON for each load: SGLang's
checksums, a hash of each tensor's own bytes, and the scales of its KV cache.
"""

import hashlib
import json
import os
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ |= {"SGLANG_USE_CPU_ENGINE": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
os.environ |= {"TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}

import torch

from rollout.cpu import standins
from rollout.server.launch_server import hide_megatron

HOPPER = {"ENABLE_JIT_DEEPGEMM": True, "DEEPGEMM_SCALE_UE8M0": False, "DEEPGEMM_BLACKWELL": False}
"""What `deep_gemm_wrapper` finds there (its configurer.py)."""


def build(arguments: list[str], rank: int, held: ExitStack) -> tuple[Any, Any, Any]:
    """(model, its loader, SGLang's config of it)."""
    from sglang.srt import runtime_context
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel
    from sglang.srt.layers.dp_attention import initialize_dp_attention
    from sglang.srt.model_loader import loader as loading
    from sglang.srt.model_loader.utils import set_default_torch_dtype
    from sglang.srt.server_args import prepare_server_args

    server_args = prepare_server_args(arguments)
    assert server_args.quantization is None, "rollout.wire.client would take the server for an altered one"
    model_config = ModelConfig.from_server_args(server_args)
    runtime_context.publish(server_args, role="scheduler", hf_config=model_config.hf_config)
    where = f"file://{held.enter_context(tempfile.TemporaryDirectory())}/rendezvous"
    init_distributed_environment(world_size=1, rank=0, local_rank=0, backend="gloo", distributed_init_method=where)
    initialize_model_parallel(tensor_model_parallel_size=1)
    initialize_dp_attention(server_args, model_config)
    size = server_args.tp_size
    place = {f"{kind}tp_size": size for kind in ("", "attn_", "moe_")}
    place |= {f"{kind}tp_rank": rank for kind in ("", "attn_", "moe_")}
    held.enter_context(runtime_context.get_parallel().override(**place))
    quantization = loading._get_quantization_config(model_config, LoadConfig())
    with set_default_torch_dtype(model_config.dtype):
        model = loading._initialize_model(model_config, LoadConfig(), quantization)
    return model, loading.DefaultModelLoader(LoadConfig()), model_config


def as_on_hopper() -> None:
    """What follows a load is then what a Hopper GPU's process does."""
    from sglang.srt.layers import deep_gemm_wrapper
    from sglang.srt.layers.quantization import fp8, fp8_utils

    fp8._is_cpu = False
    for name, value in HOPPER.items():
        setattr(deep_gemm_wrapper, name, value)
    assert fp8_utils._dispatch_auto_backend() is fp8_utils.deepgemm_w8a8_block_fp8_linear_with_fallback
    fp8.dispatch_w8a8_block_fp8_linear = fp8_utils._dispatch_auto_backend
    torch.cuda.synchronize = lambda *_: None


def report(what: str, model: Any) -> None:
    from sglang.srt.utils.weight_checker import WeightChecker

    place = SimpleNamespace(tp_rank=0, tp_size=1, dp_rank=0, attn_dp_size=1, pp_rank=0, pp_size=1)
    checksums = WeightChecker(get_model=lambda: model, ps=place)._compute_checksum()["checksums"]
    held = {name: each.detach().contiguous().view(-1).view(torch.uint8) for name, each in model.named_parameters()}
    hashes = {name: hashlib.sha256(each.numpy().tobytes()).hexdigest() for name, each in held.items()}
    caches = [vars(each) for _, each in model.named_modules() if hasattr(each, "k_scale_float")]
    scales = [[each["k_scale_float"], each["v_scale_float"]] for each in caches]
    print(json.dumps({"loaded": what, "checksums": checksums, "bytes": hashes, "cache": scales}), flush=True)


def main(arguments: list[str], rank: int, folders: list[Path]) -> None:
    hide_megatron()
    standins.install()
    as_on_hopper()
    with ExitStack() as held:
        model, loader, config = build(arguments, rank, held)
        for number, folder in enumerate([*folders, *folders[:0:-1]]):
            config.model_path = str(folder)
            weights = loader._get_weights_iterator(loader.Source.init_new(config, model))
            if number < len(folders):
                loader.load_weights_and_postprocess(model, weights, torch.device("cpu"))
            else:
                model.load_weights(weights)
            report(folder.name, model)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), int(sys.argv[2]), [Path(folder) for folder in sys.argv[3:]])
