"""The one place where SGLang gets what a CPU without GPU packages needs. Nothing in here acts where CUDA is present.

`standins` lets SGLang's modules be imported where GPU-only packages are absent; `plugin` is an SGLang plugin (entry
point group `sglang.srt.plugins`) that adds a batched attention backend and deterministic inference. Both act only in
processes that `rollout.server.launch_server` started with `--device cpu`, which carry the variable `SWITCH`.
"""

import os
from enum import StrEnum

SWITCH = "ROLLOUT_SGLANG_CPU"
"""Environment variable that `rollout.server.launch_server` sets for itself and for the processes that SGLang starts."""

PREFILL_BACKEND = "batched_prefill"
DECODE_BACKEND = "batched_decode"
"""Two names for one class: if both names were equal, SGLang would take it for a Triton backend and call its kernels."""


class CpuMode(StrEnum):
    """What the CPU support does in this process."""

    OFF = "off"
    FAST = "fast"
    DETERMINISTIC = "deterministic"
    """Also, a response depends only on its prompt and seed, not on the batch it was decoded in."""


def cpu_mode() -> CpuMode:
    """The mode that `rollout.server.launch_server` chose for this process tree; OFF in every other process."""
    return CpuMode(os.environ.get(SWITCH, CpuMode.OFF))
