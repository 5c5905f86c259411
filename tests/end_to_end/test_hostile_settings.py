"""What a shell or a machine may have set, each alone: a run of one small step ends as it always does."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_dapo.cli.exit_codes import ExitCode
from tests.end_to_end.test_quickstart import private_mounts
from tests.processes import ROOT

DEAD = "http://127.0.0.1:9"
NOWHERE = "/proc/no/such/folder"
PROXIES = ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
CACHES = ("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_RUNTIME_DIR", "HF_HOME", "TRITON_CACHE_DIR")
RANKS = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "3", "MASTER_ADDR": "10.9.9.9", "MASTER_PORT": "1"}
VARIABLES = {
    "proxies": dict.fromkeys(PROXIES, DEAD),
    "a GPU that is not there": {"CUDA_VISIBLE_DEVICES": "0"},
    "many threads": {"OMP_NUM_THREADS": "32"},
    "plain C": {"LC_ALL": "C", "PYTHONIOENCODING": "ascii"},
    "a home that cannot be made": {"HOME": NOWHERE},
    "a home that cannot be written": {"HOME": "/proc"},
    "caches that cannot be written": dict.fromkeys(CACHES, "/proc"),
    "no temporary folder": {"TMPDIR": NOWHERE},
    "another Ray's folder": {"RAY_TMPDIR": NOWHERE},
    "the rank that a launcher gave": RANKS,
    "no docstrings": {"PYTHONOPTIMIZE": "2"},
    "warnings as errors": {"PYTHONWARNINGS": "error"},
}
SHELLS = {
    "few files": "ulimit -n 256",
    "private files": "umask 077",
    "shared memory that cannot be written": "mount -t tmpfs -o ro none /dev/shm",
    "little shared memory": "mount -t tmpfs -o size=1m none /dev/shm",
}
NAMES = ("random", "reward", "rollout", "tokenizers")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def train(folder: Path, *, shell: str = "true", cwd: Path = ROOT, **variables: str) -> None:
    quickstart = ROOT / "examples" / "quickstart"
    arguments = [
        f"run.dir={folder / 'run'}", f"model.path={quickstart}/base", f"data.path={quickstart}/data/train.jsonl",
        f"evaluation.path={quickstart}/data/heldout.jsonl", "evaluation.limit=2", "evaluation.forbidden_start=null",
        "run.rollout_steps=1", "run.export_at_end=false", "algorithm.prompts_per_step=2", "algorithm.group_size=4",
        "algorithm.mini_batch_responses=8", "actor.layout.data=1", "rollout.servers=1",
    ]  # fmt: skip
    command = [sys.executable, "-P", "-m", "megatron_dapo.cli.main", "train", str(quickstart / "dapo.yaml"), *arguments]
    apart = ["unshare", "-rm"] if shell.startswith("mount") else []
    ended = subprocess.run(
        [*apart, "sh", "-c", f'{shell} && exec "$0" "$@"', *command],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | variables,
        cwd=cwd, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert ended.returncode == ExitCode.FINISHED, ended.stdout + ended.stderr


@pytest.mark.parametrize("name", VARIABLES)
def test_variables(tmp_path, name):
    train(tmp_path, **VARIABLES[name])


@pytest.mark.parametrize("name", SHELLS)
def test_limits(tmp_path, name):
    if SHELLS[name].startswith("mount") and not private_mounts():
        pytest.skip("needs unshare -rm (user namespaces)")
    train(tmp_path, shell=SHELLS[name])


def test_a_bad_shell_as_a_whole(tmp_path):
    """Several at once: what one is answered with must not need what another took away."""
    names = ("proxies", "a GPU that is not there", "many threads", "plain C", "a home that cannot be made")
    together = {key: value for name in names for key, value in VARIABLES[name].items()}
    (tmp_path / "elsewhere").mkdir()
    train(tmp_path, shell=SHELLS["few files"], cwd=tmp_path / "elsewhere", **together)


def test_a_long_temporary_folder(tmp_path):
    """Sockets stand there, whose paths may have 107 characters."""
    long = tmp_path / ("x" * 100)
    long.mkdir()
    train(tmp_path, TMPDIR=str(long))


def test_files_in_the_working_directory_that_are_named_like_modules(tmp_path):
    for name in NAMES:
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('not what was meant')\n")
    train(tmp_path, cwd=tmp_path)
