"""Imports what a run needs: `PYTHON -I tools/install/import_check.py [gpu] [engine]`, by the new environment's Python.

Prints a line of JSON: [[module, its error], ...], [modules that need a driver which is not here], {package: version}.
"""

import ctypes
import importlib
import importlib.metadata
import importlib.util
import json
import sys
import warnings

# sglang imports only in a server process, which brings its own stand-ins for what a CPU lacks; here it must be found.
FOUND = ("sglang", "xgrammar", "pytest", "ruff", "mypy")
# torch first: some kernels find their libraries only where torch has loaded them.
IMPORTED = (
    "torch", "megatron.core", "ray", "transformers", "tokenizers", "sentencepiece", "safetensors.torch", "numpy",
    "pyarrow", "pydantic", "yaml", "typer", "rich", "aiohttp", "jinja2", "psutil", "filelock", "matplotlib",
    "tensorboard", "math_verify", "jaxtyping", "xxhash", "megatron_dapo", "rollout", "reward",
)  # fmt: skip
SHOWN = ("torch", "megatron-core", "sglang", "ray", "transformers")
GPU_SHOWN = ("sglang-kernel", "flashinfer-python")
KERNELS = ("sgl_kernel", "flashinfer", "torch_memory_saver")
"""What SGLang imports on a GPU, beside the above."""
ENGINE = "transformer_engine.pytorch"
DRIVER = "libcuda.so.1"
"""The driver's library. It comes with the driver and not with a package, so only a machine with a GPU has it."""


def has_driver() -> bool:
    """Whether this machine has a GPU driver."""
    try:
        ctypes.CDLL(DRIVER)
    except OSError:
        return False
    return True


def check(*, gpu: bool, engine: bool) -> tuple[list[tuple[str, str]], list[str], dict[str, str]]:
    """What fails and why, what cannot be tried without a driver, and the versions where nothing fails."""
    imported, shown = [*IMPORTED], [*SHOWN]
    if gpu:
        # TransformerEngine before megatron.core, which imports it and fails with it.
        imported[1:1] = [*([ENGINE] if engine else []), *KERNELS]
        shown += [*GPU_SHOWN, *(["transformer-engine"] if engine else [])]
    failed = [(name, "not found") for name in FOUND if importlib.util.find_spec(name) is None]
    untried = []
    for name in imported:
        try:
            importlib.import_module(name)
        except BaseException as error:
            # A module that asks for the driver where there is none is neither broken nor proven.
            if DRIVER in str(error) and not has_driver():
                untried.append(name)
            else:
                failed.append((name, f"{type(error).__name__}: {error}"))
    return failed, untried, {} if failed else {name: importlib.metadata.version(name) for name in shown}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(json.dumps(check(gpu="gpu" in sys.argv, engine="engine" in sys.argv)))
