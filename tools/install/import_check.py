"""Imports what a run needs: `PYTHON -I tools/install/import_check.py [gpu] [engine]`, by the new environment's Python.

Prints the versions and what only a GPU node can import; with exit status 1, what fails and why.
"""

import importlib
import importlib.metadata
import sys

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


def main(arguments: list[str]) -> int:
    """Exit status 1: something fails."""
    gpu, engine = "gpu" in arguments, "engine" in arguments
    # TransformerEngine before megatron.core, which imports it and fails with it.
    of_gpu = (*((ENGINE,) if engine else ()), *KERNELS) if gpu else ()
    failed: list[str] = []
    untried: list[str] = []
    for name in (IMPORTED[0], *of_gpu, *IMPORTED[1:]):
        try:
            importlib.import_module(name)
        except BaseException as error:
            # A module that asks for the driver where there is none is neither broken nor proven.
            found = untried if NO_DRIVER in str(error) else failed
            found.append(f"{name}: {type(error).__name__}: {error}")
    if failed:
        print("these packages do not work:", *failed, sep="\n  ")
        print(f"`make clean-venv install{'-gpu' if gpu else ''}` makes the environment anew")
        return 1
    versions = (f"{name} {importlib.metadata.version(name)}" for name in (*SHOWN, *(GPU_SHOWN if gpu else ())))
    print(f"Python {sys.version.split()[0]}", *versions, sep=", ")
    if untried:
        print("this machine has no GPU driver, so a GPU node must still import:", *untried, sep="\n  ")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
