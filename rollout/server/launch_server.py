"""`python -m rollout.server.launch_server ARGUMENTS`: SGLang's server, with what our fleet and a CPU need.

The arguments are those of `sglang.launch_server`. What is added: each process ends with the one that started it and
sees no Megatron-Core, the server downloads nothing, it can answer in arrays (`rollout.wire.array_frames_server`), and
with `--device cpu` it gets `rollout.cpu`. SGLang spawns its scheduler and detokenizer; on a CPU they are forked
(`rollout.cpu.plugin`). Python imports this module again in each that is spawned, as `__mp_main__` and before anything
else, so its last lines run there too. The installed packages are not changed.
"""

import gc
import itertools
import os
import sys
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path

from rollout import cpu
from rollout.cpu import standins
from rollout.server import KEY_FILE, PARENT, end_with

OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "TOKENIZERS_PARALLELISM": "false"}
SERVER = {
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",  # /health answers while paused, and costs no token
    "SGLANG_JIT_DEEPGEMM_FAST_WARMUP": "1",  # of FP8's kernels: all shapes take 10 to 20 minutes on a new machine
    "SGL_FORCE_SHUTDOWN": "1",  # SIGTERM does not wait for requests; 0.5.17 warns of this name and reads no other
}
CPU = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",  # more threads made a busy machine 13-20 times slower
    "TORCHDYNAMO_DISABLE": "1",  # the sampler would be compiled by a C++ compiler that need not be there
}

MEMORY_SAVER = {"SGLANG_MEMORY_SAVER_CUDA_GRAPH": "1"}
"""For a server that leaves its GPUs' memory to the trainer: its decode graphs leave with the weights. Prefill graphs
cannot; SGLang's kind crashes the server with this variable, so `rollout.server.server_command` switches them off."""

ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""PyTorch's variables for its allocator, the old name and the new one."""

RENDEZVOUS = "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"
"""SGLang's own variable: the rendezvous of a server's processes, as a torch.distributed URL."""

_OTHER_RENDEZVOUS = ("--dist-init-addr", "--nccl-port", "--nnodes", "--dp-size", "--data-parallel-size", "--dp")
"""Arguments of servers whose processes have another rendezvous, or more than one."""

_DRAFT = "--speculative-draft-model-path"

_ENTRY_POINT = "rollout.cpu.plugin:register"


def environment(arguments: Sequence[str]) -> dict[str, str]:
    """Variables that a server with these `arguments` needs, for itself and the processes it spawns."""
    # A draft may know fewer positions than the model, whose own are checked: it then guesses worse beyond them.
    longer = {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"} if _values(arguments, _DRAFT) else {}
    # SGLang's list of arguments is to be had on any machine, also where no GPU package is.
    if "cpu" not in _values(arguments, "--device") and "--help" not in arguments:
        return OFFLINE | SERVER | longer | (MEMORY_SAVER if "--enable-memory-saver" in arguments else {})
    mode = cpu.CpuMode.DETERMINISTIC if "--enable-deterministic-inference" in arguments else cpu.CpuMode.FAST
    sizes = [int(size) for flag in ("--tp", "--tp-size", "--tensor-parallel-size") for size in _values(arguments, flag)]
    parallel = max(sizes, default=1)
    # One core a scheduler process; SGLang refuses a tensor-parallel size over the NUMA nodes without it.
    cores = sorted(os.sched_getaffinity(0))
    binding = "|".join(str(cores[rank % len(cores)]) for rank in range(parallel))
    bound = {"SGLANG_CPU_OMP_THREADS_BIND": binding} if parallel > 1 else {}
    return OFFLINE | SERVER | longer | CPU | {cpu.SWITCH: mode} | bound


def _values(arguments: Sequence[str], flag: str) -> list[str]:
    following = [value for given, value in itertools.pairwise(arguments) if given == flag]
    return following + [given.partition("=")[2] for given in arguments if given.startswith(f"{flag}=")]


def rendezvous() -> str:
    """A file in this process's memory: only processes of its owner can open it, and it is gone when this process ends.
    SGLang's own choice is a port that torch opens on every interface, from the range that the kernel uses for outgoing
    connections: another process may have it by the time the server opens it."""
    return f"file:///proc/{os.getpid()}/fd/{os.memfd_create('rendezvous')}"


def end_with_parent() -> None:
    """Asks the kernel to kill this process when its parent ends, and ends now if the parent is gone already."""
    if (parent := os.environ.get(PARENT)) is not None:
        end_with(int(parent))
        os.environ[PARENT] = str(os.getpid())  # for those that this one spawns


def hide_megatron() -> None:
    """Makes Megatron-Core as if it were not installed. SGLang imports it for its own dumps of tensors; Megatron-Core
    then gives torch_memory_saver a mode that releases no CUDA graphs, and a server that shares a GPU ends at once."""
    sys.modules["megatron"] = None  # type: ignore[assignment]


def main(arguments: Sequence[str]) -> None:
    """Runs the server until it is stopped. Call it as the first thing of a process."""
    hide_megatron()
    import setproctitle  # SGLang's: only a server needs it

    setproctitle.getproctitle()  # finds where a title goes, which it cannot once the first variable has a new value
    end_with_parent()
    os.register_at_fork(after_in_child=end_with_parent)
    os.environ.update(environment(arguments))
    gc.disable()  # what is imported stays; to look at it again and again takes a fifth of the start
    if "--enable-memory-saver" in arguments:
        for name in ALLOCATOR:
            # Memory of expandable segments is refused under the old name; under the new one it would stay on the GPU.
            if "expandable_segments" in os.environ.get(name, ""):
                print(f"{name} is left out: torch_memory_saver cannot release expandable_segments", flush=True)
                del os.environ[name]
    if not any(_values(arguments, flag) for flag in _OTHER_RENDEZVOUS):
        os.environ.setdefault(RENDEZVOUS, rendezvous())
    if cpu.cpu_mode() is not cpu.CpuMode.OFF:
        if not any(entry.value == _ENTRY_POINT for entry in entry_points(group="sglang.srt.plugins")):
            sys.exit("the plugin of rollout.cpu is unknown to SGLang; install this project: pip install --no-deps -e .")
        standins.install()
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    server_args = prepare_server_args(list(arguments))
    if KEY_FILE in os.environ:
        from rollout.server.server_command import read_key

        # Not as an argument: SGLang would turn it into plain text and print it. Its settings are read-only by now.
        object.__setattr__(server_args, "api_key", read_key(Path(os.environ[KEY_FILE])))
    # Not earlier: the parts of SGLang that it imports read settings that the arguments set.
    from rollout.wire import array_frames_server

    array_frames_server.add()
    gc.collect()
    gc.freeze()
    gc.enable()
    try:
        run_server(server_args)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main(sys.argv[1:])
elif __name__ == "__mp_main__":
    hide_megatron()
    # SGLang itself does this only after seconds of imports: if its parent died meanwhile, this process would survive.
    end_with_parent()
    if cpu.cpu_mode() is not cpu.CpuMode.OFF:  # such as a second tokenizer process, which is spawned on a CPU too
        standins.install()
