"""Import what a run needs, in the new environment, and say what is missing before a run would."""

import json
from pathlib import Path

from tools.install.command import InstallError, run
from tools.install.progress import Progress

# sglang imports only in a server process, which brings its own stand-ins for what a CPU lacks; here it must be found.
FOUND = ("sglang", "xgrammar", "pytest", "ruff", "mypy")
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

# torch first: some kernels find their libraries only where torch has loaded them.
_CODE = """
import ctypes, importlib, importlib.metadata, importlib.util, json, platform, warnings
warnings.simplefilter("ignore")
found, imported, shown, library = json.loads({names!r})
failed = [[name, "not found"] for name in found if importlib.util.find_spec(name) is None]
untried = []
try:
    ctypes.CDLL(library)
    driver = True
except OSError:
    driver = False
for name in imported:
    try:
        importlib.import_module(name)
    except BaseException as error:
        # A module that asks for the driver where there is none is neither broken nor proven.
        if not driver and library in str(error):
            untried.append(name)
        else:
            failed.append([name, f"{{type(error).__name__}}: {{error}}"])
versions = {{}} if failed else {{name: importlib.metadata.version(name) for name in shown}}
print("RESULT " + json.dumps([failed, untried, platform.python_version(), versions]))
"""


def check_imports(
    python: Path, *, progress: Progress, scratch: Path, log: Path, gpu: bool = False, engine: bool = True
) -> tuple[str, str]:
    """One line with the versions that work together, and the modules that need a driver which is not here.

    Args:
        gpu: also import what a run on GPUs does.
        engine: TransformerEngine is among that.

    Raises:
        InstallError: names each package that is not there or does not import, with its own error.
    """
    imported, shown = [*IMPORTED], [*SHOWN]
    if gpu:
        # TransformerEngine before megatron.core, which imports it and fails with it.
        imported[1:1] = [*([ENGINE] if engine else []), *KERNELS]
        shown += [*GPU_SHOWN, *(["transformer-engine"] if engine else [])]
    names = json.dumps([FOUND, imported, shown, DRIVER])
    command = [str(python), "-I", "-c", _CODE.format(names=names)]
    _, lines = run(
        command, scratch=scratch, log=log,
        on_tick=lambda: progress.show("importing the packages", left_s=max((60 if gpu else 12) - progress.elapsed, 1)),
    )  # fmt: skip
    result = next((line for line in lines if line.startswith("RESULT ")), None)
    if result is None:
        raise InstallError("\n".join([*lines[-6:], f"the packages do not import; all that was said: {log}"]))
    failed, untried, version, versions = json.loads(result.removeprefix("RESULT "))
    if failed:
        raise InstallError(
            "\n".join(["these packages do not work:", *(f"  {name}: {why}" for name, why in failed)])
            + f"\n`make clean-venv install{'-gpu' if gpu else ''}` makes the environment anew"
        )
    shown_versions = ", ".join(f"{name} {version}" for name, version in versions.items())
    return f"Python {version}, {shown_versions}", ", ".join(untried)
