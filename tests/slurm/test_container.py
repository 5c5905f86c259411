"""What the batch script mounts in a container, and what it leaves to the options of sbatch."""

import sys

import pytest

from megatron_dapo.cli.slurm import slurm
from megatron_dapo.config import ConfigError
from tests.slurm.test_script import QUICKSTART, RECIPES, requested, script, step_of


@pytest.mark.parametrize("image", ["registry/image:1", "/images/it's here.sif"])
def test_a_container_holds_model_and_data_wherever_they_are(image, tmp_path, monkeypatch):
    """A model of a hub's cache is a folder of links; `models` is a link in the current folder."""
    here, disk = tmp_path / "here", tmp_path / "disk"
    for folder in (here, disk / "blobs", disk / "snapshot", tmp_path / "data"):
        folder.mkdir(parents=True)
    (disk / "blobs" / "1").touch()
    (disk / "snapshot" / "config.json").symlink_to("../blobs/1")
    (here / "models").symlink_to(disk)
    (tmp_path / "data" / "a.jsonl").touch()
    monkeypatch.chdir(here)
    overrides = [
        "model.path=models/snapshot",
        f"data.path={tmp_path}/data/a.jsonl",
        "evaluation.path=none.jsonl",
        "run.dir=run",
    ]
    text = script(overrides=overrides, container=image)
    places = [disk / "blobs", disk / "snapshot", here, tmp_path / "data" / "a.jsonl", QUICKSTART]
    mounts = ",".join(sorted(f"{place}:{place}" for place in places))
    words = step_of(text)
    if image.endswith(".sif"):
        assert words[3:9] == ["apptainer", "exec", "--nv", f"--bind={mounts}", f"--pwd={here}", image]
    else:
        assert words[3:6] == [
            f"--container-image={image}",
            f"--container-mounts={mounts}",
            f"--container-workdir={here}",
        ]
    assert "\n  python -m megatron_dapo.slurm.node" in text
    assert f"\n  {sys.executable} -m megatron_dapo.slurm.node" in script()
    assert "--container-mounts=/data:/data" in script(container="image.sqsh", mounts="/data:/data")


def test_a_container_holds_a_draft_model_and_the_hubs_cache_where_that_is(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    drafting = "rollout.speculative={algorithm: eagle3, draft_model: /models/draft}"
    words = ["model.path=hf://Qwen/Qwen2.5-0.5B", "rollout.deterministic=false", drafting]
    text = script(overrides=words, container="image.sqsh")
    (mounts,) = [word for word in step_of(text) if word.startswith("--container-mounts=")]
    assert {f"{tmp_path}/hub:{tmp_path}/hub", "/models/draft:/models/draft"} <= set(mounts.partition("=")[2].split(","))


def test_a_container_gets_what_only_the_nodes_see(tmp_path, monkeypatch):
    """And the folders in which a verifier is looked for."""
    monkeypatch.chdir(tmp_path)
    overrides = ["model.path=/not/here/model", "data.path=/not/here/rows-*.parquet", "evaluation.path=/away/aime.jsonl"]
    text = script(overrides=[*overrides, "run.dir=run"], container="image", python_path=("/own/rules",))
    (mounts,) = [word for word in step_of(text) if word.startswith("--container-mounts=")]
    places = {pair.partition(":")[0] for pair in mounts.removeprefix("--container-mounts=").split(",")}
    assert {"/not/here", "/away/aime.jsonl", "/own/rules", str(tmp_path)} <= places
    assert "\nexport PYTHONPATH=/own/rules\n" in text


@pytest.mark.parametrize("name", ["image.sqsh", "file"])
def test_an_image_that_is_a_file_has_a_slash_in_its_name(name, tmp_path, monkeypatch, capsys):
    """Pyxis takes a name without one for an image of a registry."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    slurm(QUICKSTART, ["run.dir=run"], gpus_per_node=0, container=name)
    assert f"--container-image={tmp_path / name}" in step_of(capsys.readouterr().out)


@pytest.mark.parametrize("option", ["--gres=gpu:h100:8", "--gres=nvme:1,gpu:8", "--gpus-per-node=h100:8", "-G8"])
def test_a_site_that_wants_gpus_in_its_own_words_is_asked_in_them_alone(option):
    asked = requested(script(RECIPES[0], sbatch=(option,)))
    assert [one for one in asked if "gpu" in one or "-G" in one] == [option]


@pytest.mark.parametrize("option", ["--gres-flags=enforce-binding", "--gres=nvme:1"])
def test_what_asks_for_something_else_leaves_the_gpus_asked_for(option):
    assert {option, "--gpus-per-node=8"} <= set(requested(script(RECIPES[0], sbatch=(option,))))


def test_colocated_on_cpus_a_server_may_be_larger_than_the_trainer():
    keys = ["run.mode=colocated", "actor.layout.data=1", "rollout.tensor_parallel=2", "rollout.servers=1"]
    keys += ["actor.offload.between_phases=all"]
    assert "--nodes=1" in requested(script(overrides=keys, gpus_per_node=0))


def test_colocated_servers_that_do_not_match_the_layout_are_refused_before_the_queue():
    (recipe,) = [each for each in RECIPES if each.stem == "h100_32_colocated"]
    with pytest.raises(ConfigError, match=r"= 32 must be the 16 GPUs of actor\.layout; set rollout\.servers to 2"):
        script(recipe, ["actor.layout.data=1"])


def test_colocated_servers_larger_than_the_trainers_groups_count_whole():
    """A server of four GPUs does not stand on the two that a node of six has left."""
    (recipe,) = [each for each in RECIPES if each.stem == "h100_32_colocated"]
    layout = (
        "actor.layout={tensor: 2, pipeline: 6, context: 1, data: 1, virtual_pipeline: null, sequence_parallel: true}"
    )
    keys = [layout, "rollout.tensor_parallel=4", "rollout.servers=3"]
    assert "--nodes=3" in requested(script(recipe, keys, gpus_per_node=6))
