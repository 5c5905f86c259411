"""Traces of several ranks of a config, each in a process of its own, under a stand-in for the CUDA driver. Imports no
torch: the processes do."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter

from megatron_dapo.config import ConfigError
from megatron_dapo.config.actor_config import LayoutConfig
from tests.symbolic.findings import RankTrace

SOURCE = Path(__file__).with_name("cuda_stub.c")

RANK_SECONDS = 1800
"""Longest that one rank may take; measured: about a minute on one core."""


def stub_environment(folder: Path) -> dict[str, str]:
    """The variables that a traced process needs: the stub, compiled into `folder`, is loaded first, Dynamo stays off,
    and temporary files lie in `folder`.

    Raises:
        ConfigError: no CUDA build of torch, its headers, or gcc; or LD_PRELOAD cannot hold the folder's path.
    """
    if re.search(r"[\s:]", str(folder)):
        raise ConfigError(f"LD_PRELOAD takes no blank or colon; set TMPDIR to another folder than {folder}")
    spec = importlib.util.find_spec("torch")
    torch = Path(spec.origin).parent if spec is not None and spec.origin is not None else Path("nowhere")
    headers = sorted((torch.parent / "nvidia").glob("*/include/cuda_runtime_api.h"))
    if not (torch / "lib/libtorch_cuda.so").is_file() or not headers:
        raise ConfigError(
            "a trace needs a CUDA build of torch with nvidia-cuda-runtime's headers (no GPU), and it is not here; "
            "install the CUDA build (requirements/README.md names the lock) in an environment of its own"
        )
    # Under libcuda's name, so that torch, which opens the driver late, finds this one loaded.
    library = folder / "cuda_stub.so"
    command = ["gcc", "-shared", "-fPIC", "-O1", f"-I{headers[0].parent}", "-Wl,-soname,libcuda.so.1"]
    try:
        subprocess.run([*command, "-o", str(library), str(SOURCE)], capture_output=True, text=True, check=True)
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        told = getattr(error, "stderr", "install it")
        raise ConfigError(f"a trace needs gcc for a small stand-in for the CUDA driver: {error}: {told}") from None
    return {"LD_PRELOAD": str(library), "TORCHDYNAMO_DISABLE": "1", "TMPDIR": str(folder), "OMP_NUM_THREADS": "1"}


def chosen_ranks(ranks: str, layout: LayoutConfig) -> list[int]:
    """Those that `--ranks` names ("0,8,9", "all").

    Without any: one of each pipeline stage, and of the last one also its neighbours in the tensor-, context- and
    data-parallel groups, so that every kind of group has two traced members.

    Raises:
        ConfigError: a rank that the layout does not have, or no number.
    """
    world = range(layout.world_size)
    if ranks:
        asked = set(map(str, world)) if ranks == "all" else {one.strip() for one in ranks.split(",")}
        if not asked <= set(map(str, world)):
            raise ConfigError(f"--ranks {ranks}: give ranks of 0 to {world[-1]} with commas between them, or all")
        return sorted(map(int, asked))
    stage = layout.tensor * layout.context * layout.data
    last = (layout.pipeline - 1) * stage
    steps = {1: layout.tensor, layout.tensor: layout.context, layout.tensor * layout.context: layout.data}
    neighbours = [last + step for step, size in steps.items() if size > 1]
    return sorted({number * stage for number in range(layout.pipeline)} | set(neighbours))


def trace_ranks(
    path: Path, overrides: Sequence[str], ranks: Sequence[int], *, layers: Literal["te", "local"], jobs: int
) -> list[RankTrace]:
    """The traces of `ranks`, in that order; a line on stderr says when each is there.

    Args:
        layers: whose transformer layers: TransformerEngine's ("te"), which a GPU node has, or those of Megatron and
            this project ("local").

    Raises:
        ConfigError: something is missing here, or a rank failed: then with what it printed last.
    """
    started: list[subprocess.Popen[str]] = []
    try:
        with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(max(1, jobs)) as pool:
            environment = os.environ | stub_environment(Path(folder))
            job = {"config": str(path), "overrides": list(overrides), "layers": layers, "parent": os.getpid()}

            def one(rank: int) -> RankTrace:
                out = Path(folder, f"{rank}.json")
                of_rank = json.dumps(job | {"rank": rank, "out": str(out)})
                command = [sys.executable, "-W", "ignore", "-m", "tests.symbolic.one_rank", of_rank]
                process = subprocess.Popen(
                    command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
                )
                started.append(process)
                errors = process.communicate(timeout=RANK_SECONDS)[1].strip()
                if process.returncode:
                    last = "\n".join(errors.splitlines()[-25:])
                    raise ConfigError(f"rank {rank}: the trace ended with exit code {process.returncode}:\n{last}")
                trace = read_trace(out)
                print(f"rank {rank}: {len(trace.calls)} calls, {trace.seconds:.0f} s", file=sys.stderr, flush=True)
                return trace

            try:
                return list(pool.map(one, ranks))
            finally:  # after a failure or a signal the pool would wait for the other ranks
                for process in started:
                    process.kill()
    except subprocess.TimeoutExpired:
        raise ConfigError(f"a rank has not ended after {RANK_SECONDS} s; set actor and model smaller") from None


def read_trace(file: Path) -> RankTrace:
    """What `one_rank` wrote."""
    return TypeAdapter(RankTrace).validate_json(file.read_bytes())
