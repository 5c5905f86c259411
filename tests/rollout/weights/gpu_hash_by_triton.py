"""`gpu_hash_by_triton.py SIZE:DTYPE ...`: SGLang's GPU hash of counting tensors, by its own kernels, without a GPU."""

import importlib.util
import os
import sys
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"

import torch

found = importlib.util.find_spec("sglang")
assert found is not None
assert found.origin is not None
path = Path(found.origin).parent / "kernels/ops/memory/gpu_tensor_hash.py"
spec = importlib.util.spec_from_file_location("gpu_tensor_hash", path)
assert spec is not None
assert spec.loader is not None
kernels = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kernels)
SEED, TILE, CHUNK = 0x243F6A88, 8192, 1024  # the defaults of gpu_tensor_hash, which itself insists on a GPU

for argument in sys.argv[1:]:
    size, dtype = argument.split(":")
    tensor = (torch.arange(int(size)) % 977 - 400).to(getattr(torch, dtype)) / 16
    data = tensor.view(torch.uint8)
    words = torch.cat([data, data.new_zeros(-data.numel() % 4)]).view(torch.uint32)
    partial = torch.empty(-(-words.numel() // TILE), dtype=torch.uint64)
    kernels.hash_tiles32_kernel_blocked[(partial.numel(),)](
        words,
        partial,
        words.numel(),
        seed1=SEED,
        seed2=((SEED * 0x9E3779B1) ^ 0xDEADBEEF) & 0xFFFFFFFF,
        FM_C1=kernels.FMIX32_C1,
        FM_C2=kernels.FMIX32_C2,
        POS_A=kernels.POS_C1,
        POS_B=kernels.POS_C2,
        TILE=TILE,
        BLOCK=256,
        USE_CG=True,
    )
    while partial.numel() > 1:
        reduced = torch.empty(-(-partial.numel() // CHUNK), dtype=torch.uint64)
        kernels.add_tree_reduce_u64_kernel[(reduced.numel(),)](partial, reduced, partial.numel(), CHUNK=CHUNK)
        partial = reduced
    print(f"{kernels._final_splitmix64(int(partial.item())):016x}")
