"""The batch script: the nodes that a layout needs, what it passes on, and that bash can read it."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_dapo.config import ConfigError, load_config
from megatron_dapo.slurm.node import Job, NodeError
from megatron_dapo.slurm.script import SlurmOptions, batch_script, nodes_needed

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "examples" / "qwen2.5_32b").glob("*.yaml"))
QUICKSTART = ROOT / "examples" / "quickstart" / "dapo.yaml"


def options(**changed) -> SlurmOptions:
    return SlurmOptions(**({"gpus_per_node": 8, "cpus_per_node": 64, "time": "24:00:00", "warn_s": 600} | changed))


def script(config=QUICKSTART, overrides=(), **changed) -> str:
    return batch_script(config, list(overrides), load_config(config, list(overrides)), options(**changed))


@pytest.mark.parametrize(
    ("name", "nodes"),
    [
        ("h100_16", 2),
        ("h100_16_colocated", 2),
        ("h100_32", 4),
        ("h100_128_colocated", 16),
        ("h100_128", 16),
        ("qwen2.5_7b_8gpu", 1),
    ],
)
def test_a_recipe_asks_for_the_nodes_of_its_layout(name, nodes):
    config = ROOT / "examples" / "qwen2.5_32b" / f"{name}.yaml"
    assert nodes_needed(load_config(config, []), options()) == nodes
    assert f"#SBATCH --nodes={nodes}\n" in script(config)


def test_no_group_is_split_over_two_nodes():
    layout = ["actor.layout.tensor=4", "actor.layout.data=1", "rollout.servers=3", "rollout.tensor_parallel=2"]
    config = load_config(ROOT / "examples" / "qwen2.5_32b" / "paper.yaml", layout)
    assert [nodes_needed(config, options(gpus_per_node=gpus)) for gpus in (10, 8, 6, 4)] == [1, 2, 2, 3]
    with pytest.raises(ConfigError, match="a node has 3 GPUs"):
        nodes_needed(config, options(gpus_per_node=3))


def test_too_few_nodes_are_refused():
    with pytest.raises(ConfigError, match="need at least 4 nodes"):
        script(ROOT / "examples" / "qwen2.5_32b" / "h100_32.yaml", nodes=3)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
@pytest.mark.parametrize("container", [None, "registry/image:1"])
def test_every_recipe_gives_a_script_that_bash_can_read(recipe, container, tmp_path):
    file = tmp_path / "run.sbatch"
    file.write_text(script(recipe, container=container, setup=("module load cuda",), sbatch=("--partition=h100",)))
    subprocess.run(["bash", "-n", str(file)], check=True)
    assert "sleep" not in file.read_text()


def test_names_with_spaces_and_quotes_stay_whole(tmp_path):
    overrides = [f"run.dir={tmp_path}/it's a run", "data.path=my data.jsonl"]
    text = script(overrides=overrides)
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0
    (line,) = [line for line in text.splitlines() if line.startswith("  train ")]
    words = shlex.split(line.removesuffix("&"))
    assert words == ["train", str(QUICKSTART), "data.path=my data.jsonl", overrides[0], "run.resume=true"]


def test_the_container_gets_the_folders_and_the_bare_environment_its_python():
    inside = script(container="image.sqsh", mounts="/data:/data")
    assert "--container-image=image.sqsh" in inside
    assert "--container-mounts=/data:/data" in inside
    assert "\n  python -m megatron_dapo.slurm.node" in inside
    assert f"\n  {sys.executable} -m megatron_dapo.slurm.node" in script()
    assert "gpus-per-node" not in script(gpus_per_node=0)


def test_a_node_that_srun_did_not_start_says_so(tmp_path):
    with pytest.raises(NodeError, match="SLURM_JOB_ID is not set"):
        Job.of(tmp_path, 1.0, {})
