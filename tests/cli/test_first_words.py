"""What a newcomer types first: the version, a wrong path, keys with dashes."""

import os
import subprocess
import sys

import pytest

from megatron_dapo.cli.main import main
from reward.registry import load, load_named
from reward.verdict import LoadError, VerifierError
from tests.processes import ROOT

QUICKSTART = str(ROOT / "examples" / "quickstart" / "dapo.yaml")


def typed(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["megatron-dapo", *words])
    main()


def test_the_version_is_printed(monkeypatch, capsys):
    typed(monkeypatch, "--version")
    assert capsys.readouterr().out.startswith("megatron-dapo 0.")


def test_keys_may_be_written_with_dashes(monkeypatch, capsys):
    with pytest.raises(SystemExit) as ended:
        typed(monkeypatch, "check", QUICKSTART, "--run.dir=elsewhere", "--actor.layout.tensor=1")
    assert ended.value.code == 0
    assert "dir: elsewhere" in capsys.readouterr().out


def test_a_run_needs_no_held_out_problems_and_check_says_so(monkeypatch, capsys):
    said = "# evaluation.path is not set: the run trains without held-out evaluation"
    for words, shown in ((["evaluation.path=null"], True), ([], False)):
        with pytest.raises(SystemExit):
            typed(monkeypatch, "check", QUICKSTART, *words)
        assert (said in capsys.readouterr().out.splitlines()) == shown
    with pytest.raises(SystemExit):
        typed(monkeypatch, "check", QUICKSTART, "evaluation={every: 5, path: null}")
    assert "evaluation.every = 5: no problems are held out; set evaluation.path too" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        typed(monkeypatch, "eval", QUICKSTART, "evaluation.path=null")
    assert "evaluation.path is not set: name a file of problems to answer" in capsys.readouterr().err


def test_a_run_that_is_not_there_is_no_config_that_is_not_there(monkeypatch, capsys):
    with pytest.raises(SystemExit) as ended:
        typed(monkeypatch, "eval", "runs/nope")
    assert ended.value.code == 2
    assert (
        "config file runs/nope: No such file or directory; give a YAML file in UTF-8, or a run's folder"
        in capsys.readouterr().err
    )


def test_a_verifier_in_another_folder_is_told_of_pythonpath():
    with pytest.raises(VerifierError, match="No module named 'nowhere'; set PYTHONPATH to the folder of the module"):
        load("nowhere:judge")


def test_code_of_ones_own_may_lie_in_the_working_directory(tmp_path, monkeypatch):
    """A loss as well as a verifier; a file there hides nothing that is installed."""
    for name in ("lies_here", "numpy"):
        (tmp_path / f"{name}.py").write_text("def judge(request): return True")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    assert load_named("lies_here:judge")(None)
    with pytest.raises(LoadError, match="module numpy has no function or class judge"):
        load_named("numpy:judge")


def test_check_says_how_weights_will_travel(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    for override, ways in (("run.mode=sync", ("distributed", "disk")), ("run.mode=colocated", ("tensor", "disk"))):
        with pytest.raises(SystemExit):
            typed(
                monkeypatch,
                "check",
                QUICKSTART,
                override,
                "rollout.deterministic=false",
                "actor.offload.between_phases=all",
            )
        assert "# new weights reach the servers by: {} on GPUs, {} on a CPU".format(*ways) in capsys.readouterr().out


def test_check_looks_at_the_model_and_says_what_it_does_not_look_at(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    for key, code in {"layout.tensor=1": 0, "layout.tensor=3": 2, "recompute=100": 2, "recompute=[moe]": 2}.items():
        with pytest.raises(SystemExit) as ended:
            typed(monkeypatch, "check", QUICKSTART, f"actor.{key}")
        assert ended.value.code == code, key
    said = capsys.readouterr()
    assert "# weights, tokenizer, data and code of your own were not looked at: megatron-dapo doctor does" in said.out
    assert "actor.layout.tensor = 3: must divide" in said.err


@pytest.mark.parametrize("before", ["reward.py", "rollout/__init__.py"])
def test_a_file_of_the_users_that_is_named_like_ours_hides_nothing(tmp_path, before):
    (tmp_path / before).parent.mkdir(exist_ok=True)
    (tmp_path / before).write_text("raise RuntimeError('not what was meant')")
    program = "import megatron_dapo, reward.registry, rollout.config; print(reward.__file__, rollout.__file__)"
    path = os.pathsep.join((str(tmp_path), str(ROOT)))
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    assert ended.stdout.split() == [str(ROOT / name / "__init__.py") for name in ("reward", "rollout")]
