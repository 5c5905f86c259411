"""Imports what a run needs: `PYTHON -I tools/install/import_check.py [gpu] [engine]`, by the new environment's Python.

Prints the versions and what only a GPU node can import; with exit status 1, what fails and why.
"""

import importlib
import importlib.metadata
import sys
import warnings

# torch first: some kernels find their libraries only where torch has loaded them.
IMPORTED = (
    "torch", "megatron.core", "ray", "transformers", "tokenizers", "sentencepiece", "safetensors.torch", "pyarrow",
    "pydantic", "typer", "aiohttp", "psutil", "matplotlib", "xxhash", "math_verify", "jinja2", "tensorboard",
    "filelock", "megatron_dapo", "rollout", "reward",
)  # fmt: skip
# sglang imports only in a server process, which brings its own stand-ins for what a CPU lacks; here only its version is
# asked for.
SHOWN = ("torch", "megatron-core", "sglang", "ray", "transformers")
GPU_SHOWN = ("sglang-kernel", "flashinfer-python")
KERNELS = ("sgl_kernel", "flashinfer", "torch_memory_saver")
"""What SGLang imports on a GPU, beside the above."""
ENGINE = "transformer_engine.pytorch"
NO_DRIVER = "libcuda.so.1: cannot open shared object file"
"""What the loader says where the driver's library is not there: only a machine with a GPU has it."""


def check(*, gpu: bool, engine: bool) -> tuple[list[str], str]:
    """Lines of what fails and why, and in words the versions and what cannot be tried without a driver."""
    # TransformerEngine before megatron.core, which imports it and fails with it.
    of_gpu = [*([ENGINE] if engine else []), *KERNELS] if gpu else []
    shown = [*SHOWN, *(GPU_SHOWN if gpu else ()), *(["transformer-engine"] if gpu and engine else [])]
    failed, untried = [], []
    for name in (IMPORTED[0], *of_gpu, *IMPORTED[1:]):
        try:
            importlib.import_module(name)
        except BaseException as error:
            # A module that asks for the driver where there is none is neither broken nor proven.
            if NO_DRIVER in str(error):
                untried.append(name)
            else:
                failed.append(f"{name}: {type(error).__name__}: {error}")
    words = "" if failed else ", ".join(f"{name} {importlib.metadata.version(name)}" for name in shown)
    if untried:
        words += f"; this machine has no GPU driver, so a GPU node must still import {', '.join(untried)}"
    return failed, words


def main(arguments: list[str]) -> int:
    """Exit status 1: something fails."""
    warnings.simplefilter("ignore")
    failed, words = check(gpu="gpu" in arguments, engine="engine" in arguments)
    print("\n  ".join(["these packages do not work:", *failed]) if failed else words)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
