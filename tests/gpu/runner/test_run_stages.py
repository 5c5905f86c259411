"""The runner with stages that crash, hang, raise and skip: none stops the others, and all of it is written."""

import json
import os
import signal
import subprocess
import sys
import tarfile
import textwrap
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.gpu.runner import run_stages
from tests.gpu.runner.gpu_page import page
from tests.gpu.runner.results import Results
from tests.gpu.runner.stages import STAGES

ROOT = Path(__file__).parents[3]
HEAD = "import pytest\npytestmark = pytest.mark.gpu\n"
BODIES = {
    "good": "def test_good(record):\n    record('speed', {'GB/s': 2.5})",
    "crash": "import os, signal\ndef test_crash():\n    os.kill(os.getpid(), signal.SIGSEGV)",
    "hang": """
        import subprocess, sys, time
        def test_first():
            pass
        def test_hang(record):
            # A child in a session of its own, as a server is.
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
            record("child", child.pid)
            time.sleep(600)
    """,
    "raise": "def test_raise():\n    raise ValueError('no | kernel')\ndef test_after():\n    pass",
    "skip": "def test_skip():\n    pytest.skip('no TransformerEngine')",
    "broken": "import a_package_that_is_not_there\ndef test_broken():\n    pass",
    # Each of the two waits for the other one; `alone` for none of them.
    "meets": "from tests.gpu.runner.test_run_stages import meet\ndef test_meets():\n    meet(__file__, 'met')",
    "met": "from tests.gpu.runner.test_run_stages import meet\ndef test_met():\n    meet(__file__, 'meets')",
    "alone": """
        import json, pathlib
        def test_alone():
            results = json.loads((pathlib.Path(__file__).parent / "results" / "results.json").read_text())
            unfinished = {name for name, stage in results["stages"].items() if stage["outcome"] == "interrupted"}
            assert unfinished - {"orphan"} == {"alone"}, "what ran before is written"
    """,
    "orphan": "import os, signal\ndef test_orphan():\n    os.kill(os.getppid(), signal.SIGKILL)",
    "leaves": """
        import subprocess, sys
        def test_leaves():
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    """,
}


def meet(file: str, other: str) -> None:
    """Returns once the stage `other` is here too."""
    Path(file).with_suffix(".here").touch()
    deadline = time.monotonic() + 60
    while not Path(file).with_name(f"test_{other}.here").exists():
        assert time.monotonic() < deadline, f"{other} does not come"
        time.sleep(0.05)


def command(folder: Path, stages: dict[str, dict[str, Any]], *arguments: str, device: str = "cpu") -> list[str]:
    """The runner over stages made of BODIES; a process of its own, since it kills every process below it."""
    made = []
    for name, fields in stages.items():
        file = folder / f"test_{name}.py"
        file.write_text(HEAD + textwrap.dedent(BODIES[name]))
        plan = {"name": name, "tests": (str(file),), "shows": f"what {name} shows", "planned_s": 1, "cpu": True}
        made.append(plan | {"deadline_s": 40} | fields)
    given = ["--device", device, "--folder", str(folder / "results"), *arguments]
    code = (
        "import sys; from tests.gpu.runner import run_stages, stages\n"
        "run_stages.GRACE_S = 1.0; run_stages.visible_gpus = lambda: 1\n"
        f"sys.exit(run_stages.main({given!r}, [stages.Stage(**fields) for fields in {made!r}]))"
    )
    return [sys.executable, "-c", code]


def run(
    folder: Path, stages: dict[str, dict[str, Any]], *arguments: str, device: str = "cpu", **environment: str
) -> tuple[int, dict[str, Any], str]:
    """Exit code, results and output of the command."""
    done = subprocess.run(
        command(folder, stages, *arguments, device=device),
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    file = folder / "results" / "results.json"
    assert file.exists(), done.stderr
    return done.returncode, json.loads(file.read_text()), done.stdout


@pytest.mark.slow
def test_a_stage_that_crashes_does_not_stop_the_next(tmp_path: Path) -> None:
    code, results, _ = run(tmp_path, {"crash": {}, "good": {}}, OUT=str(tmp_path / "out"))
    outcomes = {name: stage["outcome"] for name, stage in results["stages"].items()}
    assert outcomes == {"crash": "crashed", "good": "passed"}
    assert code == 1
    assert results["stages"]["crash"]["reason"] == "SIGSEGV in test_crash.py::test_crash"
    assert results["stages"]["good"]["figures"] == {"speed": {"GB/s": 2.5}}
    assert {file.name for file in (tmp_path / "out").iterdir()} == {"results.json", "gpu.md", "logs.tar.gz"}


@pytest.mark.slow
def test_no_stage_stops_the_others(tmp_path: Path) -> None:
    wanted: dict[str, dict[str, Any]] = {
        "crash": {},
        "hang": {"deadline_s": 15},
        "raise": {},
        "broken": {},
        "leaves": {},
        "skip": {},
        "good": {},
    }
    code, results, output = run(tmp_path, wanted, OUT=str(tmp_path / "out"))
    stages = results["stages"]
    outcomes = {name: stage["outcome"] for name, stage in stages.items()}
    assert outcomes == {
        "crash": "crashed",
        "hang": "timed out",
        "raise": "failed",
        "broken": "failed",
        "leaves": "failed",
        "skip": "skipped",
        "good": "passed",
    }
    assert code == 1
    assert stages["crash"]["reason"] == "SIGSEGV in test_crash.py::test_crash"
    assert stages["hang"]["reason"].endswith("in test_hang.py::test_hang")
    assert stages["hang"]["tests"]["test_hang.py::test_first"]["outcome"] == "passed"
    assert not psutil.pid_exists(stages["hang"]["figures"]["child"])
    assert "no | kernel" in stages["raise"]["reason"]
    assert stages["raise"]["tests"]["test_raise.py::test_after"]["outcome"] == "passed"
    assert "a_package_that_is_not_there" in stages["broken"]["reason"]
    assert "left behind" in stages["leaves"]["reason"]
    assert stages["skip"]["reason"] == "no TransformerEngine"
    assert stages["good"]["figures"] == {"speed": {"GB/s": 2.5}}
    last = output.splitlines()
    assert [line.split()[0] for line in last[-9:-2] if line] == list(wanted)
    written = (tmp_path / "out" / "gpu.md").read_text()
    assert "| speed | GB/s 2.5 |" in written
    assert "no \\| kernel" in written
    assert {file.name for file in (tmp_path / "out").iterdir()} == {"results.json", "gpu.md", "logs.tar.gz"}


@pytest.mark.slow
def test_stages_run_side_by_side_and_then_alone(tmp_path: Path) -> None:
    out = tmp_path / "out"
    wanted = {name: {"deadline_s": 90} for name in ("alone", "crash", "orphan", "meets", "met")}
    wanted["alone"] = wanted["alone"] | {"alone": True}
    code, results, output = run(tmp_path, wanted, "--together", OUT=str(out))
    stages = results["stages"]
    outcomes = {name: stage["outcome"] for name, stage in stages.items()}
    passed = dict.fromkeys(("meets", "met", "alone"), "passed")
    assert outcomes == passed | {"crash": "crashed", "orphan": "interrupted"}, stages
    assert code == 1
    assert stages["orphan"]["reason"] == "its process ended with code -9"
    assert stages["crash"]["reason"] == "SIGSEGV in test_crash.py::test_crash"
    assert "--- met: passed after" in output
    with tarfile.open(out / "logs.tar.gz") as archive:
        assert set(archive.getnames()) == {f"{name}.log" for name in wanted}
    assert not list((tmp_path / "results" / "together").iterdir())
    again = run(tmp_path, wanted, "--together", "--resume")[2]
    assert [line.split()[1] for line in again.splitlines() if line.startswith("===")] == ["orphan:"]


@pytest.mark.parametrize("by", [pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGKILL])
def test_a_cut_command_keeps_what_was_found_and_leaves_no_process(by: signal.Signals, tmp_path: Path) -> None:
    stages: dict[str, dict[str, Any]] = {"hang": {}, "good": {}}
    file = tmp_path / "results" / "results.json"
    record = tmp_path / "results" / "together" / "hang" / "hang.jsonl"
    child = subprocess.Popen(command(tmp_path, stages, "--together"), cwd=ROOT, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not (file.exists() and "passed" in file.read_text() and record.exists() and "child" in record.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    below = psutil.Process(child.pid).children(recursive=True)
    child.send_signal(by)
    child.wait(30)
    _, alive = psutil.wait_procs(below, 30)
    assert len(below) == 3, "a runner of the stage, pytest and its child"
    assert not alive
    outcomes = {name: stage["outcome"] for name, stage in json.loads(file.read_text())["stages"].items()}
    assert outcomes == {"hang": "interrupted", "good": "passed"}


@pytest.mark.slow
def test_the_limit_of_the_command_cuts_stages_side_by_side(tmp_path: Path) -> None:
    fields: dict[str, dict[str, Any]] = {"hang": {}, "good": {"alone": True}, "skip": {"planned_s": 100}}
    code, results, _ = run(tmp_path, fields, "--together", "--minutes", "0.1")
    assert {name: stage["outcome"] for name, stage in results["stages"].items()} == {
        "hang": "timed out",
        "good": "not run",
        "skip": "not run",
    }
    assert results["stages"]["hang"]["seconds"] < 40
    assert code == 1


@pytest.mark.slow
def test_a_resume_runs_what_has_no_result(tmp_path: Path) -> None:
    long = {"planned_s": 100}
    code, results, _ = run(tmp_path, {"good": {}, "skip": long}, "--minutes", "1")
    assert results["stages"]["good"]["outcome"] == "passed"
    assert results["stages"]["skip"]["outcome"] == "not run"
    assert "planned 100 s" in results["stages"]["skip"]["reason"]
    assert code == 1
    first = results["stages"]["good"]["at"]
    code, results, _ = run(tmp_path, {"good": {}, "skip": long}, "--minutes", "1", "--resume")
    assert (code, results["stages"]["skip"]["outcome"]) == (0, "skipped"), "the first of a command always starts"
    assert results["stages"]["good"]["at"] == first
    assert len(results["commands"]) == 2


def test_a_result_stays_where_no_time_or_no_gpu_is_left_for_a_new_one(tmp_path: Path) -> None:
    first = {"outcome": "passed", "reason": "", "figures": {"GB/s": 2.5}}
    stages = [
        run_stages.Stage(name=name, tests=(), shows="", planned_s=100, deadline_s=200, gpus=gpus)
        for name, gpus in (("measured", 1), ("for two", 2), ("new", 1))
    ]
    results = Results(tmp_path, "cuda")
    for stage in stages[:2]:
        results.put(stage, **first)
    assert run_stages.run(stages, results, minutes=0, gpus=1) == ["measured", "new"]
    found = json.loads((tmp_path / "results.json").read_text())["stages"]
    assert [found[name] | first == found[name] for name in ("measured", "for two")] == [True, True]
    assert found["new"]["outcome"] == "not run"


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "{}", "[]", '{"device": "cpu", "commands": {}, "stages": {}}'),
        *('{"device": "cpu", "commands": [1], "stages": {}}', '{"device": "cpu", "commands": [], "stages": {"x": {}}}'),
    ],
)
def test_damaged_results_are_named(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "results.json").write_text(text)
    with pytest.raises(SystemExit):
        run_stages.main(["--device", "cpu", "--folder", str(tmp_path)])
    error = capsys.readouterr().err
    assert f"{tmp_path / 'results.json'} is damaged" in error
    assert "remove it, or name another --folder" in error
    with pytest.raises(SystemExit):
        run_stages.main(["--device", "cpu", "--folder", str(tmp_path / "results.json")])
    assert f"--folder {tmp_path / 'results.json'} cannot be used" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("torch", "message"),
    [
        ("raise ImportError('libcudart.so.13 is missing')", "ImportError: libcudart.so.13 is missing"),
        ("import time; time.sleep(60)", "torch did not count the GPUs within 2 s"),
    ],
)
def test_a_torch_that_cannot_count_is_no_missing_gpu(
    torch: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "torch.py").write_text(torch)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(run_stages, "DRIVER_S", 2.0 if "sleep" in torch else 60.0)
    with pytest.raises(SystemExit):
        run_stages.main(["--folder", str(tmp_path / "results")])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("minutes", ["0", "-1", "nan", "inf", "x"])
def test_minutes_are_a_finite_number_above_0(minutes: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run_stages.main(["--device", "cpu", f"--minutes={minutes}"])
    assert "argument --minutes: " in capsys.readouterr().err


def test_empty_names_of_stages_do_not_count(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run_stages.main(["--device", "cpu", "--stages", ", "])
    assert "--stages names none" in capsys.readouterr().err
    _, results, _ = run(tmp_path, {"skip": {}, "good": {}}, "--stages", "skip, ,")
    assert list(results["stages"]) == ["skip"]


@pytest.mark.slow
def test_the_limit_of_the_command_cuts_a_stage(tmp_path: Path) -> None:
    _, results, _ = run(tmp_path, {"hang": {}, "good": {}}, "--minutes", "0.1")
    assert results["stages"]["hang"]["outcome"] == "timed out"
    assert results["stages"]["hang"]["seconds"] < 40, "0.1 minutes, and the start of pytest on a busy machine"
    assert results["stages"]["good"]["outcome"] == "not run"


def test_a_stage_for_more_gpus_than_there_are_is_skipped(tmp_path: Path) -> None:
    code, results, _ = run(tmp_path, {"good": {"gpus": 2}, "skip": {}}, "--stages", "good", device="cuda")
    assert results["stages"]["good"] | {"at": ""} == {
        "shows": "what good shows",
        "planned_s": 1,
        "at": "",
        "seconds": 0.0,
        "reason": "needs 2 GPUs, 1 visible",
        "tests": {},
        "outcome": "skipped",
    }
    assert code == 0
    assert "skip" not in results["stages"]


@pytest.mark.slow
def test_real_stages_run_on_a_cpu(tmp_path: Path) -> None:
    """Two that are fast. `--device cpu` runs five more, some with servers: minutes."""
    names = ("log-prob kernel", "hashing")
    command = [sys.executable, "-m", "tests.gpu.runner.run_stages", "--device", "cpu", "--folder", str(tmp_path)]
    done = subprocess.run(
        [*command, "--stages", ",".join(names)], cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    stages = json.loads((tmp_path / "results.json").read_text())["stages"]
    assert {name: stage["outcome"] for name, stage in stages.items()} == dict.fromkeys(names, "passed")
    assert stages["hashing"]["figures"]["GB/s"].keys() >= {"a CPU server's hash (SHA-256)"}
    assert "No GPU took part" in (tmp_path / "gpu.md").read_text()


def test_without_a_gpu_the_command_says_what_it_can_do(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.gpu.runner.run_stages", "--folder", str(tmp_path)]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "torch sees no CUDA device; --device cpu" in done.stderr


def test_what_is_planned_fits_one_gpus_25_minutes() -> None:
    alone = [stage for stage in STAGES if stage.gpus == 1]
    assert sum(stage.planned_s for stage in alone) <= 24 * 60
    assert all(stage.planned_s < stage.deadline_s <= 9 * 60 for stage in STAGES), "a command may be as short as 9.5 min"
    assert all((ROOT / file).is_file() for stage in STAGES for file in stage.tests)
    assert len({stage.name for stage in STAGES}) == len(STAGES)


def test_every_gpu_test_belongs_to_a_stage() -> None:
    files = {f"tests/gpu/{file.name}" for file in (ROOT / "tests" / "gpu").glob("test_*.py")}
    assert files == {file for stage in STAGES for file in stage.tests}


@pytest.mark.parametrize(("device", "text"), [("cpu", "No GPU took part"), ("cuda", "Measured on NVIDIA H100")])
def test_the_page_says_where_it_was_measured(device: str, text: str) -> None:
    stage = {"shows": "x", "planned_s": 1, "outcome": "passed", "seconds": 2.0, "reason": "", "tests": {}}
    results = {"device": device, "commands": [], "stages": {"environment": stage | {"figures": {"GPU": "NVIDIA H100"}}}}
    assert text in page(results)
