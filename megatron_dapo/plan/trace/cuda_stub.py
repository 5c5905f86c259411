"""Builds the stand-in for the CUDA driver and names what a trace lacks. Imports no torch: the child does."""

import importlib.util
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

SOURCE = Path(__file__).with_name("cuda_stub.c")


class TraceError(Exception):
    """A trace cannot be made; the message says what to do."""


def stub_environment(folder: Path) -> dict[str, str]:
    """The variables that a traced process needs: the stub, compiled into `folder`, is loaded first, Dynamo stays off,
    and temporary files lie in `folder`.

    Raises:
        TraceError: no CUDA build of torch, its headers, or gcc; or LD_PRELOAD cannot hold the folder's path.
    """
    if any(character.isspace() or character == ":" for character in str(folder)):
        raise TraceError(
            f"--trace: LD_PRELOAD takes no blank or colon, and {folder} has one; set TMPDIR to another folder"
        )
    headers = _headers()
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise TraceError("--trace compiles a small stand-in for the CUDA driver, and there is no gcc; install gcc")
    # Under libcuda's name, so that torch, which opens the driver late, finds this one loaded.
    library = folder / "cuda_stub.so"
    options = ["-shared", "-fPIC", "-O1", f"-I{headers}", "-Wl,-soname,libcuda.so.1"]
    command = [compiler, *options, "-o", str(library), str(SOURCE)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise TraceError(f"--trace: {' '.join(command)} failed:\n{done.stderr.strip()}")
    return {"LD_PRELOAD": str(library), "TORCHDYNAMO_DISABLE": "1", "TMPDIR": str(folder)}


def _headers() -> Path:
    """The folder of cuda_runtime_api.h that torch's CUDA packages brought."""
    spec = importlib.util.find_spec("torch")
    try:
        build = version("torch")
    except PackageNotFoundError:
        build = ""
    remedy = "install the CUDA build (requirements/README.md names the lock) in an environment of its own"
    if spec is None or spec.origin is None:
        raise TraceError(f"--trace needs a CUDA build of torch, and there is no torch here; {remedy}")
    torch = Path(spec.origin).parent
    if not (torch / "lib" / "libtorch_cuda.so").is_file():
        raise TraceError(
            f"--trace needs a CUDA build of torch (no GPU), and torch {build} here is a build for the CPU; {remedy}"
        )
    found = sorted((torch.parent / "nvidia").glob("*/include/cuda_runtime_api.h"))
    if not found:
        raise TraceError(
            f"--trace: torch {build} is here without nvidia-cuda-runtime, whose headers it needs; {remedy}"
        )
    return found[0].parent
