"""The batch script: the nodes that a layout needs, what it passes on, and that bash can read it."""

import shlex
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest

from megatron_dapo.cli.slurm import slurm
from megatron_dapo.config import ConfigError, load_config
from megatron_dapo.slurm.script import SlurmOptions, batch_script, limit_s, not_seen, used_of_nodes
from megatron_dapo.storage.run_dir import RunDirError

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "examples" / "qwen2.5_32b").glob("*.yaml"))
QUICKSTART = ROOT / "examples" / "quickstart" / "dapo.yaml"


def options(**changed) -> SlurmOptions:
    return SlurmOptions(**({"gpus_per_node": 8, "cpus_per_node": 64, "time": "24:00:00"} | changed))


def script(config=QUICKSTART, overrides=(), warn_s=600, **changed) -> str:
    return batch_script(config, list(overrides), load_config(config, list(overrides)), options(**changed), warn_s)


def requested(text: str) -> list[str]:
    """Options of sbatch in the script."""
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]


@pytest.mark.parametrize(
    ("name", "nodes"),
    [
        ("h100_16", 2),
        ("h100_16_colocated", 2),
        ("h100_32", 4),
        ("h100_128_colocated", 16),
        ("h100_128", 16),
        ("qwen2.5_7b_8gpu", 1),
        ("../qwen3_30b_a3b/h100_16", 2),
        ("../qwen3_30b_a3b/h100_16_colocated", 2),
        ("../qwen3_30b_a3b/h100_32", 4),
        ("../qwen3_30b_a3b/h100_32_colocated", 4),
    ],
)
def test_a_recipe_asks_for_the_nodes_of_its_layout(name, nodes):
    config = ROOT / "examples" / "qwen2.5_32b" / f"{name}.yaml"
    assert len(used_of_nodes(load_config(config, []), options())) == nodes
    assert f"#SBATCH --nodes={nodes}\n" in script(config)


def test_no_group_is_split_over_two_nodes():
    layout = ["actor.layout.tensor=4", "actor.layout.data=1", "rollout.servers=3", "rollout.tensor_parallel=2"]
    config = load_config(ROOT / "examples" / "qwen2.5_32b" / "paper.yaml", layout)
    assert [used_of_nodes(config, options(gpus_per_node=gpus)) for gpus in (10, 8, 6, 4)] == [
        [10],
        [8, 2],
        [6, 4],
        [4, 4, 2],
    ]
    with pytest.raises(ConfigError, match="a node has 3 GPUs"):
        used_of_nodes(config, options(gpus_per_node=3))


def test_a_server_that_is_larger_than_a_node_gets_equal_parts_of_several():
    layout = ["actor.layout.tensor=4", "actor.layout.data=1", "rollout.servers=2"]
    recipe = ROOT / "examples" / "qwen2.5_32b" / "paper.yaml"
    config = load_config(recipe, [*layout, "rollout.tensor_parallel=10"])
    assert used_of_nodes(config, options()) == [5, 5, 5, 5, 4]
    assert used_of_nodes(config, options(gpus_per_node=10)) == [10, 10, 4]
    with pytest.raises(ConfigError, match=r"rollout\.tensor_parallel = 9: a server is larger than a node, which has 8"):
        used_of_nodes(load_config(recipe, [*layout, "rollout.tensor_parallel=9"]), options())


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


def test_the_step_gets_the_cores_that_the_job_asks_for():
    """srun has not read the batch script's own line since Slurm 22.05."""
    text = script(RECIPES[0].with_name("h100_32.yaml"), cpus_per_node=48)
    assert "#SBATCH --cpus-per-task=48\n" in text
    (step,) = [line for line in text.splitlines() if line.startswith("srun ")]
    assert "--cpus-per-task=48" in step.split()


def test_names_with_spaces_and_quotes_stay_whole(tmp_path):
    overrides = [f"run.dir={tmp_path}/it's a run", "data.path=my data.jsonl"]
    text = script(overrides=overrides)
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0
    (line,) = [line for line in text.splitlines() if line.startswith("  train ")]
    words = shlex.split(line.removesuffix("&"))
    assert words == ["train", str(QUICKSTART), "data.path=my data.jsonl", overrides[0], "run.resume=true"]


def test_whole_nodes_are_asked_for_whole_and_one_gpu_alone():
    folder = ROOT / "examples" / "qwen2.5_32b"
    for name in ("h100_32", "qwen2.5_7b_8gpu"):
        assert {"--gpus-per-node=8", "--exclusive", "--mem=0", "--cpus-per-task=64"} <= set(
            requested(script(folder / f"{name}.yaml"))
        )
    one = script(folder / "qwen2.5_1.5b_1gpu.yaml")
    assert {"--nodes=1", "--gpus-per-node=1", "--cpus-per-task=8"} <= set(requested(one))
    assert not {"--exclusive", "--mem=0"} & set(requested(one))
    assert "srun --kill-on-bad-exit=1 --cpus-per-task=8 " in one
    assert "--mem=0" not in requested(script(folder / "h100_32.yaml", sbatch=["--mem-per-gpu=200G"]))
    assert "gpus-per-node" not in script(gpus_per_node=0)
    assert "exclusive" not in script(gpus_per_node=0)
    layout = ["actor.layout.tensor=2", "actor.layout.data=1", "rollout.servers=1"]
    two = requested(script(overrides=layout, gpus_per_node=0, cpus_per_node=2))
    assert {"--nodes=2", "--exclusive", "--mem=0"} <= set(two)


def step_of(text: str) -> list[str]:
    """Words of the command that starts the nodes."""
    return shlex.split(text[text.index("\nsrun ") : text.index(" &\n")].replace("\\\n", " "))


def test_what_this_machine_does_not_see_is_said(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").touch()
    given = ["model.path=/not/here/model", "data.path=a.js*", "evaluation.path=b.jsonl"]
    model, heldout = not_seen(load_config(QUICKSTART, given))
    assert model == "/not/here/model: not seen from this machine; every node must see it"
    assert heldout.startswith(f"{tmp_path}/b.jsonl: ")
    monkeypatch.chdir(ROOT)
    assert not_seen(load_config(QUICKSTART)) == []
    (disk,) = not_seen(load_config(QUICKSTART, ["run.dir=/no_such_disk/runs/first"]))
    assert disk.startswith("/no_such_disk: not seen from this machine")


def test_the_command_takes_over_the_folders_of_its_own_verifiers(tmp_path, monkeypatch):
    (tmp_path / "my rules").mkdir()
    (tmp_path / "my rules" / "my_rule.py").write_text("def judge(request):\n    return None\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"my rules::{ROOT}")
    words = ["slurm", str(QUICKSTART), "run.dir=run", "reward.verifier=my_rule:judge"]
    command = [sys.executable, "-m", "megatron_dapo.cli.main", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert f"export PYTHONPATH='{tmp_path}/my rules:{ROOT}'\n" in done.stdout
    assert "my_rule" not in done.stderr, "it can be run here"


@pytest.mark.parametrize(
    ("given", "written"),
    [
        ("--comment=hello world", "'--comment=hello world'"),
        ("--comment=a - b #c", "'--comment=a - b #c'"),
        ('--comment="hello world"', '--comment="hello world"'),
        ("-p h100", "-p h100"),
        ("--partition h100", "--partition h100"),
        ("--partition=h100 -A me", "--partition=h100 -A me"),
        ("--gres=gpu:h100:8", "--gres=gpu:h100:8"),
        ("--time-min=1:00:00", "--time-min=1:00:00"),
        ("--nodelist=a[1-2],b", "'--nodelist=a[1-2],b'"),
    ],
)
def test_an_option_with_blanks_in_its_value_is_one_word_for_sbatch(given, written):
    assert written in requested(script(sbatch=(given,)))


@pytest.mark.parametrize(
    ("lines", "code", "said"),
    [
        (("shopt -s extglob", "echo !(no such file*) ready  # a 'comment'"), 0, "ready"),
        (("echo ${NOT_SET}ready", "module() { return 0; }", "module load cuda"), 0, "ready"),
        (("false | true", "[ -d / ] && echo there"), 0, "there"),
        (("export A=it\\'s", "module load cuda", "echo went on"), 2, "failed with exit code 127: module load cuda"),
        (("(exit 75)  # its 'own' code",), 2, "failed with exit code 75: (exit 75)  # its 'own' code"),
    ],
)
def test_setup_lines_run_as_at_a_prompt_and_one_that_fails_ends_the_job(lines, code, said, tmp_path):
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("srun", "scontrol"):
        (programs / name).write_text('#!/bin/sh\necho "$0"\n')
        (programs / name).chmod(0o755)
    text = script(overrides=[f"run.dir={tmp_path}/run"], setup=lines)
    environment = {"PATH": f"{programs}:/usr/bin:/bin", "SLURM_JOB_ID": "7"}
    done = subprocess.run(["bash"], input=text, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    assert said in done.stdout
    assert ("srun" in done.stdout) == (code == 0)
    assert "scontrol" not in done.stdout
    assert "went on" not in done.stdout


@pytest.mark.parametrize(
    ("overrides", "changed", "words"),
    [
        (['run.dir="/tmp/a\\nrm -rf b"'], {}, "line break"),
        ([], {"sbatch": ("--partition=a\ntouch b",)}, "line break"),
        ([], {"sbatch": ("--time=5",)}, "--sbatch=--time=5: would replace the script's own"),
        ([], {"sbatch": ("--time-min=5", "-N 3")}, "--sbatch=-N 3"),
        ([], {"sbatch": ("--ntasks-per-core=1", "--ntasks-per-node=4")}, "--sbatch=--ntasks-per-node=4"),
        ([], {"sbatch": ("--ntasks=4",)}, "--sbatch=--ntasks=4"),
        ([], {"sbatch": ("-n4",)}, "--sbatch=-n4"),
        ([], {"sbatch": ("--tasks-per-node=2",)}, "--sbatch=--tasks-per-node=2"),
        ([], {"sbatch": ("--nod=2",)}, "--sbatch=--nod=2"),
        ([], {"sbatch": ("--ntasks-per=2",)}, "--sbatch=--ntasks-per=2"),
        ([], {"sbatch": ("--cpus-per-ta 3",)}, "--sbatch=--cpus-per-ta 3"),
        ([], {"sbatch": ("-p h100 -t 5",)}, "--sbatch=-p h100 -t 5"),
        ([], {"sbatch": ("--partition=h100 --sig=USR1@5",)}, "--sbatch=--partition=h100 --sig=USR1@5"),
        ([], {"sbatch": ("--cpus-per-gpu=2", "--cpus-per-task=4")}, "--sbatch=--cpus-per-task=4: .* --cpus-per-node"),
        ([], {"time": "1:00:00\ntouch b"}, "no time limit of Slurm's"),
        ([], {"time": "10", "warn_s": 600}, r"no longer than that.*\(--warn=200\)"),
        (["run.resume=true", "run.resume_step=3"], {}, "run.resume_step = 3: every start"),
        (["run.dir='r\\1'"], {}, r"run.dir = .*r\\1: Slurm takes no backslash"),
        ([], {"setup": ("true", 'export A="x')}, '--setup export A="x: bash cannot read it by itself'),
        ([], {"setup": ("cat <<END",)}, "--setup cat <<END: "),
        ([], {"setup": ("export A=x \\",)}, "--setup export A=x "),
        ([], {"setup": ("true &&",)}, "--setup true &&: "),
    ],
)
def test_what_would_make_another_script_of_it_is_refused(overrides, changed, words):
    with pytest.raises(ConfigError, match=words):
        script(overrides=overrides, **changed)


@pytest.mark.parametrize(
    ("time", "seconds"),
    [
        ("90", 5400),
        ("30:10", 1810),
        ("24:00:00", 86400),
        ("2-12", 216000),
        ("2-12:30", 217800),
        ("1-0:0:5", 86405),
        ("UNLIMITED", None),
        ("0", None),
        ("00:00:00", None),
        ("0-0", None),
    ],
)
def test_time_limits(time, seconds):
    assert limit_s(time) == seconds


def test_slurm_reads_one_job_name_and_takes_no_name_of_its_own_for_a_percent_sign(tmp_path):
    text = script(overrides=[f"run.dir={tmp_path}/it's 100%j"])
    assert "#SBATCH --job-name=it_s_100_j\n" in text
    (output,) = [line for line in text.splitlines() if "--output=" in line]
    assert shlex.split(output)[1:] == [f"--output={tmp_path}/it's 100%%j/logs/slurm-%j.log"]


@pytest.fixture
def job(tmp_path):
    """Runs the script with programs that stand in for Slurm's: (exit code of the run, bash lines of srun) -> output."""
    text, programs = script(overrides=[f"run.dir={tmp_path}/run"]), tmp_path / "bin"
    programs.mkdir()
    (tmp_path / "run" / "slurm").mkdir(parents=True)
    starts = iter(range(100))

    def start(code: int, lines: str = "") -> str:
        for name, content in (("srun", f"{lines}\nexit {code}"), ("scontrol", 'echo "$@"')):
            (programs / name).write_text(f"#!/usr/bin/env bash\ncd {tmp_path}/run\n{content}\n")
            (programs / name).chmod(0o755)
        environment = {
            "PATH": f"{programs}:/usr/bin:/bin",
            "SLURM_JOB_ID": "7",
            "SLURM_RESTART_COUNT": str(next(starts)),
        }
        done = subprocess.run(["bash"], input=text, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stderr
        return done.stdout

    return start


def test_only_a_run_that_says_continue_goes_back_into_the_queue(job):
    assert "requeue 7" in job(75)
    assert "requeue" not in job(6)
    assert "requeue" not in job(0)


def test_the_runs_own_code_counts_where_srun_tells_how_it_ended_the_other_nodes(job):
    assert "requeue 7" in job(75, "mkdir slurm/7.0; printf 75 >slurm/7.0/code; exit 143")
    assert "requeue" not in job(6, "mkdir slurm/7.1; printf 6 >slurm/7.1/code; exit 143")


def test_a_job_that_may_not_be_requeued_says_how_its_run_goes_on(job, tmp_path):
    shown = job(75, f"""echo '[ "$1" = show ] && echo Requeue=0 || echo "$@"' >{tmp_path}/bin/scontrol""")
    assert "requeue 7" not in shown
    assert "job 7 may not start again, so not going back into the queue. The next job of the chain" in shown


@pytest.mark.parametrize(
    "save",
    ["mkdir -p checkpoints; date +%N > checkpoints/latest", "mkdir -p rollout; echo x >> rollout/progress.npz"],
)
def test_starts_that_save_nothing_end_some_time(save, job):
    """Neither a checkpoint nor more of a rollout."""
    shown = [job(75, lines) for lines in ("", "", save, "", "", "")]
    assert ["requeue" in output for output in shown] == [True] * 5 + [False]
    assert "raise --time" in shown[-1]


def test_a_warning_reaches_the_run_and_one_of_an_earlier_job_does_not(job, tmp_path):
    (tmp_path / "run" / "stop").touch()
    assert "left over" not in job(75, "[ -e stop ] && echo left over")
    warn = "kill -USR1 $PPID; for _ in {1..100}; do [ -e stop ] && { echo seen; break; }; read -t 0.1 <> <(:); done"
    assert "seen" in job(75, warn)


def test_the_users_file_stop_ends_the_job_for_good_and_the_warning_does_not(job, tmp_path):
    stop = tmp_path / "run" / "stop"
    save = "mkdir -p checkpoints; date +%N > checkpoints/latest"
    assert "requeue 7" in job(75, f"echo 7 > stop; {save}"), "the script's own, which holds the job's number"
    assert "requeue 7" in job(75, save)
    assert not stop.exists()
    shown = job(75, f"touch stop; kill -USR1 $PPID; {save}")
    assert "requeue 7" not in shown, "also where the time limit comes near while it saves"
    assert f"stopped by {stop}" in shown


def test_a_job_that_waits_in_the_queue_again_is_ended_by_the_users_file_too(job, tmp_path):
    save = "mkdir -p checkpoints; date +%N > checkpoints/latest"
    assert "requeue 7" in job(75, save)
    (tmp_path / "run" / "stop").touch()
    shown = job(75, "echo started")
    assert "started" not in shown
    assert "requeue" not in shown
    assert "submit the script again" in shown


@pytest.mark.parametrize(("submitted", "starts"), [(-60, False), (60, True), (None, True)])
def test_a_job_of_a_chain_that_was_submitted_before_the_users_stop_does_not_start(submitted, starts, job, tmp_path):
    stop = tmp_path / "run" / "stop"
    stop.touch()
    when = (
        "" if submitted is None else datetime.fromtimestamp(stop.stat().st_mtime + submitted).isoformat("T", "seconds")
    )
    (tmp_path / "bin" / "squeue").write_text(f"#!/usr/bin/env bash\necho {when}\n")
    (tmp_path / "bin" / "squeue").chmod(0o755)
    shown = job(75, "echo started")
    assert ("started" in shown, "does not start;" in shown) == (starts, not starts)


def test_apptainer_gets_one_word_for_each_and_then_the_program(tmp_path):
    """As bash reads the script, with names that need quotes."""
    image = f"{tmp_path}/it's here.sif"
    text = script(overrides=[f"run.dir={tmp_path}/a run"], container=image, mounts="/my data:/data,/b:/b")
    programs = tmp_path / "bin"
    programs.mkdir()
    srun = 'while [[ $1 == --* ]]; do shift; done; exec "$@"'
    for name, content in (("srun", srun), ("apptainer", 'printf "<%s>\\n" "$@"')):
        (programs / name).write_text(f"#!/usr/bin/env bash\n{content}\n")
        (programs / name).chmod(0o755)
    environment = {"PATH": f"{programs}:/usr/bin:/bin", "SLURM_JOB_ID": "7"}
    done = subprocess.run(["bash"], input=text, env=environment, capture_output=True, text=True, check=True)
    words = [line[1:-1] for line in done.stdout.splitlines()]
    assert words[:5] == ["exec", "--nv", "--bind=/my data:/data,/b:/b", f"--pwd={Path.cwd()}", image]
    assert words[5:10] == ["python", "-m", "megatron_dapo.slurm.node", f"{tmp_path}/a run", "600"]


WARN = "kill -USR1 $PPID; for _ in {1..100}; do [ -s stop ] && { rm stop; break; }; read -t 0.1 <> <(:); done"
"""The batch script's warning, and a run that notices it and takes the file away (`run.stop_on_file`)."""


def test_a_users_stop_counts_beside_the_scripts_own(job, tmp_path):
    assert "requeue 7" in job(75, WARN)
    assert "requeue" not in job(75, f"{WARN}; touch stop")  # while the run saves
    (tmp_path / "run" / "stop").touch()  # while the job waits in the queue again
    assert "does not start" in job(75, "echo started")


def test_what_a_run_that_died_left_of_the_scripts_own_is_gone_before_the_queue(job, tmp_path):
    assert "requeue 7" in job(75, WARN.replace("rm stop; ", ""))
    assert not (tmp_path / "run" / "stop").exists()


def test_set_e_of_a_setup_line_does_not_keep_a_job_from_its_queue(tmp_path):
    text = script(overrides=[f"run.dir={tmp_path}"], setup=("set -e",))
    assert text.index("checked 'set -e'") < text.index("set +e -uo pipefail") < text.index("wait ")


def test_a_run_directory_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "a.csv").touch()
    with pytest.raises(RunDirError, match=r"run.dir = .*a.csv: Not a directory; choose a directory that you can write"):
        slurm(QUICKSTART, [f"run.dir={tmp_path}/a.csv"], gpus_per_node=0)
