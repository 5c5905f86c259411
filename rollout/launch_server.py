import os, sys
from rollout import cpu
if __name__ == "__main__" and "cpu" in sys.argv:
    os.environ[cpu.SWITCH]="deterministic" if "--enable-deterministic-inference" in sys.argv else "fast"; os.environ["SGLANG_USE_CPU_ENGINE"]="1"
    os.environ["OMP_NUM_THREADS"]="1"; os.environ["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"]="0"
    os.environ["TORCHDYNAMO_DISABLE"]="1"
if cpu.cpu_mode() != "off":
    from rollout.cpu import standins
    standins.install()
if __name__ == "__main__":
    import runpy
    from sglang.srt.plugins import load_plugins
    load_plugins()
    from sglang.srt.server_args import prepare_server_args
    from sglang.launch_server import run_server
    args=prepare_server_args(sys.argv[1:])
    run_server(args)
